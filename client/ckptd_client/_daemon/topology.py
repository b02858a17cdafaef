"""Finds the topology of a job: each rank asks its daemon, ranks exchange records, and all compute the same topology.

A rank sends an error in place of its record, so that all ranks raise instead of waiting for it.
"""

import contextlib
import ipaddress
import os
from collections.abc import Iterator, Sequence

import msgspec

from ckptd.shared.base.errors import CkptdError, ConfigError, ConnectError, UsageError, of_code
from ckptd.shared.format.integrity import Integrity
from ckptd.shared.format.schemes import DEFAULT, Scheme
from ckptd.shared.protocol.messages import MAX_MESSAGE_NBYTES, NodeInfo
from ckptd.shared.protocol.topology import Peer, Topology
from ckptd_client._local.rank import Group

_MAX_TEXT = 2000
_MAX_TOPOLOGY_NBYTES = MAX_MESSAGE_NBYTES - (16 << 10)  # with room for the rest of Attach
_OWN_JOBS = {"job": "; for a job of each rank's own: connect(job=..., alone=True)"}
_ADDRESS_HINT = "set peer_address (CKPTD_PEER_ADDRESS) of that node's daemon to its address in the cluster's network"


class RankRecord(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The record of one rank for the others: its node and the arguments of connect, or its error."""

    host: str = ""
    arena: str = ""
    info: NodeInfo | None = None
    redundancy: Scheme | None = None  # connect's argument
    set_size: int | None = None
    alike: tuple[tuple[str, str], ...] = ()  # names and values of other arguments that must be equal on all ranks
    code: str = ""  # of the error
    message: str = ""
    hint: str = ""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(RankRecord)


def record_of(
    info: NodeInfo,
    arena: str,
    redundancy: Scheme | None,
    set_size: int | None,
    alike: tuple[tuple[str, str], ...] = (),
) -> RankRecord:
    """The record of a rank that has found its daemon."""
    host = os.uname().nodename
    return RankRecord(host=host, arena=arena, info=info, redundancy=redundancy, set_size=set_size, alike=alike)


@contextlib.contextmanager
def announce_failure(group: Group) -> Iterator[None]:
    """Sends an error that occurs inside to the other ranks, in place of this rank's record, and raises it."""
    try:
        yield
    except Exception as error:
        if group.exchange is not None:
            hint = error.hint if isinstance(error, CkptdError) else ""
            text = error.message if isinstance(error, CkptdError) else f"{type(error).__name__}: {error}"
            code = error.code if isinstance(error, CkptdError) else CkptdError.code
            record = RankRecord(host=os.uname().nodename, code=code, message=text[:_MAX_TEXT], hint=hint[:_MAX_TEXT])
            with contextlib.suppress(Exception):  # the error of this rank has the cause
                group.exchange(_encoder.encode(record))
        raise


def check_alike(info: NodeInfo, integrity: Integrity) -> None:
    """Raises ConfigError unless the daemon has the same integrity as this client."""
    if info.integrity != integrity.label:
        text = f"the daemon of node {info.peer.node!r} has integrity {info.integrity}, this client {integrity.label}"
        hint = "give both the same: integrity_key_file (CKPTD_INTEGRITY_KEY_FILE) for the daemon and for connect"
        raise ConfigError(text, hint=hint)


def gather(group: Group, record: RankRecord) -> Topology:
    """Exchanges records, once per connect. Collective; blocks for every rank. Raises the same error on all ranks."""
    if group.exchange is None:
        return topology_of([record] * group.world_size)
    try:
        frames = group.exchange(_encoder.encode(record))
    except Exception as error:  # noqa: BLE001 - the transport may raise any exception
        text = f"the ranks could not tell each other where they run: {type(error).__name__}: {error}"
        raise ConnectError(text, hint="look for a rank that ended first") from None
    return topology_of([_decoder.decode(frame) for frame in frames])


def topology_of(records: Sequence[RankRecord]) -> Topology:
    """The topology from all ranks' records, by rank. Pure. Raises the first rank's error, ConfigError, UsageError."""
    for rank, record in enumerate(records):
        if record.info is None:
            text = f"rank {rank} on {record.host} could not connect: {record.message}"
            raise of_code(record.code, text, record.hint)
    _check_alike(records)
    peers, homes, first_ranks = _places(records)
    _check_names(peers, first_ranks, records)
    _check_endpoints(peers, [records[rank].host for rank in first_ranks])
    first = records[0]
    assert first.info is not None  # noqa: S101 - checked above
    scheme = first.redundancy if first.redundancy is not None else first.info.scheme
    set_size = first.set_size if first.set_size is not None else first.info.set_size
    if set_size > scheme.max_set_size:
        text = f"sets of {set_size} nodes are too large for redundancy='{scheme}'"
        hint = f"set_size={scheme.max_set_size} or less, or redundancy='{scheme.for_sets_of(set_size)}'"
        raise ConfigError(text, hint=hint)
    asked = first.redundancy is not None or scheme is not DEFAULT
    topology = Topology(peers=tuple(peers), homes=tuple(homes), scheme=scheme, set_size=set_size, asked=asked)
    nbytes = len(_encoder.encode(topology))
    if nbytes > _MAX_TOPOLOGY_NBYTES:  # ZeroMQ would end the connection without an error
        text = f"the topology of {len(peers)} nodes takes {nbytes} bytes, and {_MAX_TOPOLOGY_NBYTES} fit in a message"
        raise ConfigError(text, hint="shorter names (CKPTD_NODE, CKPTD_DOMAIN), or fewer nodes to a job")
    return topology


def _places(records: Sequence[RankRecord]) -> tuple[list[Peer], list[int], list[int]]:
    """Daemons in the order of their lowest rank, the daemon of each rank, and the lowest rank of each daemon."""
    places: dict[tuple[str, str], int] = {}
    peers: list[Peer] = []
    homes: list[int] = []
    first_ranks: list[int] = []
    for rank, record in enumerate(records):
        assert record.info is not None  # noqa: S101 - the caller has checked
        peer = record.info.peer
        place = places.setdefault((peer.node, peer.arena), len(peers))
        if place == len(peers):
            peers.append(peer)
            first_ranks.append(rank)
        homes.append(place)
    return peers, homes, first_ranks


def _check_alike(records: Sequence[RankRecord]) -> None:
    for rank, record in enumerate(records):
        for (name, first), (_, given) in zip(records[0].alike, record.alike, strict=True):
            if given != first:
                text = f"ranks disagree: rank 0 connects with {name}={first}, rank {rank} with {name}={given}"
                raise UsageError(text, hint=f"connect with the same {name}= on all ranks{_OWN_JOBS.get(name, '')}")
    asked = (records[0].redundancy, records[0].set_size)
    for rank, record in enumerate(records):
        if (record.redundancy, record.set_size) != asked:
            given, others = _redundancy_text(records[0]), _redundancy_text(record)
            text = f"ranks disagree: rank 0 connects with {given}, rank {rank} with {others}"
            raise UsageError(text, hint="connect with the same redundancy= and set_size= on all ranks")
    labels = [record.info.integrity for record in records if record.info is not None]
    other = next((rank for rank, integrity in enumerate(labels) if integrity != labels[0]), None)
    if other is not None:
        text = f"ranks disagree: rank 0 and its daemon have integrity {labels[0]}, rank {other} has {labels[other]}"
        raise ConfigError(text, hint="give all daemons and all ranks of a job the same integrity_key_file, or none")


def _redundancy_text(record: RankRecord) -> str:
    redundancy = None if record.redundancy is None else str(record.redundancy)
    return f"redundancy={redundancy!r}, set_size={record.set_size}"


def _check_names(peers: Sequence[Peer], first_ranks: Sequence[int], records: Sequence[RankRecord]) -> None:
    seen: dict[str, int] = {}
    for peer, rank in zip(peers, first_ranks, strict=True):
        other = seen.setdefault(peer.node, rank)
        if other != rank:
            where = " and ".join(f"{records[r].arena} on {records[r].host} (rank {r})" for r in (other, rank))
            raise ConfigError(
                f"two daemons call themselves node {peer.node!r}: {where}",
                hint="give each daemon a name of its own (CKPTD_NODE), or all ranks of a node one arena (CKPTD_ARENA)",
            )


def _check_endpoints(peers: Sequence[Peer], hosts: Sequence[str]) -> None:
    """Checks that the daemons can reach each other, as far as their addresses show. A lone node needs no address."""
    if len(peers) == 1:
        return
    seen: dict[str, str] = {}
    for peer, host in zip(peers, hosts, strict=True):
        address = _address(peer.endpoint)
        who = f"the daemon of node {peer.node!r}"
        if address is None or address.is_unspecified:
            shown = peer.endpoint or "nowhere"
            raise ConfigError(f"{who} is reached at {shown} by the job's other nodes", hint=_ADDRESS_HINT)
        stranger = next((other for other in hosts if other != host), None)
        if address.is_loopback and stranger is not None:
            text = f"{who} is reached at {peer.endpoint}, which leads from host {stranger} to {stranger} itself"
            raise ConfigError(text, hint=_ADDRESS_HINT)
        twin = seen.setdefault(peer.endpoint, peer.node)
        if twin != peer.node:
            raise ConfigError(f"{who} and that of {twin!r} are both reached at {peer.endpoint}", hint=_ADDRESS_HINT)


_NAMED = ipaddress.ip_address("192.0.2.1")  # in place of any name but localhost: the peer that connects resolves it
_LOCAL = ipaddress.ip_address("127.0.0.1")


def _address(endpoint: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address of an endpoint's host; None if there is no endpoint."""
    host = endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    if not host:
        return None
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return _LOCAL if host == "localhost" or host.endswith(".localhost") else _NAMED


def why_unprotected(topology: Topology, rank: int) -> str:
    """The reason, for a message, why no scheme is in force for the rank's node."""
    if topology.scheme is Scheme.NONE:
        return "redundancy is none"
    if len(topology.peers) == 1:
        return "all ranks of the job run on one node"
    return f"node {topology.home(rank)} has no other node in its set"
