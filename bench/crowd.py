"""Daemons of many nodes in one process, for what grows with nodes: real links, packets and messages, no arena.

``python -m bench.crowd`` reads a ``Plan`` and then a ``Start``, a line of JSON each, and writes its peers in between.
All members share a key pair, as sites may have it, and a socket that listens at many addresses of loopback; each has
connections of its own to the daemons. It attaches its ranks, asks for the topology as the first of a set does, reports
the ranks as staged, and answers queries as if half of their drain were written.
"""

import secrets
import sys
import time

import msgspec
import zmq

from ckptd import __version__
from ckptd.core import events as ev
from ckptd.daemon.status_query import Answer, encode_answer
from ckptd.peers.keys import KeyPair, make_keys
from ckptd.peers.link import Got, Link, Up
from ckptd.peers.meetings import session_keys
from ckptd.peers.packets import (
    Answered,
    Ask,
    Body,
    Join,
    Message,
    Packet,
    Present,
    decode_body,
    decode_envelope,
    encode_body,
    wrap,
)
from ckptd.peers.remote import Remote
from ckptd.shared.base.ids import JobKey, SaveId
from ckptd.shared.protocol import node_messages
from ckptd.shared.protocol.status import NodeReport, RankStatus
from ckptd.shared.protocol.topology import Peer, Rendezvous, Topology
from ckptd.shared.protocol.versions import tag_in_map

SESSION, ARENA, HOST = "crowd", "crowd", "h"
SEGMENT_NBYTES = 24 << 30
_GIB = 1 << 30
_ROUND_MS = 50
_BUSY_S = 1.0  # between two checks of idle links
_TIMEOUT_S = 60.0  # of a link: long, because the cores are busy


class Plan(msgspec.Struct):
    """Members from first to the last of the topology; the first of the daemons coordinates."""

    job: JobKey
    daemons: list[Peer]
    first: int
    count: int
    step: int


class Start(msgspec.Struct):
    """The job, which the members know for once, and where they meet."""

    topology: Topology
    rendezvous: Rendezvous


def node_name(number: int) -> str:
    """The member of one node."""
    return f"gpu-{number:04d}"


class Crowd:
    """All members."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.keys = make_keys()
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(2)
        self.context.set(zmq.MAX_SOCKETS, 1 << 15)
        self.router = _listen(self.context, self.keys)
        endpoint = self.router.getsockopt(zmq.LAST_ENDPOINT)
        self.endpoint = endpoint.decode().rstrip("\0") if isinstance(endpoint, bytes) else ""
        numbers = range(plan.first, plan.first + plan.count)
        self.peers = [Peer(node_name(number), ARENA, self._address(number), self.keys.public) for number in numbers]
        self.links: dict[tuple[str, str], Remote] = {}  # by member and daemon
        self.topology: Topology | None = None
        self.ranks: dict[str, tuple[int, ...]] = {}
        self.save: SaveId | None = None
        self.attached: set[str] = set()

    def _address(self, number: int) -> str:
        """Of one member: all lead to the one socket."""
        high, middle, low = 1 + number // 62500, number // 250 % 250, 1 + number % 250
        return f"tcp://127.{high}.{middle}.{low}:{self.endpoint.rpartition(':')[2]}"

    def meet(self, start: Start) -> None:
        """Connects every member to every daemon, and shows the ticket to the one that coordinates."""
        self.topology, self.ranks = start.topology, start.topology.by_node
        self._present(start.rendezvous)
        self.answers = {peer.node: _answer(number, self.ranks[peer.node]) for number, peer in enumerate(self.peers)}
        for member in self.peers:
            for daemon in self.plan.daemons:
                link = Link(instance=_random(), timeout_s=_TIMEOUT_S, new_end=_random)
                remote = self.links[member.node, daemon.node] = Remote(self.context, daemon, self.keys, link)
                remote.connect()

    def _present(self, rendezvous: Rendezvous) -> None:
        keys = session_keys(self.plan.job, SESSION, rendezvous.ticket)
        self.shown = self.context.socket(zmq.DEALER)
        self.shown.linger, self.shown.sndhwm = 0, 0
        self.shown.curve_serverkey = rendezvous.peer.key.encode()
        self.shown.curve_publickey, self.shown.curve_secretkey = keys.public.encode(), keys.secret.encode()
        self.shown.connect(rendezvous.peer.endpoint)
        for peer in self.peers:
            body = encode_body(Present(self.plan.job, SESSION, peer))
            packet = Packet(0, 0, 0, hello=True, body=body)
            self.shown.send(wrap(packet, peer.node, rendezvous.peer.node, peer.endpoint))

    def serve(self) -> None:
        """Runs until the process is ended."""
        look_at = 0.0
        while True:
            self.router.poll(_ROUND_MS)
            touched = set()
            for _ in range(512):
                try:
                    envelope = decode_envelope(self.router.recv_multipart(zmq.NOBLOCK)[-1])
                except zmq.Again:
                    break
                place = (envelope.receiver, envelope.sender)
                self.links[place].link.receive(envelope.packet, time.monotonic())
                touched.add(place)
            now = time.monotonic()
            if now >= look_at:
                look_at, touched = now + _BUSY_S / 4, set(self.links)
            for place in touched:
                self._flush(place)

    def _flush(self, place: tuple[str, str]) -> None:
        member, daemon = place
        remote = self.links[place]
        while True:
            for packet in remote.link.step(time.monotonic()):
                remote.transmit(wrap(packet, member, daemon, ""))
            updates = remote.link.take_updates()
            if not updates:
                return
            for item in updates:
                if isinstance(item, Up):
                    self._say(remote, Join(self.plan.job))
                elif isinstance(item, Got):
                    self._heard(member, remote, decode_body(item.body))

    def _heard(self, member: str, remote: Remote, body: Body) -> None:
        coordinator = self.plan.daemons[0].node
        match body:
            case Join() if remote.peer.node == coordinator and member not in self.attached:
                self.attached.add(member)
                self._report(member, remote, self._attach(member))
            case Ask(id=number):
                self._say(remote, Answered(number, self.answers[member]))
            case Message(message=raw):
                self._message(member, remote, raw)

    def _message(self, member: str, remote: Remote, raw: bytes) -> None:
        tag, _ = tag_in_map(raw)
        if tag == ev.SessionOpened.__struct_config__.tag:
            opened = node_messages.decode(raw)
            assert isinstance(opened, ev.SessionOpened)  # noqa: S101 - by its tag
            self.save = SaveId(opened.incarnation, 1, self.plan.step, opened.run)
            if opened.place is not None and opened.place.members[0].node == member:
                asked = ev.TopologyAsked(job=self.plan.job, node=member, digest=opened.place.digest)
                self._say(remote, Message(node_messages.encode(asked)))
            for rank in self.ranks[member]:
                self._report(member, remote, self._staged(rank, self.save))

    def _attach(self, member: str) -> ev.Fact:
        """Attaches all ranks of a node."""
        assert self.topology is not None  # noqa: S101 - known before any link
        peer = self.topology.peers[self.topology.nodes.index(member)]
        world, ranks = len(self.topology.homes), self.ranks[member]
        return ev.NodeAttached(
            job=self.plan.job, session=SESSION, peer=peer,
            waiting=tuple(ev.Arrival(rank, world) for rank in ranks), world_size=world,
            living=tuple(ev.Living(rank, SESSION, 1, HOST) for rank in ranks),
        )  # fmt: skip

    def _staged(self, rank: int, save: SaveId) -> ev.Fact:
        world = len(self.topology.homes) if self.topology is not None else 0
        return ev.SegmentStaged(
            job=self.plan.job, request=0, session=SESSION, rank=rank, world_size=world, slot=f"r{rank:05d}-000001.slot",
            save=save, nbytes=SEGMENT_NBYTES,
        )  # fmt: skip

    def _report(self, member: str, remote: Remote, event: ev.Fact) -> None:
        self._say(remote, Message(node_messages.encode(ev.Report(job=self.plan.job, node=member, event=event))))

    @staticmethod
    def _say(remote: Remote, body: Body) -> None:
        remote.link.send(encode_body(body))


def _answer(number: int, ranks: tuple[int, ...]) -> bytes:
    """The status of a daemon: every rank at another position of its drain."""
    told = [
        RankStatus(
            rank=rank, host="a-host-of-the-job", pid=4000 + rank, alive=True, slots=3, slots_in_use=2,
            slot_nbytes=SEGMENT_NBYTES, newest_step=100, drain_nbytes=SEGMENT_NBYTES,
            drain_nbytes_done=SEGMENT_NBYTES * (10 * place + number % 10) // 100,
        )
        for place, rank in enumerate(ranks)
    ]  # fmt: skip
    report = NodeReport(
        version=__version__, pid=4000 + number, uptime_s=3600.0, budget_nbytes=1200 * _GIB,
        used_nbytes=(600 + number % 100) * _GIB, tightest_limit="MemAvailable of /proc/meminfo",
        ranks=told, problems=[],
    )  # fmt: skip
    return encode_answer(Answer(report=report))


def _listen(context: "zmq.Context[zmq.Socket[bytes]]", keys: KeyPair) -> "zmq.Socket[bytes]":
    router = context.socket(zmq.ROUTER)
    router.linger = 0
    router.backlog = 4096
    router.curve_server = True
    router.curve_publickey, router.curve_secretkey = keys.public.encode(), keys.secret.encode()
    router.bind("tcp://0.0.0.0:*")
    return router


def _random() -> int:
    return secrets.randbits(61) + 1


def main() -> None:
    """Runs the crowd; see the module."""
    crowd = Crowd(msgspec.json.decode(sys.stdin.readline(), type=Plan))
    sys.stdout.write(msgspec.json.encode(crowd.peers).decode() + "\n")
    sys.stdout.flush()
    crowd.meet(msgspec.json.decode(sys.stdin.readline(), type=Start))
    crowd.serve()


if __name__ == "__main__":
    main()
