"""Measures the constants of the simulated nodes: costs of packets, speeds of a core. By the product's own code.

Seconds are CPU seconds of the thread that does the work: what else the machine does counts less in them. Each is the
median of some repetitions; speeds of memory are the best of some, since other work takes memory's bandwidth.
"""

import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import zmq

from bench import records, states
from bench.charts.values import Constants, Stated
from bench.node import Node, scratch
from ckptd.arena.arena import Arena
from ckptd.core import events as ev
from ckptd.core.redundancy_sets import redundancy_sets
from ckptd.parity.encode import encode
from ckptd.peers.identity import identify
from ckptd.peers.plane import PeerPlane
from ckptd.shared.base.ids import JobKey, SaveId
from ckptd.shared.format.schemes import Scheme
from ckptd.shared.format.slot import PAGE
from ckptd.shared.protocol import node_messages
from ckptd.shared.protocol.topology import Peer
from ckptd.system.config import Config
from tests import nodes as parity_nodes
from tests.golden import wire
from tests.runs import RUN
from tests.simulation.scale import RANKS, SET_SIZE

_JOB = JobKey("/store", "charts")
_DEADLINE_S = 20.0
_MEMORY = "/dev/shm"  # noqa: S108 - directories with names of their own


def members_of(nodes: int) -> set[int]:
    """Sizes of the redundancy sets of a job of so many nodes."""
    peers = [Peer(f"n{i:05d}", "a", "tcp://a:1", "k" * 40, f"rack{i // 2}") for i in range(nodes)]
    return {len(one) for one in redundancy_sets(peers, SET_SIZE)}


def measure(nodes: Iterable[int], stated: Stated, *, nbytes: int = 256 << 20, repeat: int = 7) -> Constants:
    """All, for jobs of these sizes. nbytes: of the state that is copied; of the sets that encode, all members'."""
    torch.set_num_threads(1)
    packet_in_s, packet_out_s = _packets(40 * repeat)
    decode_byte_s, encode_byte_s = _codec(4 * repeat)
    copied, read = _state(nbytes, repeat)
    digested, encoded, pulled = _parity(set().union(*map(members_of, nodes)), nbytes, repeat)
    commit = commits(nodes, stated)
    return Constants(
        packet_in_s=packet_in_s, packet_out_s=packet_out_s, decode_byte_s=decode_byte_s, encode_byte_s=encode_byte_s,
        copy_bytes_per_s=copied, read_bytes_per_s=read, digest_bytes_per_s=digested, commit=commit, encode=encoded,
        pulled=pulled,
    )  # fmt: skip


def _cpu(work: Callable[[], object]) -> float:
    """CPU seconds of this thread."""
    began = time.thread_time()
    work()
    return time.thread_time() - began


# --- packets


class _Pair:
    """Two planes with a link over loopback, in this thread."""

    def __init__(self, base: Path) -> None:
        self.planes = [self._plane(base / name, name) for name in ("a", "b")]
        self.heard: list[Any] = []
        for plane in self.planes:
            plane.keep_links(_JOB, None)
            plane.meet(_JOB, [other.peer for other in self.planes])

    @staticmethod
    def _plane(directory: Path, name: str) -> PeerPlane:
        directory.mkdir()
        config = Config(arena=str(directory), node=name, peer_address="127.0.0.1")
        return PeerPlane(identify(config), timeout_s=10.0)

    def until(self, done: Callable[[], bool]) -> None:
        """Both take turns. Raises RuntimeError when it takes too long."""
        deadline = time.monotonic() + _DEADLINE_S
        while not done():
            if time.monotonic() > deadline:
                raise RuntimeError("two daemons on loopback have no link")
            for plane in self.planes:
                self.heard += _turn(plane)

    def close(self) -> None:
        """Gives the sockets back."""
        for plane in self.planes:
            plane.close()


def _turn(plane: PeerPlane) -> list[ev.Event]:
    """One round of a daemon's loop: it waits until something comes, but not for long."""
    _wait([plane])
    return [*plane.receive(), *plane.tick()]


def _wait(planes: list[PeerPlane]) -> None:
    poller = zmq.Poller()
    for plane in planes:
        for socket in plane.pollables:
            poller.register(socket, zmq.POLLIN)
    poller.poll(20)


def _packets(repeat: int) -> tuple[float, float]:
    """(CPU seconds of a packet's receiver, of its sender) in the thread of the loop."""
    with tempfile.TemporaryDirectory(prefix="ckptd-charts-") as base:
        pair = _Pair(Path(base))
        try:
            pair.until(lambda: sum(isinstance(event, ev.PeerUp) for event in pair.heard) == 2)
            sent = [_send_one(pair, counter) for counter in range(1, repeat + 1)]
        finally:
            pair.close()
    out_s = statistics.median(sent_s for sent_s, _ in sent)
    return statistics.median(took_s for _, took_s in sent) - out_s, out_s


def _send_one(pair: _Pair, counter: int) -> tuple[float, float]:
    """Seconds of its sender, and of its receiver: a round of the loop, which sends the acknowledgement, too."""
    ours, theirs = pair.planes
    message = ev.SaveStaged(job=_JOB, node="a", save=SaveId(1, counter, counter, RUN))
    sent_s = _cpu(lambda: ours.send(_JOB, "b", message))
    pair.heard.clear()
    deadline = time.monotonic() + _DEADLINE_S
    while not pair.heard and time.monotonic() < deadline:
        took_s = _cpu(lambda: pair.heard.extend(_turn(theirs)))
    _turn(ours)  # the acknowledgement
    return sent_s, took_s


def _codec(repeat: int) -> tuple[float, float]:
    """CPU seconds of a byte decoded and encoded, of the golden examples of all messages between daemons."""
    messages = [message for kind in wire.members(node_messages.Message) for message in wire.structs(kind)]
    raw = [node_messages.encode(message) for message in messages]
    nbytes = sum(map(len, raw))
    inward = statistics.median(_cpu(lambda: [node_messages.decode(one) for one in raw]) for _ in range(repeat))
    outward = statistics.median(_cpu(lambda: [node_messages.encode(one) for one in messages]) for _ in range(repeat))
    return inward / nbytes, outward / nbytes


# --- bytes of state


def _state(nbytes: int, repeat: int) -> tuple[float, float]:
    """Bytes/s of a save's call and of a load from the arena, by one core each, of a client on a real daemon."""
    state = states.realistic(nbytes)
    nbytes = states.nbytes_of(state)
    saved, loaded = [], []
    with tempfile.TemporaryDirectory(prefix="ckptd-charts-") as base, scratch(Path(base)) as (shm, disk):
        node = Node(shm, disk / "store")
        node.store.mkdir()
        try:
            node.start()
            with node.client("charts", redundancy="none", drain_every=1 << 30) as client:
                client.prepare(state)
                for step in range(1, repeat + 2):
                    saved.append(_cpu(lambda step=step: client.save(state, step)))  # type: ignore[misc]
                    time.sleep(0.2)  # digests
                for _ in range(repeat):
                    began = time.process_time()
                    client.load(state)
                    loaded.append(time.process_time() - began)
        finally:
            node.close()
    return nbytes / min(saved[1:]), nbytes / min(loaded)


def _parity(members: set[int], nbytes: int, repeat: int) -> tuple[float, dict[str, float], dict[str, float]]:
    """Digests in bytes/s; seconds of the thread that encodes, and bytes it pulls, for a byte of its node's state."""
    digested, encoded, pulled = [], {}, {}
    for count in sorted(members):
        share = max(PAGE, nbytes // count)
        with tempfile.TemporaryDirectory(prefix="ckptd-charts-", dir=_MEMORY) as base:
            group = parity_nodes.start_set(base, count)
            try:
                group.stage([[random.Random(i).randbytes(share)] for i in range(count)])
                digested += [share / _digest(node.arena, rank) for rank, node in enumerate(group.nodes)]
                for scheme in Scheme:
                    if 0 < scheme.layout.losses < count:
                        key = f"{scheme}/{count}"
                        took = [_encode(group, scheme) for _ in range(repeat)]
                        encoded[key] = min(seconds for seconds, _ in took) / share
                        pulled[key] = took[0][1] / share
            finally:
                group.stop()
    return max(digested), encoded, pulled


def _digest(arena: Arena, rank: int) -> float:
    name = arena.slot_of(parity_nodes.KEY, rank, parity_nodes.SAVE)
    assert name is not None  # noqa: S101 - it was staged
    return _cpu(lambda: arena.digests(parity_nodes.KEY, name, parity_nodes.SAVE))


def _encode(group: parity_nodes.Set, scheme: Scheme) -> tuple[float, int]:
    """(CPU seconds of the thread, bytes pulled) of the first node's parity."""
    node, pulled = group.nodes[0], [0]

    def count(nbytes: int) -> None:
        pulled[0] += nbytes

    chunk = group.parity_chunk(0, scheme)
    took = _cpu(lambda: encode(node.parities, parity_nodes.KEY, chunk, group.sources(node), count))
    node.parities.give_back(parity_nodes.KEY, parity_nodes.SAVE, parity_nodes.EPOCH)
    return took, pulled[0]


def commits(nodes: Iterable[int], stated: Stated) -> dict[str, float]:
    """CPU seconds of the commits of jobs of these sizes."""
    return {str(number): _commit(number, stated.tensors) for number in nodes}


def _commit(nodes: int, boxes: int) -> float:
    """CPU seconds of a commit of so many nodes, whose ranks have so many tensors each. Records lie in memory."""
    with tempfile.TemporaryDirectory(prefix="ckptd-charts-", dir=_MEMORY) as base:
        return float(records.measure("placed", nodes * RANKS, boxes, base)["commit_cpu_s"])
