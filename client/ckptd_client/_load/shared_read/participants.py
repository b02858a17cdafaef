"""Who reads a checkpoint on the store with this rank: ranks of its node at a board, other nodes through gates."""

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec

from ckptd.shared.base.ids import JobKey, SaveId
from ckptd.shared.protocol.messages import LoadFrom
from ckptd.shared.protocol.read_groups import Gate, company
from ckptd_client._daemon.link import Link
from ckptd_client._load.shared_read.node_group import Meeting
from ckptd_client._load.shared_read.peer_exchange import OpenGate

log = logging.getLogger("ckptd_client")
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Gate | None)


@dataclass(frozen=True, slots=True)
class Company:
    """Ranks of this node that meet, and nodes with gates. gate: this rank's own, if it speaks for its node."""

    job: JobKey
    meeting: Meeting
    gates: tuple[Gate, ...] = ()
    gate: OpenGate | None = None


Gathered = Callable[[SaveId], Company | None]  # who reads that checkpoint with this rank


def nobody(_save: SaveId) -> None:
    """This rank reads alone."""


@contextlib.contextmanager
def gate_of(link: Link) -> Iterator[OpenGate | None]:
    """The gate of this rank's node to the job's other nodes, open inside, if it is this rank's to open."""
    host = link.topology.gate_host(link.group.rank) if link.topology is not None else ""
    gate = None
    if host:
        try:
            gate = OpenGate(host, link.job, link.settings.integrity)
        except OSError as error:
            log.warning("ckptd: no port at %s to read the store together with other nodes: %s", host, error)
    try:
        yield gate
    finally:
        if gate is not None:
            gate.close()


def ordered(link: Link, order: LoadFrom, save: SaveId, gate: OpenGate | None) -> Company:
    """The ranks that the daemons sent to the store."""
    return _made(link, save, tuple(order.readers), tuple(order.gates), order.gate, gate)


@contextlib.contextmanager
def everybody(link: Link) -> Iterator[Gathered]:
    """All ranks of the job, that read the same checkpoint. Collective: blocks until every rank is here.

    A rank that then does not read costs the others some patience.
    """
    group, topology = link.group, link.topology
    assert topology is not None  # noqa: S101 - whoever has connected has one
    with gate_of(link) as gate:
        address = gate.address if gate is not None else None
        said = [address] if group.exchange is None else map(_decoder.decode, group.exchange(_encoder.encode(address)))
        gates = [(rank, found) for rank, found in enumerate(said) if found is not None]
        here = topology.ranks_of(topology.home(group.rank))
        companions, own = company(gates, here)
        yield lambda save: _made(link, save, here, tuple(companions), own, gate)


def _made(  # noqa: PLR0913, PLR0917
    link: Link, save: SaveId, readers: tuple[int, ...], gates: tuple[Gate, ...], own: int, gate: OpenGate | None
) -> Company:
    meeting = Meeting(
        link.slots.directory,
        link.group.session,
        save,
        readers,
        link.group.rank,
        nodes=max(1, len(gates)),
        node=max(0, own),
    )
    return Company(link.job, meeting, gates, gate)
