"""The participants of a cooperative read: ranks of this node in a node group, other nodes through peer exchanges."""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from ckptd.shared.base.errors import CkptdError
from ckptd.shared.base.ids import JobKey, SaveId
from ckptd.shared.format.integrity import Integrity
from ckptd.shared.protocol.messages import AskPlace, LoadFrom, PlaceKnown, Reply, Request
from ckptd.shared.protocol.read_tree import ExchangeAddress, Place
from ckptd_client._daemon.link import Link
from ckptd_client._load.shared_read.node_group import NodeGroup, NodeReaders, Plan
from ckptd_client._load.shared_read.peer_exchange import PeerExchange
from ckptd_client._load.shared_read.plan import MAX_BLOCKS
from ckptd_client._load.shared_read.schedule import Blocks

log = logging.getLogger("ckptd_client")
_ANSWER_S: Final = 15.0  # for the daemon, which waits for that of another node
Ask = Callable[[Callable[[int], Request], float | None], Reply]
FindPlace = Callable[[ExchangeAddress | None], PlaceKnown]  # this node's place, for its exchange; raises CkptdError


class Met(NamedTuple):
    """What the nodes of a read agreed on, for one of them."""

    number: int
    plan: Plan
    addresses: Mapping[int, ExchangeAddress]  # of the nodes that send to it


@dataclass(slots=True)
class Participants:
    """The ranks of this node, and how its first rank finds other nodes, for one read.

    host: of this node, as others reach it. decided: whether this rank has begun to read, or has declined to.
    """

    job: JobKey
    here: NodeReaders
    host: str = ""
    find_place: FindPlace = field(default=lambda _own: PlaceKnown(reply_to=0))
    decided: bool = False

    def open(self, blocks: Blocks, mark: bytes) -> NodeGroup | None:
        """The group of this node's ranks, as NodeReaders.open gives it."""
        self.decided = True
        group = self.here.open(blocks, mark)
        if group is None:
            self.decline_to_nodes()
        return group

    def decline(self) -> None:
        """This rank does not take part: no other waits for it. Nothing once the read has begun."""
        if not self.decided:
            self.decided = True
            self.here.decline()
            self.decline_to_nodes()

    def decline_to_nodes(self) -> None:
        """Nodes that would wait for this node's address learn that it has none."""
        if self.here.is_leader:
            with contextlib.suppress(CkptdError):
                self.find_place(None)

    def open_exchange(self, integrity: Integrity) -> PeerExchange | None:
        """This node's exchange, which the caller closes; None without a port."""
        try:
            return PeerExchange(self.host, self.job, integrity)
        except OSError as error:
            log.warning("ckptd: no port at %s to read the store together with other nodes: %s", self.host, error)
            self.decline_to_nodes()
            return None

    def meet(self, exchange: PeerExchange, wants: bytes, blocks: Blocks) -> Met | None:
        """Agrees with the other nodes; None: this one reads alone. wants: the bitmap of its blocks. Blocks."""
        if blocks.total > MAX_BLOCKS:
            log.warning("ckptd: %d blocks, more than %d: each node reads by itself", blocks.total, MAX_BLOCKS)
            exchange.refuse()
            self.decline_to_nodes()
            return None
        try:
            found = self.find_place(exchange.address)
        except CkptdError as error:
            log.info("ckptd: %s: this node reads by itself", error)
            found = PlaceKnown(reply_to=0)
        if not found.count:
            exchange.refuse()
            return None
        place = Place(found.number, found.count)
        return Met(found.number, *exchange.meet(place, found.parent, wants, blocks, self.here.save))


@contextlib.contextmanager
def leaving_on_error(participants: Participants | None) -> Iterator[None]:
    """What fails before the read keeps no other rank waiting for this one."""
    try:
        yield
    except BaseException:
        if participants is not None:
            participants.decline()
        raise


FindParticipants = Callable[[SaveId], Participants | None]  # of a checkpoint, this rank included


def no_participants(_save: SaveId) -> None:
    """This rank reads alone."""


def participants_of_order(link: Link, order: LoadFrom, save: SaveId, ask: Ask) -> Participants:
    """The ranks that the daemons sent to the store. ask: as Link.ask."""
    return _participants(link, save, tuple(order.readers), order.read, ask)


def all_ranks(link: Link, ask: Ask) -> FindParticipants:
    """All ranks of the job, which read the same checkpoint: each calls this, and asks for participants once.

    If a rank then does not read, the others wait a bounded time for it. ask: as Link.ask, from any thread.
    """
    read = f"all.{next(link.reads)}"
    return lambda save: _participants(link, save, link.ranks_here, read if link.nodes > 1 else "", ask)


def _participants(link: Link, save: SaveId, readers: tuple[int, ...], read: str, ask: Ask) -> Participants:
    here = NodeReaders(link.slots.directory, link.group.session, save, readers, link.group.rank, read)

    def find_place(own: ExchangeAddress | None) -> PlaceKnown:
        answer = ask(lambda seq: AskPlace(seq=seq, read=read, exchange=own), time.monotonic() + _ANSWER_S)
        assert isinstance(answer, PlaceKnown)  # noqa: S101 - the reply to AskPlace
        return answer

    return Participants(link.job, here, link.host, find_place)
