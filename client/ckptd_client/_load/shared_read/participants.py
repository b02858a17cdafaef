"""The participants of a cooperative read: ranks of this node in a node group, other nodes through peer exchanges."""

import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Self

from ckptd.shared.base.errors import CkptdError
from ckptd.shared.base.ids import JobKey, SaveId
from ckptd.shared.format.integrity import Integrity
from ckptd.shared.protocol.messages import AskPlace, LoadFrom, PlaceKnown, Reply, Request
from ckptd.shared.protocol.read_tree import ExchangeAddress, Place
from ckptd_client._daemon.link import Link
from ckptd_client._load.shared_read.found import Found, refuse_others
from ckptd_client._load.shared_read.meeting import Meeting, NodeReaders
from ckptd_client._load.shared_read.node_group import NodeGroup, Plan
from ckptd_client._load.shared_read.peer_exchange import PeerExchange
from ckptd_client._load.shared_read.plan import MAX_BLOCKS
from ckptd_client._load.shared_read.schedule import Blocks

log = logging.getLogger("ckptd_client")
_ANSWER_S: Final = 15.0  # for the daemon, which waits for that of another node
_ALL: Final = "all"  # reads by all ranks
Ask = Callable[[Callable[[int], Request], float | None], Reply]
# This node's place, for its exchange and the number of the read; raises CkptdError.
FindPlace = Callable[[ExchangeAddress | None, int], PlaceKnown]


class Met(NamedTuple):
    """What the nodes of a read agreed on, for one of them."""

    number: int
    plan: Plan
    addresses: Mapping[int, ExchangeAddress]  # of the nodes that send to it


@dataclass(slots=True)
class Participants:
    """One rank's part in one read, with the ranks of its node, and how its first rank finds other nodes.

    A context that is entered before anything of the checkpoint is opened. After its end, whatever the reason,
    no rank and no node waits for this rank. host: of this node, as others reach it. save: once it is known.
    counted: takes the number of the read, as all count it.
    """

    job: JobKey
    here: NodeReaders
    save: SaveId | None = None
    host: str = ""
    find_place: FindPlace = field(default=lambda _own, _number: PlaceKnown(reply_to=0))
    counted: Callable[[int], None] = field(default=lambda _number: None)
    _meeting: Meeting | None = None
    _group: NodeGroup | None = None
    _is_known: bool = False  # whether other nodes learn an address of this one, or need none

    def __enter__(self) -> Self:
        self._is_known = not (self.here.is_shared and self.here.is_leader)
        self._meeting = self.here.enter()
        return self

    def __exit__(self, *_error: object) -> None:
        self.leave()

    def open(self, blocks: Blocks, content: bytes) -> NodeGroup | None:
        """The group of this node's ranks, for the checkpoint of save; None: this rank reads alone.

        content: differs where bytes of the checkpoint do.
        """
        assert self.save is not None  # noqa: S101 - known before its blocks
        if self._meeting is not None and self._group is None:
            found = Found.of(self.here.rank, self.save, content, self.here.number)
            try:
                self._group = NodeGroup(self._meeting, blocks, found)
            except OSError as error:  # no memory, for example
                log.info("ckptd: rank %d reads by itself: %s", self.here.rank, error)
        if self._group is None:
            self.leave()
        return self._group

    def leave(self) -> None:
        """This rank takes part no more: no other waits for it, and no other node for this one. Idempotent."""
        meeting, self._meeting = self._meeting, None
        group, self._group = self._group, None
        if group is not None:
            group.leave()
        if meeting is not None:
            meeting.decline()  # unless it has joined
            meeting.close()
        self.decline_to_nodes()

    def leave_quietly(self) -> None:
        """The same, without a word to the daemon: from a thread that may be in a call to it."""
        self._is_known = True
        self.leave()

    def decline_to_nodes(self) -> None:
        """Nodes that would wait for this node's address learn that it has none."""
        if not self._is_known:
            with contextlib.suppress(CkptdError):
                self._placed(None, self.here.number)

    def _placed(self, own: ExchangeAddress | None, number: int) -> PlaceKnown:
        self._is_known = True
        return self.find_place(own, number)

    def open_exchange(self, found: Found, integrity: Integrity) -> PeerExchange | None:
        """This node's exchange, which the caller closes; None without a port or a thread for it."""
        assert self.save is not None  # noqa: S101 - known before its blocks
        try:
            return PeerExchange(self.host, self.job, self.save, found, integrity)
        except (OSError, RuntimeError) as error:
            log.warning("ckptd: no port at %s to read the store together with other nodes: %s", self.host, error)
            self.decline_to_nodes()
            return None

    def meet(self, exchange: PeerExchange, wants: bytes, blocks: Blocks, found: Found) -> Met | None:
        """Agrees with the other nodes; None: this one reads alone. wants: the bitmap of its blocks. Blocks.

        found: what this node's ranks found. Raises DifferentError if other nodes found another checkpoint in a read of
        all ranks.
        """
        if blocks.total > MAX_BLOCKS:
            log.warning("ckptd: %d blocks, more than %d: each node reads by itself", blocks.total, MAX_BLOCKS)
            exchange.refuse()
            self.decline_to_nodes()
            return None
        try:
            place = self._placed(exchange.address, found.read)
        except CkptdError as error:
            log.info("ckptd: %s: this node reads by itself", error)
            place = PlaceKnown(reply_to=0)
        if not place.count:
            exchange.refuse()
            return None
        orders = exchange.meet(Place(place.number, place.count), place.parent, wants, blocks, found)
        self.counted(orders.found[0].read)
        refuse_others(found, orders.found)
        plan = Plan(orders.edges.by_source(place.number), orders.edges.by_target(place.number))
        return Met(place.number, plan, orders.addresses)


def taking_part(participants: Participants | None) -> contextlib.AbstractContextManager[Participants | None]:
    """Participants, entered; nothing for a rank that reads alone."""
    return participants if participants is not None else contextlib.nullcontext()


def participants_of_order(link: Link, order: LoadFrom, ask: Ask) -> Participants:
    """The ranks that the daemons sent to the store. ask: as Link.ask."""
    here = NodeReaders(
        link.slots.directory, link.group.session, tuple(order.readers), link.group.rank, order.read, order.shared
    )
    return _participants(link, here, ask, lambda _number: order.read, order.save)


def all_ranks(link: Link, ask: Ask) -> Participants:
    """All ranks of the job, which call this once for each read, before anything that may fail on one of them.

    If a rank then does not read, the others wait a bounded time for it. ask: as Link.ask, from any thread. Ranks that
    count their reads differently go on with the highest number once they meet.
    """
    link.reads += 1
    here = NodeReaders(
        link.slots.directory, link.group.session, link.ranks_here, link.group.rank, _ALL, link.nodes > 1, link.reads
    )
    participants = _participants(link, here, ask, lambda number: f"{_ALL}.{number}")

    def counted(number: int) -> None:
        link.reads = max(link.reads, number)

    participants.counted = counted
    return participants


def _participants(
    link: Link, here: NodeReaders, ask: Ask, name: Callable[[int], str], save: SaveId | None = None
) -> Participants:
    def find_place(own: ExchangeAddress | None, number: int) -> PlaceKnown:
        answer = ask(lambda seq: AskPlace(seq=seq, read=name(number), exchange=own), time.monotonic() + _ANSWER_S)
        assert isinstance(answer, PlaceKnown)  # noqa: S101 - the reply to AskPlace
        return answer

    return Participants(link.job, here, save, link.host, find_place)
