"""Packets that wait for the next bundle, by the daemon that it goes to. Pure: what has left leaves nothing here."""

import math
from typing import NamedTuple

import msgspec

from ckptd.peers.packets import MAX_LETTERS, Bundle, Forward, Forwarded, Letter, Packet
from ckptd.shared.base.ids import JobKey

_MOST_NBYTES = 1 << 20  # of bodies; a larger one travels alone
_LETTER_NBYTES = 64  # about, without the body


class Hop(NamedTuple):
    """Where bundles of one kind go: a daemon's node and key, and the job that it shares with all whose packets go."""

    node: str
    key: str
    job: JobKey
    kind: type[Forward] | type[Forwarded]


class _Batch:
    def __init__(self) -> None:
        self.due = float("inf")
        self.nbytes = 0
        self.letters: list[Letter] = []
        self.bodies: dict[int, tuple[int, bytes]] = {}  # by identity: an order to many nodes is one object

    def has_room(self, packet: Packet) -> bool:
        return len(self.letters) < MAX_LETTERS and self.nbytes + len(packet.body) <= _MOST_NBYTES

    def add(self, letter: Letter) -> None:
        node, path, packet, place, waits = letter.node, letter.path, letter.packet, 0, letter.waits
        if packet.body:
            if id(packet.body) not in self.bodies:
                self.bodies[id(packet.body)] = len(self.bodies) + 1, packet.body
                self.nbytes += len(packet.body)
            place, packet = self.bodies[id(packet.body)][0], msgspec.structs.replace(packet, body=b"")
        self.nbytes += _LETTER_NBYTES
        self.letters.append(Letter(node, path, packet, place, waits))

    def bundle(self, hop: Hop) -> Bundle:
        return hop.kind(hop.job, tuple(self.letters), tuple(body for _, body in self.bodies.values()))


class Bundles:
    """``next``: when ``take`` has something."""

    def __init__(self) -> None:
        self._batches: dict[tuple[str, str], dict[Hop, _Batch]] = {}  # by node and key
        self._full: list[tuple[Hop, Bundle]] = []
        self._due = math.inf  # of the first batch

    def __bool__(self) -> bool:
        """Whether something waits."""
        return bool(self._batches or self._full)

    def add(self, hop: Hop, letter: Letter, due: float) -> None:
        """A letter whose packet still has its body. It leaves at that time at the latest."""
        batches = self._batches.setdefault(hop[:2], {})
        batch = batches.get(hop)
        if batch is None or (batch.letters and not batch.has_room(letter.packet)):
            if batch is not None:
                self._full.append((hop, batch.bundle(hop)))
            batch = batches[hop] = _Batch()
        batch.add(letter)
        batch.due = min(batch.due, due)
        self._due = min(self._due, due)

    def take(self, now: float) -> list[tuple[Hop, Bundle]]:
        """Bundles that are due, in order for each daemon."""
        if now < self._due and not self._full:
            return []
        taken, self._full = self._full, []
        for node_key, batches in list(self._batches.items()):
            for hop in [hop for hop, batch in batches.items() if batch.due <= now]:
                taken.append((hop, batches.pop(hop).bundle(hop)))
            if not batches:
                del self._batches[node_key]
        self._due = min((batch.due for some in self._batches.values() for batch in some.values()), default=math.inf)
        return taken

    def take_all(self, node_key: tuple[str, str]) -> list[tuple[Hop, Bundle]]:
        """Whatever waits for this daemon."""
        taken = [one for one in self._full if one[0][:2] == node_key]
        self._full = [one for one in self._full if one[0][:2] != node_key] if taken else self._full
        return [*taken, *((hop, batch.bundle(hop)) for hop, batch in self._batches.pop(node_key, {}).items())]

    @property
    def next(self) -> float | None:
        """None: nothing waits."""
        if self._full:
            return 0.0
        return self._due if self._batches else None


def opened(letter: Letter, bodies: tuple[bytes, ...]) -> Packet | None:
    """The packet of a letter with its body; None: there is no such body."""
    if not letter.body:
        return letter.packet
    if letter.body > len(bodies):
        return None
    return msgspec.structs.replace(letter.packet, body=bodies[letter.body - 1])
