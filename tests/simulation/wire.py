"""Connections between daemons as ZeroMQ keeps them: each a queue of packets, bounded, that a node's line carries.

A packet is not taken that finds its queue full or its connection not open, and lost with a partition in its way.
The receiver takes packets of its connections by turns. A node sends and receives so many bytes a second.
"""

import itertools
from collections import Counter, deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ckptd.core import events as ev
from ckptd.peers import remote, sockets, zap
from ckptd.peers.packets import Envelope
from ckptd.shared.base.ids import JobKey
from ckptd.shared.protocol.topology import Peer
from tests.simulation.clock import Clock
from tests.simulation.costs import Costs, Sizes
from tests.simulation.network import HANDSHAKE_S, Sides, is_between, kind_of

if TYPE_CHECKING:
    from tests.simulation.busy import BusyMachine
    from tests.simulation.plane import PlayedPlane

_MOST = remote._HWM + sockets._HWM  # packets in one connection, sent or not
_ENVELOPE_NBYTES = 100
_RETRY_S = 0.1  # doubled each time, up to
_RETRY_MAX_S = 2.0
_HELD_S = 3.0  # a handshake under a key that is not known yet


class Connection:
    """One daemon process's socket to another's. ``free_at``: when what was sent last arrives."""

    __slots__ = ("free_at", "is_open", "over", "plane", "receiver", "sender", "target", "under_way", "unread", "wire")

    def __init__(self, wire: "Wire", sender: "PlayedPlane", target: Peer) -> None:
        self.wire = wire
        self.plane = sender
        self.sender = sender.machine
        self.target = target
        self.receiver: PlayedPlane | None = None
        self.is_open = self.over = False
        self.under_way = 0
        self.unread: deque[Envelope] = deque()
        self.free_at = 0.0

    def close(self, *, last_words: bool) -> None:
        """What was sent is lost, but for last words."""
        self.is_open, self.over = False, True
        self.wire.forget(self)
        if not last_words:
            self.unread.clear()

    def opened(self) -> None:
        """The handshake is over."""
        self.is_open = not self.over


class Wire:
    """In place of ``Network``, where daemons take time. ``nodes``: name -> the machine of that name now."""

    def __init__(self, clock: Clock, nodes: dict[str, Any], costs: Costs) -> None:
        self._clock = clock
        self._nodes = nodes
        self.costs = costs
        self.sizes = Sizes()
        self._ends = itertools.count(1)
        self._to: dict[str, dict[Connection, None]] = {}
        self._ready: dict[str, deque[Connection]] = {}
        self._line_out: dict[str, float] = {}
        self._line_in: dict[str, float] = {}
        self.partitions: list[Sides] = []
        self.sent: Counter[str] = Counter()
        self.nbytes: Counter[str] = Counter()
        self.nbytes_in: Counter[str] = Counter()  # with those sent again
        self.kinds: Counter[str] = Counter()
        self.dropped = 0
        self.bad_weather = False

    def new_end(self) -> int:
        """Of a link."""
        return next(self._ends)

    # --- connections

    def dial(self, plane: "PlayedPlane", target: Peer) -> Connection:
        """A connection that opens when the other daemon can."""
        made = Connection(self, plane, target)
        self._to.setdefault(target.node, {})[made] = None
        plane.machine.charge(self.costs.handshake_s)
        self._clock.after(self._clock.between(0.2, 2) * HANDSHAKE_S, self._dialled, made, _RETRY_S)
        return made

    def _dialled(self, connection: Connection, retry_s: float) -> None:
        if connection.over or connection.is_open:
            return
        key, other = connection.plane.peer.key, self._nodes.get(connection.target.node)
        there = other.plane if other is not None and other.up else None
        blocked = self.blocked(connection.sender.name, connection.target.node)
        if there is None or blocked or there.peer.key != connection.target.key:
            self._clock.after(retry_s, self._dialled, connection, min(2 * retry_s, _RETRY_MAX_S))
            return
        there.machine.charge(self.costs.handshake_s)
        connection.receiver = there
        if there.knows(key):
            self._clock.at(there.machine.loop_time, connection.opened)
            return
        held = there._zap.held
        if len(held) < zap._WAITING:
            held.setdefault(key, []).append(connection)
        self._clock.after(_HELD_S, self._too_old, connection)

    def _too_old(self, connection: Connection) -> None:
        """The handshake, unless it was answered."""
        if connection.receiver is not None and not connection.is_open:
            connection.receiver._zap.held.pop(connection.plane.peer.key, None)
        self._dialled(connection, _RETRY_S)

    def forget(self, connection: Connection) -> None:
        """It is closed."""
        self._to.get(connection.target.node, {}).pop(connection, None)

    def died(self, node: str) -> None:
        """The daemon there is gone: what it had not read is lost, and others dial until there is another."""
        self._ready.pop(node, None)
        for connection in list(self._to.get(node, {})):
            connection.is_open = False
            connection.unread.clear()
            self._clock.after(self._clock.between(0.5, 1) * _RETRY_S, self._dialled, connection, _RETRY_S)

    # --- packets

    def carry(self, connection: Connection, packet: Envelope) -> bool:
        """From the sender's loop, at its time. False: ZeroMQ does not take it."""
        waiting = connection.under_way + len(connection.unread)
        if not connection.is_open or waiting >= _MOST:
            self.dropped += 1
            return False
        name, other, nbytes = connection.sender.name, connection.target.node, len(packet.packet.body) + _ENVELOPE_NBYTES
        took = nbytes / self.costs.bytes_per_s
        leaves = self._line_out[name] = max(connection.sender.loop_time, self._line_out.get(name, 0.0)) + took
        delay = self._clock.mostly(self.costs.delay_s, 2000 * self.costs.delay_s, 0.05 if self.bad_weather else 0.0)
        comes = max(leaves + delay, connection.free_at, self._line_in.get(other, 0.0) + took)
        connection.free_at = self._line_in[other] = comes
        connection.under_way += 1
        self.nbytes_in[other] += nbytes
        self._clock.at(comes, self._arrive, connection, packet)
        return True

    def slip(self, connection: Connection, packet: Envelope) -> None:
        """A small packet from the sender's other thread, past its loop. What is under way by now says as much."""
        if connection.is_open and connection.free_at <= self._clock.now:
            connection.under_way += 1
            connection.free_at = self._clock.now + self.costs.delay_s
            self._clock.at(connection.free_at, self._arrive, connection, packet)

    def _arrive(self, connection: Connection, packet: Envelope) -> None:
        connection.under_way -= 1
        there = connection.receiver
        if there is None or there.machine.plane is not there or not (connection.is_open or connection.over):
            self.dropped += 1
            return
        if self.blocked(connection.sender.name, there.machine.name):
            self.dropped += 1
            return
        if not connection.unread:
            self._ready.setdefault(there.machine.name, deque()).append(connection)
        connection.unread.append(packet)
        there.machine.rouse()

    def waits(self, node: str) -> bool:
        """Whether a packet is there for it."""
        return bool(self._ready.get(node))

    def take(self, node: str, most: int) -> Iterator[tuple[Connection, Envelope]]:
        """Packets that wait for the node, one of each connection by turns, at most so many."""
        ready = self._ready.get(node)
        while ready and most:
            connection = ready.popleft()
            if not connection.unread:
                continue
            most -= 1
            packet = connection.unread.popleft()
            if connection.unread:
                ready.append(connection)
            yield connection, packet

    def hand_over(self, plane: "PlayedPlane", job: JobKey, node: str, message: ev.Message) -> bool:
        """Where nothing costs anything a message that waits for no other needs no packets. False: it does."""
        machine: BusyMachine | None = self._nodes.get(node)
        there = machine.plane if machine is not None and machine.up else None
        if there is None or not there.up_for(job, plane.machine.name) or self.blocked(plane.machine.name, node):
            return False
        self._clock.after(self.costs.delay_s, self._handed, there, message)
        return True

    @staticmethod
    def _handed(there: "PlayedPlane", message: ev.Message) -> None:
        if there.machine.plane is there:
            there.machine.say(message)

    # --- as Network has it

    def counted(self, node: str, message: ev.Message, nbytes: int) -> None:
        """A node's core sends it."""
        self.sent[node] += 1
        self.nbytes[node] += nbytes
        self.kinds[kind_of(message)] += 1

    def links_of(self, node: str) -> list[tuple[str, str]]:
        """Pairs of names."""
        machine: BusyMachine | None = self._nodes.get(node)
        plane = machine.plane if machine is not None else None
        return [(node, name) for name, _ in plane._remotes] if plane is not None else []

    def consider(self, link: tuple[str, str]) -> None:
        """Links look after themselves."""

    def reset(self, link: tuple[str, str]) -> None:
        """The connection breaks; the link comes back."""
        machine: BusyMachine | None = self._nodes.get(link[0])
        if machine is not None and machine.plane is not None:
            machine.plane.reset(link[1])

    def partition(self, some: frozenset[str], others: frozenset[str], seconds: float) -> None:
        """No packet passes between the two groups for so long."""
        sides = (some, others)
        self.partitions.append(sides)
        self._clock.after(seconds, self._heal, sides)

    def _heal(self, sides: Sides) -> None:
        if sides in self.partitions:
            self.partitions.remove(sides)

    def heal(self) -> None:
        """Every partition is over."""
        self.partitions.clear()

    def blocked(self, a: str, b: str) -> bool:
        """Whether a partition lies between the two."""
        return any(is_between(sides, a, b) for sides in self.partitions)

    def connected(self, a: str, b: str, job: JobKey) -> bool:
        """Whether bulk bytes can flow."""
        machine: BusyMachine | None = self._nodes.get(a)
        plane = machine.plane if machine is not None else None
        return a == b or (plane is not None and plane.up_for(job, b) and not self.blocked(a, b))
