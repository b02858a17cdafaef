"""Where the daemons of a job meet: rank 0 offers its daemon, each rank compares, and all continue or fail together.

No rank learns where the others run: their daemons do. A rank sends a problem in place of its consent, so that all
ranks raise it instead of waiting.
"""

import contextlib
import os
import secrets
from collections.abc import Iterator

import msgspec

from ckptd.shared.base.errors import CkptdError, ConfigError, ConnectError, UsageError, of_code
from ckptd.shared.format.integrity import Integrity
from ckptd.shared.format.schemes import DEFAULT, Scheme
from ckptd.shared.protocol.endpoints import check_endpoints
from ckptd.shared.protocol.messages import NodeInfo
from ckptd.shared.protocol.topology import TICKET_NBYTES, Peer, Rendezvous
from ckptd_client._local.rank import Group

_MAX_TEXT = 2000
_OWN_JOBS = {"job": "; for a job of each rank's own: connect(job=..., alone=True)"}


class RankRecord(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A rank's node and the arguments of connect. Rank 0's is sent to all, the others compare theirs with it."""

    host: str
    arena: str
    peer: Peer  # the node's daemon
    integrity: str
    redundancy: Scheme | None = None  # connect's argument
    set_size: int | None = None
    alike: tuple[tuple[str, str], ...] = ()  # names and values of other arguments that must be equal on all ranks


class _Offer(msgspec.Struct, frozen=True, array_like=True):
    record: RankRecord
    rendezvous: Rendezvous


class _Problem(msgspec.Struct, frozen=True, array_like=True):
    host: str
    code: str
    message: str
    hint: str
    whole: bool = False  # the message says which ranks it is about


_encoder = msgspec.msgpack.Encoder()
_offers = msgspec.msgpack.Decoder(_Offer)
_problems = msgspec.msgpack.Decoder(_Problem)


def record_of(
    info: NodeInfo,
    arena: str,
    redundancy: Scheme | None,
    set_size: int | None,
    alike: tuple[tuple[str, str], ...] = (),
) -> RankRecord:
    """The record of a rank that has found its daemon."""
    return RankRecord(
        host=os.uname().nodename,
        arena=arena,
        peer=info.peer,
        integrity=info.integrity,
        redundancy=redundancy,
        set_size=set_size,
        alike=alike,
    )


@contextlib.contextmanager
def announce_failure(group: Group) -> Iterator[None]:
    """Sends an error that occurs inside to the other ranks, in place of this rank's consent, and raises it."""
    try:
        yield
    except Exception as error:
        with contextlib.suppress(Exception):  # the error of this rank has the cause
            group.settle(b"", _problem_of(error))
        raise


def _problem_of(error: Exception, *, whole: bool = False) -> bytes:
    hint = error.hint if isinstance(error, CkptdError) else ""
    text = error.message if isinstance(error, CkptdError) else f"{type(error).__name__}: {error}"
    code = error.code if isinstance(error, CkptdError) else CkptdError.code
    return _encoder.encode(_Problem(os.uname().nodename, code, text[:_MAX_TEXT], hint[:_MAX_TEXT], whole))


def check_alike(info: NodeInfo, integrity: Integrity) -> None:
    """Raises ConfigError unless the daemon has the same integrity as this client."""
    if info.integrity != integrity.label:
        text = f"the daemon of node {info.peer.node!r} has integrity {info.integrity}, this client {integrity.label}"
        hint = "give both the same: integrity_key_file (CKPTD_INTEGRITY_KEY_FILE) for the daemon and for connect"
        raise ConfigError(text, hint=hint)


def agree(group: Group, record: RankRecord, info: NodeInfo) -> Rendezvous:
    """Where the daemons meet, once per connect. Collective; blocks for every rank. Raises one error on all ranks."""
    if not group.has_messages:
        return rendezvous_of(record, info, several=False)
    offer = problem = b""
    try:
        if group.rank == 0:
            offer = _encoder.encode(_Offer(record, rendezvous_of(record, info, several=True)))
    except CkptdError as error:
        problem = _problem_of(error, whole=True)
    found = _offers.decode(_settled(group, offer, problem))
    try:
        compare(found.record, record, group.rank)
    except CkptdError as error:
        problem = _problem_of(error, whole=True)
    _settled(group, b"", problem)
    return found.rendezvous


def _settled(group: Group, offer: bytes, problem: bytes) -> bytes:
    """What rank 0 offers. Raises the problem of a rank."""
    try:
        settled = group.settle(offer, problem)
    except Exception as error:  # noqa: BLE001 - the transport may raise any exception
        text = f"the ranks could not agree where their daemons meet: {type(error).__name__}: {error}"
        raise ConnectError(text, hint="look for a rank that ended first") from None
    if settled.problem:
        found = _problems.decode(settled.problem)
        where = "" if found.whole else f"rank {settled.rank} on {found.host} could not connect: "
        raise of_code(found.code, where + found.message, found.hint)
    return settled.offer


def rendezvous_of(record: RankRecord, info: NodeInfo, *, several: bool) -> Rendezvous:
    """What rank 0 offers. several: ranks may run on other nodes. Raises ConfigError."""
    scheme = record.redundancy if record.redundancy is not None else info.scheme
    set_size = record.set_size if record.set_size is not None else info.set_size
    if set_size > scheme.max_set_size:
        text = f"sets of {set_size} nodes are too large for redundancy='{scheme}'"
        hint = f"set_size={scheme.max_set_size} or less, or redundancy='{scheme.for_sets_of(set_size)}'"
        raise ConfigError(text, hint=hint)
    asked = record.redundancy is not None or scheme is not DEFAULT
    ticket = secrets.token_bytes(TICKET_NBYTES) if several else b""
    return Rendezvous(info.peer, ticket, scheme, set_size, asked)


def compare(first: RankRecord, own: RankRecord, rank: int) -> None:
    """Raises UsageError or ConfigError where this rank and rank 0 cannot be of one job. first: of rank 0."""
    for (name, theirs), (_, given) in zip(first.alike, own.alike, strict=True):
        if given != theirs:
            text = f"ranks disagree: rank 0 connects with {name}={theirs}, rank {rank} with {name}={given}"
            raise UsageError(text, hint=f"connect with the same {name}= on all ranks{_OWN_JOBS.get(name, '')}")
    if (own.redundancy, own.set_size) != (first.redundancy, first.set_size):
        given, others = _redundancy_text(first), _redundancy_text(own)
        text = f"ranks disagree: rank 0 connects with {given}, rank {rank} with {others}"
        raise UsageError(text, hint="connect with the same redundancy= and set_size= on all ranks")
    if own.integrity != first.integrity:
        text = f"rank 0 and its daemon have integrity {first.integrity}, rank {rank} has {own.integrity}"
        raise ConfigError(
            f"ranks disagree: {text}",
            hint="give all daemons and all ranks of a job the same integrity_key_file, or none",
        )
    if own.peer.node == first.peer.node:
        if own.peer.arena != first.peer.arena:
            where = f"{first.arena} on {first.host} (rank 0) and {own.arena} on {own.host} (rank {rank})"
            raise ConfigError(
                f"two daemons call themselves node {own.peer.node!r}: {where}",
                hint="give each daemon a name of its own (CKPTD_NODE), or all ranks of a node one arena (CKPTD_ARENA)",
            )
        return
    check_endpoints((first.peer, own.peer), (first.host, own.host))


def _redundancy_text(record: RankRecord) -> str:
    redundancy = None if record.redundancy is None else str(record.redundancy)
    return f"redundancy={redundancy!r}, set_size={record.set_size}"


def why_unprotected(rendezvous: Rendezvous, nodes: int, node: str) -> str:
    """The reason, for a message, why no scheme is in force for the node. nodes: of the job."""
    if rendezvous.scheme is Scheme.NONE:
        return "redundancy is none"
    return "all ranks of the job run on one node" if nodes <= 1 else f"node {node} has no other node in its set"
