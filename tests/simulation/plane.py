"""The daemon's own plane and links, with packets that travel in virtual time in place of sockets.

What is played here is ``PeerLinks`` and ``Link`` themselves: windows, resends, keep-alives, timeouts, joins. Messages
are not encoded: a parcel has the size that the real codec gives, and is the message.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckptd.core import events as ev
from ckptd.peers.group import waits_of
from ckptd.peers.link import Link
from ckptd.peers.links import ROUND_S
from ckptd.peers.packets import VERSION, Body, Bundle, Envelope, Forward, Forwarded, Packet, encode_body
from ckptd.peers.path import Via
from ckptd.peers.plane import _RECEIVE_MOST
from ckptd.peers.relayed_links import RelayedLinks
from ckptd.peers.remote import Remote
from ckptd.shared.base.ids import JobKey
from ckptd.shared.protocol.topology import Peer
from tests.links import give_up

_LETTER_NBYTES = 50

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
        super().__init__(None, None, peer, None, link)  # type: ignore[arg-type]
        self.plane = plane
        self.connection: Connection | None = None

    def connect(self) -> None:
        self._disconnect(0)
        self.asleep = False
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


class PlayedPlane(RelayedLinks):
    """Of one daemon process. ``wire`` carries its packets; ``machine`` pays for them."""

    def __init__(self, machine: "BusyMachine", wire: "Wire") -> None:
        self.machine, self.wire = machine, wire
        super().__init__(machine.name, timeout_s=wire.costs.peer_timeout_s, clock=lambda: machine.loop_time)
        self._instance = machine.life
        self._encoded: ev.Message | None = None  # the last
        self._zap = _Admission()
        self.peer = machine.peer

    def _between(self, least: float, most: float) -> float:
        return self.machine.world.clock.between(least, most)

    def _new_end(self) -> int:
        return self.wire.new_end()

    def _make_remote(self, peer: Peer, link: Link) -> Remote:
        return PlayedRemote(self, peer, link)

    def _admit(self, key: str) -> None:
        self._zap.admit(key)

    def knows(self, key: str) -> bool:
        """Whether a daemon of that key may connect."""
        return self._book.knows(key)

    def send(self, job: JobKey, node: str, message: ev.Message) -> bool:
        remote = self._up_for(job, node)
        self.call(job, node)
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
        return self._put(remote, Parcel(message, nbytes), waits_of(message))  # type: ignore[arg-type]

    def receive(self) -> list[ev.Event]:
        """What waits, at most so much that the loop continues."""
        now, costs = self._clock(), self.wire.costs
        touched: dict[int, Remote] = {}
        for connection, envelope in self.wire.take(self._node, _RECEIVE_MOST):
            packet = envelope.packet
            self.machine.charge(costs.packet_in_s)
            self.machine.load.packets += 1
            sender = connection.sender
            node_key = (sender.name, sender.peer.key)
            known = self._remotes.get(node_key)
            self.machine.load.again += known is not None and len(packet.body) > 0 and packet.seq <= known.link._received
            remote = self._take_packet(node_key, envelope, now)
            if remote is not None:
                touched[id(remote)] = remote
            if self._clock() >= now + ROUND_S:
                break
        if not self.wire.waits(self._node):
            self._listened_at = now
        for remote in touched.values():
            self._flush(remote)
        return self.take_events()

    def send_signs_of_life(self) -> None:
        """What the thread does in the middle of a long turn."""
        for remote, packet in self._signs_of_life():
            assert isinstance(remote, PlayedRemote)
            if remote.connection is not None:
                self.wire.slip(remote.connection, self._envelope(remote, packet))

    def died(self) -> None:
        """The process is gone, with its connections."""
        for remote in self._remotes.values():
            remote._disconnect(1)  # what is under way arrives

    @property
    def waits(self) -> bool:
        """Whether something is to be done at once."""
        return bool(self._events or self.unconnected)

    def up_for(self, job: JobKey, node: str) -> bool:
        """Whether both sides belong to the job, and know it of each other."""
        return self._up_for(job, node) is not None

    def reset(self, node: str) -> None:
        """The connection breaks."""
        for (name, _), remote in list(self._remotes.items()):
            if name == node:
                give_up(remote.link)
                self._flush(remote)

    def _say(self, remote: Remote, body: Body) -> bool:
        return remote.link.send(Parcel(body, len(encode_body(body))))  # type: ignore[arg-type]

    def _got(self, remote: Remote, raw: Any) -> None:
        if not isinstance(raw.body, Forward | Forwarded):  # what is in it is paid for as it is read
            self.machine.charge(raw.nbytes * self.wire.costs.decode_byte_s)
        if isinstance(raw.body, ev.NodeMessage):
            self._message(remote, raw.body)
        elif isinstance(raw.body, Forward | Forwarded):
            letter_s = self.wire.costs.letter_on_s if isinstance(raw.body, Forward) else self.wire.costs.letter_in_s
            self.machine.charge(len(raw.body.letters) * letter_s)
            self.machine.load.letters += len(raw.body.letters)
            self.machine.world.counts["letters passed on" if isinstance(raw.body, Forward) else "letters"] += 1
            self._take_bundle(remote, raw.body)
        else:
            super()._got(remote, encode_body(raw.body))

    def _down(self, remote: Remote, now: float) -> None:
        self.machine.load.links_lost += 1
        super()._down(remote, now)

    def _envelope(self, remote: Remote, packet: Packet) -> Envelope:
        return Envelope(VERSION, self._node, remote.peer.node, "", packet, "", remote.path.number)

    def _transmit(self, remote: Any, packet: Packet) -> bool:
        self.machine.charge(self.wire.costs.packet_out_s)
        return remote.connection is not None and self.wire.carry(remote.connection, self._envelope(remote, packet))

    def _post(self, via: Via, number: int, remote: Remote, packet: Packet, waits: int = 0) -> bool:
        self.machine.charge(self.wire.costs.letter_out_s)
        return super()._post(via, number, remote, packet, waits)

    def _packed(self, bundle: Bundle) -> Any:
        nbytes = sum(len(body) for body in bundle.bodies) + _LETTER_NBYTES * len(bundle.letters)
        return Parcel(bundle, nbytes)
