"""Where the ranks of a job run: each asks its daemon, all tell each other, and every rank comes to the same topology.

What fails on one rank is told like everything else, so that all ranks raise instead of waiting for it.
"""

import contextlib
import ipaddress
import os
from collections.abc import Iterator, Sequence

import msgspec

from ckptd.shared.base import errors
from ckptd.shared.base.errors import CkptdError, ConfigError, ConnectError, UsageError
from ckptd.shared.format.integrity import Integrity
from ckptd.shared.format.schemes import DEFAULT, Scheme
from ckptd.shared.protocol.messages import MAX_MESSAGE_NBYTES, NodeInfo
from ckptd.shared.protocol.topology import Peer, Topology
from ckptd_client._local.rank import Group

_MAX_TEXT = 2000
_MAX_TOPOLOGY_NBYTES = MAX_MESSAGE_NBYTES - (16 << 10)  # with room for the rest of Attach
_KINDS: dict[str, type[CkptdError]] = {
    kind.code: kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, CkptdError)
}
_OWN_JOBS = {"job": "; for a job of each rank's own: connect(job=..., alone=True)"}
_ADDRESS_HINT = "set peer_address (CKPTD_PEER_ADDRESS) of that node's daemon to its address in the cluster's network"


class Word(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What one rank tells the others: where it runs and what it was asked for, or what went wrong."""

    host: str = ""
    arena: str = ""
    info: NodeInfo | None = None
    redundancy: Scheme | None = None  # connect's argument
    set_size: int | None = None
    alike: tuple[tuple[str, str], ...] = ()  # other arguments that all ranks must give alike: names, and what is given
    code: str = ""  # of the error
    message: str = ""
    hint: str = ""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Word)


def word_of(
    info: NodeInfo,
    arena: str,
    redundancy: Scheme | None,
    set_size: int | None,
    alike: tuple[tuple[str, str], ...] = (),
) -> Word:
    """The word of a rank that has found its daemon."""
    host = os.uname().nodename
    return Word(host=host, arena=arena, info=info, redundancy=redundancy, set_size=set_size, alike=alike)


@contextlib.contextmanager
def failure_told(group: Group) -> Iterator[None]:
    """Tells the other ranks what goes wrong inside, in place of this rank's word, and raises it here."""
    try:
        yield
    except Exception as error:
        if group.exchange is not None:
            hint = error.hint if isinstance(error, CkptdError) else ""
            text = error.message if isinstance(error, CkptdError) else f"{type(error).__name__}: {error}"
            code = error.code if isinstance(error, CkptdError) else CkptdError.code
            word = Word(host=os.uname().nodename, code=code, message=text[:_MAX_TEXT], hint=hint[:_MAX_TEXT])
            with contextlib.suppress(Exception):  # what went wrong here says more
                group.exchange(_encoder.encode(word))
        raise


def check_alike(info: NodeInfo, integrity: Integrity) -> None:
    """Raises ConfigError unless the daemon proves what it holds as this client does."""
    if info.integrity != integrity.label:
        text = f"the daemon of node {info.peer.node!r} has integrity {info.integrity}, this client {integrity.label}"
        hint = "give both the same: integrity_key_file (CKPTD_INTEGRITY_KEY_FILE) for the daemon and for connect"
        raise ConfigError(text, hint=hint)


def gather(group: Group, word: Word) -> Topology:
    """Collective, once per connect; blocks until every rank has spoken. Raises the same error on all ranks."""
    if group.exchange is None:
        return topology_of([word] * group.world_size)
    try:
        frames = group.exchange(_encoder.encode(word))
    except Exception as error:  # noqa: BLE001 - whatever their transport raises
        text = f"the ranks could not tell each other where they run: {type(error).__name__}: {error}"
        raise ConnectError(text, hint="look for a rank that ended first") from None
    return topology_of([_decoder.decode(frame) for frame in frames])


def topology_of(words: Sequence[Word]) -> Topology:
    """What all ranks' words, by rank, come to. Pure. Raises the first rank's error, ConfigError, UsageError."""
    for rank, word in enumerate(words):
        if word.info is None:
            kind = _KINDS.get(word.code, CkptdError)
            raise kind(f"rank {rank} on {word.host} could not connect: {word.message}", hint=word.hint)
    _check_alike(words)
    peers, homes, speakers = _places(words)
    _check_names(peers, speakers, words)
    _check_endpoints(peers, [words[rank].host for rank in speakers])
    first = words[0]
    assert first.info is not None  # noqa: S101 - looked above
    scheme = first.redundancy if first.redundancy is not None else first.info.scheme
    set_size = first.set_size if first.set_size is not None else first.info.set_size
    if set_size > scheme.max_set_size:
        text = f"sets of {set_size} nodes are too large for redundancy='{scheme}'"
        hint = f"set_size={scheme.max_set_size} or less, or redundancy='{scheme.for_sets_of(set_size)}'"
        raise ConfigError(text, hint=hint)
    asked = first.redundancy is not None or scheme is not DEFAULT
    topology = Topology(peers=tuple(peers), homes=tuple(homes), scheme=scheme, set_size=set_size, asked=asked)
    nbytes = len(_encoder.encode(topology))
    if nbytes > _MAX_TOPOLOGY_NBYTES:  # ZeroMQ would end the connection over it without a word
        text = f"the topology of {len(peers)} nodes takes {nbytes} bytes, and {_MAX_TOPOLOGY_NBYTES} fit in a message"
        raise ConfigError(text, hint="shorter names (CKPTD_NODE, CKPTD_DOMAIN), or fewer nodes to a job")
    return topology


def _places(words: Sequence[Word]) -> tuple[list[Peer], list[int], list[int]]:
    """Daemons in the order of their lowest rank, the daemon of each rank, and the lowest rank of each daemon."""
    places: dict[tuple[str, str], int] = {}
    peers: list[Peer] = []
    homes: list[int] = []
    speakers: list[int] = []
    for rank, word in enumerate(words):
        assert word.info is not None  # noqa: S101 - the caller looked
        peer = word.info.peer
        place = places.setdefault((peer.node, peer.arena), len(peers))
        if place == len(peers):
            peers.append(peer)
            speakers.append(rank)
        homes.append(place)
    return peers, homes, speakers


def _check_alike(words: Sequence[Word]) -> None:
    for rank, word in enumerate(words):
        for (name, first), (_, given) in zip(words[0].alike, word.alike, strict=True):
            if given != first:
                text = f"ranks disagree: rank 0 connects with {name}={first}, rank {rank} with {name}={given}"
                raise UsageError(text, hint=f"connect with the same {name}= on all ranks{_OWN_JOBS.get(name, '')}")
    asked = (words[0].redundancy, words[0].set_size)
    for rank, word in enumerate(words):
        if (word.redundancy, word.set_size) != asked:
            text = f"ranks disagree: rank 0 connects with {_said(words[0])}, rank {rank} with {_said(word)}"
            raise UsageError(text, hint="connect with the same redundancy= and set_size= on all ranks")
    said = [word.info.integrity for word in words if word.info is not None]
    other = next((rank for rank, integrity in enumerate(said) if integrity != said[0]), None)
    if other is not None:
        text = f"ranks disagree: rank 0 and its daemon have integrity {said[0]}, rank {other} has {said[other]}"
        raise ConfigError(text, hint="give all daemons and all ranks of a job the same integrity_key_file, or none")


def _said(word: Word) -> str:
    redundancy = None if word.redundancy is None else str(word.redundancy)
    return f"redundancy={redundancy!r}, set_size={word.set_size}"


def _check_names(peers: Sequence[Peer], speakers: Sequence[int], words: Sequence[Word]) -> None:
    seen: dict[str, int] = {}
    for peer, rank in zip(peers, speakers, strict=True):
        other = seen.setdefault(peer.node, rank)
        if other != rank:
            where = " and ".join(f"{words[r].arena} on {words[r].host} (rank {r})" for r in (other, rank))
            raise ConfigError(
                f"two daemons call themselves node {peer.node!r}: {where}",
                hint="give each daemon a name of its own (CKPTD_NODE), or all ranks of a node one arena (CKPTD_ARENA)",
            )


def _check_endpoints(peers: Sequence[Peer], hosts: Sequence[str]) -> None:
    """Whether the daemons can reach each other, as far as their addresses tell. A lone node needs none."""
    if len(peers) == 1:
        return
    seen: dict[str, str] = {}
    for peer, host in zip(peers, hosts, strict=True):
        address = _address(peer.endpoint)
        who = f"the daemon of node {peer.node!r}"
        if address is None or address.is_unspecified:
            said = peer.endpoint or "nowhere"
            raise ConfigError(f"{who} is reached at {said} by the job's other nodes", hint=_ADDRESS_HINT)
        stranger = next((other for other in hosts if other != host), None)
        if address.is_loopback and stranger is not None:
            text = f"{who} is reached at {peer.endpoint}, which leads from host {stranger} to {stranger} itself"
            raise ConfigError(text, hint=_ADDRESS_HINT)
        twin = seen.setdefault(peer.endpoint, peer.node)
        if twin != peer.node:
            raise ConfigError(f"{who} and that of {twin!r} are both reached at {peer.endpoint}", hint=_ADDRESS_HINT)


_NAMED = ipaddress.ip_address("192.0.2.1")  # stands for any name but localhost: it is resolved by who connects
_LOCAL = ipaddress.ip_address("127.0.0.1")


def _address(endpoint: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """What an endpoint's host is; None when there is no endpoint."""
    host = endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    if not host:
        return None
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return _LOCAL if host == "localhost" or host.endswith(".localhost") else _NAMED


def why_unprotected(topology: Topology, rank: int) -> str:
    """In words, why no scheme is in force for the rank's node."""
    if topology.scheme is Scheme.NONE:
        return "redundancy is none"
    if len(topology.peers) == 1:
        return "all ranks of the job run on one node"
    return f"node {topology.home(rank)} has no other node in its set"
