"""The daemon's own plane and links, with packets that travel in virtual time in place of sockets.

What is played here is ``PeerPlane`` and ``Link`` themselves: windows, resends, keep-alives, timeouts, joins. Messages
are not encoded: a parcel has the size that the real codec gives, and is the message.
"""

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckptd.core import events as ev
from ckptd.peers.bulk_access import Offers
from ckptd.peers.link import Link
from ckptd.peers.packets import Body, Packet, encode_body
from ckptd.peers.plane import _CONNECT_MOST, _MOST_S, _RECEIVE_MOST, PeerPlane
from ckptd.peers.remote import Remote
from ckptd.peers.turns import Turns
from ckptd.shared.base.ids import JobKey
from ckptd.shared.protocol.topology import Peer

if TYPE_CHECKING:
    from tests.simulation.busy import BusyMachine
    from tests.simulation.wire import Connection, Wire


@dataclass(frozen=True, slots=True)
class Parcel:
    """A body of a packet."""

    body: Any
    nbytes: int

    def __len__(self) -> int:
        return self.nbytes


class PlayedRemote(Remote):
    """``connection``: to the other daemon; None: there is none."""

    def __init__(self, plane: "PlayedPlane", peer: Peer, link: Link) -> None:
        super().__init__(None, peer, None, link)  # type: ignore[arg-type]
        self.plane = plane
        self.connection: Connection | None = None

    def connect(self) -> None:
        self._disconnect(0)
        self.connection = self.plane.wire.dial(self.plane, self.peer)

    def look(self, now: float) -> None:
        pass

    def _disconnect(self, linger_ms: int) -> None:
        if self.connection is not None:
            self.connection.close(last_words=linger_ms > 0)
        self.connection = None


class _Admission:
    """In place of ZAP: peers whose key is not known yet wait."""

    def __init__(self) -> None:
        self.held: dict[str, list[Connection]] = {}

    def admit(self, key: str) -> None:
        for connection in self.held.pop(key, []):
            connection.opened()


class _NoMeetings:
    """The machine plays the tickets."""

    def tick(self, now: float, answers: object) -> None:
        """Nothing is due."""

    def next_deadline(self) -> None:
        """Never."""

    def lost(self, node: str, now: float) -> None:
        """Nothing to do."""

    def forget(self, job: JobKey) -> None:
        """Nothing is known."""

    @property
    def shown_to(self) -> tuple[()]:
        """To none."""
        return ()


class PlayedPlane(PeerPlane):
    """Of one daemon process. ``wire`` carries its packets; ``machine`` pays for them."""

    def __init__(self, machine: "BusyMachine", wire: "Wire") -> None:
        self.machine, self.wire = machine, wire
        self._node, self._timeout_s = machine.name, wire.costs.peer_timeout_s
        self._clock = lambda: machine.loop_time
        self._instance = machine.life
        self._remotes: dict[tuple[str, str], Remote] = {}
        self._jobs: dict[JobKey, dict[str, Remote]] = {}
        self._unconnected: deque[Remote] = deque()
        self._topologies: dict[JobKey, frozenset[str]] = {}
        self._keys: Counter[str] = Counter()
        self._events: list[ev.Event] = []
        self._mail = []
        self._encoded: ev.Message | None = None  # the last
        self._turns, self._offers = Turns(), Offers()
        self.refused: Counter[str] = Counter()
        self._zap: Any = _Admission()
        self.meetings: Any = _NoMeetings()
        self.peer = machine.peer
        self.unplayed: set[tuple[str, str]] = set()  # peers whose links cost what links cost, and carry nothing
        self._not_connected = 0  # of these

    def _remote(self, peer: Peer) -> Remote:
        place = (peer.node, peer.key)
        if place not in self._remotes:
            link = Link(instance=self._instance, timeout_s=self._timeout_s, new_end=self.wire.new_end)
            remote = self._remotes[place] = PlayedRemote(self, peer, link)
            remote.down_since = self._clock()
            self._keys[peer.key] += 1
            self._zap.admit(peer.key)
            self._unconnected.append(remote)
        return self._remotes[place]

    def meet(self, job: JobKey, peers: Iterable[Peer]) -> None:
        nodes = self._jobs.setdefault(job, {})
        fresh = []
        for peer in peers:
            known = nodes.get(peer.node)
            if known is not None and known.peer is peer:
                continue
            if peer.node == self._node or self.wire.wanted(self._node, peer.node):
                fresh.append(peer)
            elif (place := (peer.node, peer.key)) not in self.unplayed:
                self.unplayed.add(place)
                self._not_connected += 1
        super().meet(job, fresh)

    def send(self, job: JobKey, node: str, message: ev.Message) -> bool:
        remote = self._up_for(job, node)
        if remote is None:
            self.wire.dropped += 1
            return False
        if not self.machine.world.charged and not remote.link.queued and self.wire.hand_over(self, job, node, message):
            return True
        nbytes = self.wire.sizes.of(message)
        self.wire.counted(self._node, message, nbytes)
        if message is not self._encoded:  # as BodyOnce has it
            self._encoded = message
            self.machine.charge(nbytes * self.wire.costs.encode_byte_s)
        sent = remote.link.send(Parcel(message, nbytes))  # type: ignore[arg-type]
        self._flush(remote)
        return sent

    def receive(self) -> list[ev.Event]:
        now, costs = self._clock(), self.wire.costs
        touched: dict[int, Remote] = {}
        for connection, packet in self.wire.take(self._node, _RECEIVE_MOST):
            self.machine.charge(costs.packet_in_s)
            self.machine.load.packets += 1
            remote = self._remotes.get((connection.sender.name, connection.sender.peer.key))
            if remote is None:
                self.refused["sender"] += 1
                continue
            self.machine.load.again += 0 < packet.seq <= remote.link._received
            remote.link.receive(packet, now)
            touched[id(remote)] = remote
            if self._clock() >= now + _MOST_S:
                break
        if not self.wire.waits(self._node):
            self._listened_at = now
        for remote in touched.values():
            self._flush(remote)
        return self._take_events()

    def tick(self) -> list[ev.Event]:
        some = min(_CONNECT_MOST, self._not_connected, 1 + int(_MOST_S / self.wire.costs.link_s))
        self._not_connected -= some
        self.machine.charge(some * self.wire.costs.link_s)
        return super().tick()

    def send_signs_of_life(self) -> None:
        """What the thread does in the middle of a long turn."""
        for remote in self._remotes.values():
            assert isinstance(remote, PlayedRemote)
            if remote.link.keepalive is not None and remote.connection is not None:
                self.wire.slip(remote.connection, remote.link.keepalive)

    def next_deadline(self) -> float | None:
        return 0.0 if self._not_connected else super().next_deadline()

    def died(self) -> None:
        """The process is gone, with its connections."""
        for remote in self._remotes.values():
            remote._disconnect(1)  # what is under way arrives

    @property
    def waits(self) -> bool:
        """Whether something is to be done at once."""
        return bool(self._events or self._unconnected or self._not_connected)

    def up_for(self, job: JobKey, node: str) -> bool:
        """Whether both sides belong to the job, and know it of each other."""
        return self._up_for(job, node) is not None

    def reset(self, node: str) -> None:
        """The connection breaks."""
        for (name, _), remote in self._remotes.items():
            if name == node:
                remote.link.restart("reset")
                self._flush(remote)

    def _say(self, remote: Remote, body: Body) -> bool:
        return remote.link.send(Parcel(body, len(encode_body(body))))  # type: ignore[arg-type]

    def _got(self, remote: Remote, raw: Any) -> None:
        self.machine.charge(raw.nbytes * self.wire.costs.decode_byte_s)
        if isinstance(raw.body, ev.NodeMessage):
            self._message(remote, raw.body)
        else:
            super()._got(remote, encode_body(raw.body))

    def _down(self, remote: Remote, now: float) -> None:
        self.machine.load.links_lost += 1
        super()._down(remote, now)

    def _transmit(self, remote: Any, packet: Packet) -> None:
        self.machine.charge(self.wire.costs.packet_out_s)
        if remote.connection is not None:
            self.wire.carry(remote.connection, packet)
