"""A reliable link between two daemon processes, pure: packets and times in, packets and updates out.

Each side has an *end*, a random number that is the epoch of its connection. An end is connected to one end of the other
side, once, and discarded with the connection. Only a packet that names the receiver's newest end connects it: its
sender ran after that end was made, so a late packet of an earlier process changes nothing. Between two connected ends
bodies arrive in order, once.

A connection of ZeroMQ keeps order, so a packet that is ahead of what was received shows that something was lost, and
nothing else does: a side that does not answer is busy. What was lost is sent again when the other side says so. An end
that waits for an acknowledgement says now and then what its last body was, so that a loss without a successor shows.

So nothing but the window waits for an acknowledgement. It travels with whatever goes the other way, alone after
``ACK_S``, and at once when a quarter of the window has come or the other side asks. An end asks at once when a body has
no room in the window, and less than a quarter of it is under way: once for what is under way.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from ckptd.peers.packets import Packet

MAX_QUEUED = 4096
MAX_QUEUED_NBYTES = 32 << 20
_WINDOW = 64  # bodies under way, not acknowledged
_WINDOW_NBYTES = 4 << 20  # at least one body, whatever its size
PROBE_S = 2.0  # without an acknowledgement; less when four signs of life fit into a shorter time
ACK_S = 1.0  # at most, in half as many steps that all links share, so that a loop wakes once for all of them
_EARLY = 4  # an acknowledgement leaves at once after one of so many parts of the window
_RETRY_S = 0.2  # after a packet that ZeroMQ did not take
_HELLO_S = 0.02  # doubled each time, up to
_HELLO_MAX_S = 1.0
KEEPALIVES = 4  # per timeout


@dataclass(frozen=True, slots=True)
class Up:
    """The other side answers. What was sent before is lost or was received; fresh: it is another process."""

    fresh: bool


@dataclass(frozen=True, slots=True)
class Down:
    """Nothing was received for the timeout, or too much waited. What was not acknowledged may be lost."""

    reason: str


@dataclass(frozen=True, slots=True)
class Got:
    """A body arrived."""

    body: bytes


Update = Up | Down | Got


class Link:
    """This side of one link. After each call of ``send`` and ``receive``, ``step`` gives what is to be sent.

    phase_s: links of one phase send their signs of life at the same moments, so that a loop wakes once for all of them.
    """

    def __init__(self, *, instance: int, timeout_s: float, new_end: Callable[[], int], phase_s: float = 0.0) -> None:
        self._instance = instance
        self.timeout_s = timeout_s
        self._probe_s = min(PROBE_S, timeout_s / KEEPALIVES)
        self._ack_step_s = min(ACK_S, self._probe_s / 2) / 2
        self._new_end = new_end
        self._phase_s = phase_s
        self._end = new_end()
        self._peer_end = 0  # 0: not connected
        self._peer_instance: int | None = None
        self._heard_end = 0  # of a link that is not connected: the end to answer
        self._spare: int | None = None  # of a connected link: the end offered to a newer process that sends hello
        self._offers: list[Packet] = []
        self._updates: list[Update] = []
        self.keepalive: Packet | None = None  # of a link that is up; replaced as a whole, so any thread may send it
        self._hello_at: float | None = None
        self._hello_wait_s = _HELLO_S
        self._start_over()

    def _start_over(self) -> None:
        self._queue: deque[tuple[int, bytes]] = deque()
        self._queued_nbytes = 0
        self._last_seq = 0
        self._sent_seq = 0  # highest under way; lowered to send again
        self._attempt = 1  # raised each time that it is lowered
        self._asked_seq = 0  # what was the highest under way when this end last asked for room
        self._received = 0
        self._lost = 0  # the other side's attempt in which something after that was lost; 0: none
        self._ack_at: float | None = None  # when the other side gets both; None: it has them
        self._owed = 0, 0  # bodies that the other side does not know as received, and their bytes
        self._said = False, 0  # in the last step: whether an acknowledgement was due, and what was lost
        self._heard_at = 0.0
        self._alive_at = 0.0  # when a packet is due, if there is nothing to send
        self._probe_at = 0.0

    @property
    def up(self) -> bool:
        """Whether the ends are connected."""
        return self._peer_end != 0

    @property
    def queued(self) -> int:
        """Bodies that are not acknowledged."""
        return len(self._queue)

    def take_updates(self) -> list[Update]:
        """What happened since the last call, in order."""
        updates, self._updates = self._updates, []
        return updates

    def send(self, body: bytes) -> bool:
        """Queues a body; False when the link is down, or is given up because too much waits."""
        if not self.up:
            return False
        if len(self._queue) >= MAX_QUEUED or self._queued_nbytes + len(body) > MAX_QUEUED_NBYTES:
            self._give_up(f"{len(self._queue)} messages wait for it")
            return False
        self._last_seq += 1
        self._queue.append((self._last_seq, body))
        self._queued_nbytes += len(body)
        return True

    @property
    def settled(self) -> bool:
        """Whether ``step`` has no body to send, and ``take_updates`` nothing to tell."""
        return self._sent_seq == self._last_seq and not self._offers and not self._updates

    def send_next(self, body: bytes, now: float) -> Packet | None:
        """``send`` and ``step`` in one, where that is one packet, with this body. None: it is not, nothing is done."""
        room = len(self._queue) < _WINDOW and self._queued_nbytes + len(body) <= _WINDOW_NBYTES
        if not (room and self._peer_end and self.settled) or now - self._heard_at >= self.timeout_s:
            return None
        self._last_seq = self._sent_seq = seq = self._last_seq + 1
        self._queue.append((seq, body))
        self._queued_nbytes += len(body)
        self._probe_at = now + self._probe_s
        packet = self._packet(seq, body)
        self._spoke(now)
        return packet

    def take_next(self, packet: Packet, body: bytes, now: float) -> bool:
        """``receive`` of the next body, or of none, where no update but that body follows. False: nothing is done."""
        ends = packet.end == self._peer_end != 0 and packet.to == self._end
        if not (ends and self.settled) or packet.lost or packet.seq != (self._received + 1 if body else 0):
            return False
        self._heard_at = now
        self._acknowledged(packet.ack, now)
        if body:
            self._received += 1
            self._owe(body, now)
        return True

    def sign_next(self, now: float) -> Packet | None:
        """``step``, where that is one packet without a body. None: it is not, nothing is done."""
        if not self._peer_end or self._queue or not self.settled or now - self._heard_at >= self.timeout_s:
            return None
        if now < self._alive_at and (self._ack_at is None or now < self._ack_at):
            return None
        packet = self._packet()
        self._spoke(now)
        return packet

    def aside(self, body: bytes) -> Packet | None:
        """A packet with a body that is neither numbered nor sent again; None: the link is down."""
        return self._packet(0, body) if self.up else None

    def receive(self, packet: Packet, now: float) -> None:
        """Takes one packet of the other daemon, in whatever order and number they come."""
        if self.up and (packet.end, packet.to) == (self._peer_end, self._end):
            self._take(packet, now)
        elif not self.up:
            if packet.to == self._end:
                self._connect(packet, now)
            else:
                if packet.end != self._heard_end:  # else it was answered, as soon as there was a connection
                    self._hello_at, self._hello_wait_s = now, _HELLO_S
                self._heard_end = packet.end
        elif self._spare is not None and packet.to == self._spare:
            self._end, self._spare = self._spare, None
            self._connect(packet, now)
        elif packet.hello:
            # A newer process, or a late packet. The present connection holds until a packet answers to the spare end.
            self._spare = self._spare or self._new_end()
            self._offers = [Packet(self._instance, self._spare, packet.end)]

    def step(self, now: float, listened_at: float | None = None) -> list[Packet]:
        """Packets to send now. listened_at: all that had arrived by then was received; none: all that has by now.

        The other side is silent only as long as somebody listens: what arrives in a long turn is not late.
        """
        if self.up and (now if listened_at is None else listened_at) - self._heard_at >= self.timeout_s:
            self._give_up(f"silent for {self.timeout_s:g} s")
        out, self._offers = self._offers, []
        return [*out, *(self._bodies(now) if self.up else self._hellos(now))]

    def next_deadline(self) -> float:
        """When ``step`` must be called at the latest; a time in the past: at once."""
        if not self._peer_end:
            return self._hello_at or 0.0
        due = min(self._heard_at + self.timeout_s, self._alive_at)
        if self._waits and self._probe_at < due:
            due = self._probe_at
        return due if self._ack_at is None or due < self._ack_at else self._ack_at

    @property
    def _waits(self) -> bool:
        """For an acknowledgement."""
        return bool(self._queue) and self._sent_seq >= self._queue[0][0]

    def dropped(self, now: float) -> None:
        """ZeroMQ did not take a packet of the last step: there is no connection, or it is full.

        That costs the other side nothing. What the packet said goes out again.
        """
        self._probe_at = min(self._probe_at, now + _RETRY_S)
        ack_due, lost = self._said
        if ack_due:
            self._ack_at, self._lost = now + _RETRY_S, max(self._lost, lost)

    def _give_up(self, reason: str) -> None:
        self._updates.append(Down(reason))
        self._heard_end, self._peer_end = self._peer_end, 0
        self._end, self._spare, self.keepalive = self._new_end(), None, None
        self._hello_at, self._hello_wait_s = None, _HELLO_S
        self._start_over()

    def _connect(self, packet: Packet, now: float) -> None:
        self._start_over()
        self._peer_end, self._heard_end = packet.end, 0
        self.keepalive = self._packet()
        self._updates.append(Up(fresh=packet.instance != self._peer_instance))
        self._peer_instance = packet.instance
        self._ack_at = now  # the other side may wait for it to be connected too
        self._take(packet, now)

    def _take(self, packet: Packet, now: float) -> None:
        self._heard_at = now
        self._acknowledged(packet.ack, now)
        if packet.lost == self._attempt and self._waits:
            self._sent_seq = self._asked_seq = self._queue[0][0] - 1
            self._attempt += 1
        if packet.seq == self._received + 1 and packet.body:
            self._received += 1
            self._owe(packet.body, now)
            self._updates.append(Got(packet.body))
        elif packet.seq:  # it came before, or asks, or is ahead of its turn and comes again
            self._ack_at = now
            self._lost = max(self._lost, packet.attempt) if packet.seq > self._received else self._lost
        elif packet.body:
            self._updates.append(Got(packet.body))

    def _acknowledged(self, ack: int, now: float) -> None:
        if self._queue and self._queue[0][0] <= ack <= self._last_seq:
            while self._queue and self._queue[0][0] <= ack:
                self._queued_nbytes -= len(self._queue.popleft()[1])
            self._sent_seq = max(self._sent_seq, ack)
            self._probe_at = now + self._probe_s

    def _owe(self, body: bytes, now: float) -> None:
        """An acknowledgement, which need not leave alone at once."""
        count, nbytes = self._owed = self._owed[0] + 1, self._owed[1] + len(body)
        step = self._ack_step_s
        due = now if _is_early(count, nbytes) else now - now % step + 2 * step
        self._ack_at = due if self._ack_at is None else min(due, self._ack_at)

    def _bodies(self, now: float) -> list[Packet]:
        out: list[Packet] = []
        nbytes = 0
        for place, (seq, body) in enumerate(self._queue):
            if place >= _WINDOW or (place and nbytes + len(body) > _WINDOW_NBYTES):
                if self._asked_seq < self._sent_seq and not _is_early(place, nbytes):
                    self._asked_seq = self._sent_seq
                    out.append(self._packet(self._sent_seq))
                break
            nbytes += len(body)
            if seq > self._sent_seq:
                out.append(self._packet(seq, body))
                self._sent_seq = seq
        probes = self._waits and (bool(out) or now >= min(self._probe_at, self._alive_at))
        if probes:
            self._probe_at = now + self._probe_s
        ack_due = self._ack_at is not None and now >= self._ack_at
        if not out and (probes or ack_due or now >= self._alive_at):
            out.append(self._packet(self._sent_seq if probes else 0))
        if out:
            self._spoke(now)
        return out

    def _spoke(self, now: float) -> None:
        latest = now + self.timeout_s / KEEPALIVES
        self._alive_at = latest - (latest - self._phase_s) % (self.timeout_s / KEEPALIVES / 2)
        self._said = self._ack_at is not None, self._lost
        self._ack_at, self._lost, self._owed = None, 0, (0, 0)

    def _hellos(self, now: float) -> list[Packet]:
        if self._hello_at is not None and now < self._hello_at:
            return []
        self._hello_at = now + self._hello_wait_s
        self._hello_wait_s = min(2 * self._hello_wait_s, _HELLO_MAX_S)
        return [Packet(self._instance, self._end, self._heard_end, hello=True)]

    def _packet(self, seq: int = 0, body: bytes = b"") -> Packet:
        received, lost = self._received, self._lost
        return Packet(self._instance, self._end, self._peer_end, False, seq, received, body, self._attempt, lost)


def _is_early(count: int, nbytes: int) -> bool:
    """Whether so many bodies are acknowledged at once."""
    return count >= _WINDOW // _EARLY or nbytes >= _WINDOW_NBYTES // _EARLY
