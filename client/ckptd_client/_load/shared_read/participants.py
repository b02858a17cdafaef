"""The participants of a cooperative read: ranks of this node in a node group, other nodes through peer exchanges."""

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec

from ckptd.shared.base.ids import JobKey, SaveId
from ckptd.shared.protocol.messages import LoadFrom
from ckptd.shared.protocol.read_groups import ExchangeAddress, participants
from ckptd_client._daemon.link import Link
from ckptd_client._load.shared_read.node_group import Rendezvous
from ckptd_client._load.shared_read.peer_exchange import PeerExchange

log = logging.getLogger("ckptd_client")
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(ExchangeAddress | None)


@dataclass(frozen=True, slots=True)
class Participants:
    """The ranks of this node, and the addresses of all nodes. exchange: open at the one rank that represents a node."""

    job: JobKey
    rendezvous: Rendezvous
    exchanges: tuple[ExchangeAddress, ...] = ()
    exchange: PeerExchange | None = None


FindParticipants = Callable[[SaveId], Participants | None]  # of a checkpoint, this rank included


def no_participants(_save: SaveId) -> None:
    """This rank reads alone."""


@contextlib.contextmanager
def peer_exchange(link: Link) -> Iterator[PeerExchange | None]:
    """Opens this node's exchange with the job's other nodes while inside; None where another rank represents it."""
    host = link.topology.exchange_host(link.group.rank) if link.topology is not None else ""
    exchange = None
    if host:
        try:
            exchange = PeerExchange(host, link.job, link.settings.integrity)
        except OSError as error:
            log.warning("ckptd: no port at %s to read the store together with other nodes: %s", host, error)
    try:
        yield exchange
    finally:
        if exchange is not None:
            exchange.close()


def participants_of_order(link: Link, order: LoadFrom, save: SaveId, exchange: PeerExchange | None) -> Participants:
    """The ranks that the daemons sent to the store."""
    return _participants(link, save, tuple(order.readers), tuple(order.exchanges), order.own_exchange, exchange)


@contextlib.contextmanager
def all_ranks(link: Link) -> Iterator[FindParticipants]:
    """All ranks of the job, which read the same checkpoint. Collective: blocks until every rank calls it.

    If a rank then does not read, the others wait a bounded time for it.
    """
    group, topology = link.group, link.topology
    assert topology is not None  # noqa: S101 - a connected link has one
    with peer_exchange(link) as exchange:
        own = exchange.address if exchange is not None else None
        found = [own] if group.exchange is None else map(_decoder.decode, group.exchange(_encoder.encode(own)))
        addresses = [(rank, address) for rank, address in enumerate(found) if address is not None]
        here = topology.ranks_of(topology.home(group.rank))
        exchanges, node = participants(addresses, here)
        yield lambda save: _participants(link, save, here, tuple(exchanges), node, exchange)


def _participants(  # noqa: PLR0913, PLR0917
    link: Link,
    save: SaveId,
    readers: tuple[int, ...],
    exchanges: tuple[ExchangeAddress, ...],
    node: int,
    exchange: PeerExchange | None,
) -> Participants:
    rendezvous = Rendezvous(
        link.slots.directory,
        link.group.session,
        save,
        readers,
        link.group.rank,
        nodes=max(1, len(exchanges)),
        node=max(0, node),
    )
    return Participants(link.job, rendezvous, exchanges, exchange)
