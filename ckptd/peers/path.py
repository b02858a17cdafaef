"""Which way the packets of one link take: directly, or by a leader that passes them on. Pure.

Paths of a connection are numbered: even numbers are direct, odd ones relayed. A connection begins with number 0. The
greatest number that a packet of the connection has brought counts at both ends, so a late packet moves nothing. Either
end goes back to a direct path when it receives nothing; only one of them tries a relayed one.
"""

import math
from typing import NamedTuple

from ckptd.shared.base.ids import JobKey

_FIRST_S = 0.1  # until the relayed path is tried
_AGAIN_S = 0.5  # until it is tried again, doubled each time, up to
_AGAIN_MAX_S = 60.0
_NUDGE_S = 0.25  # between signs of life on a direct path that is new
_NUDGES = 8  # until something comes on it
_ANSWERS = 2  # of the end that follows
_PATIENCE = 2  # a relayed path may be silent for one of so many parts of the link's timeout


class Via(NamedTuple):
    """A relay: for packets of which job, and the leader's node and key."""

    job: JobKey
    node: str
    key: str


class Path:
    """Of one link. ``number``: that in force; ``via``: the relay of an odd one; ``acked``: the last that was sent."""

    number: int
    via: Via | None
    acked: int

    def __init__(self, timeout_s: float) -> None:
        self._patience_s = timeout_s / _PATIENCE
        self.begin(0.0)

    def begin(self, now: float) -> None:
        """A connection begins, or is over."""
        self.number, self.via, self.acked = 0, None, 0
        self._heard_at = now
        self._wait_s = _AGAIN_S
        self._try_at = math.inf
        self._nudges, self._nudge_at = 0, math.inf

    def heard(self, number: int, via: Via | None, now: float) -> bool:
        """A packet of the connection came on this path; via: the relay, None of a direct one. Whether it is new."""
        if number < self.number or number % 2 != (via is not None):
            return False
        self._heard_at = now
        if number == self.number:
            if self._nudges > _ANSWERS:
                self._nudges, self._nudge_at = 0, math.inf
            return False
        self.number, self.via, self._try_at = number, via, math.inf
        self._nudges = 0 if via is not None else _ANSWERS
        self._nudge_at = now if self._nudges else math.inf
        return True

    def go_direct(self, now: float) -> None:
        """The relayed path is given up. A slow leader is not tried at once: a change costs two connections."""
        self._wait_s = max(self._wait_s, _PATIENCE * self._patience_s)
        self.number, self.via, self._try_at = self.number + 1, None, math.inf
        self._nudges, self._nudge_at = _NUDGES, now

    def try_soon(self, now: float, share: float) -> None:
        """There is a relay, or another one, or it is back. share: of the wait, drawn at random."""
        self._wait_s = _AGAIN_S
        self._try_at = now + share * _FIRST_S

    def try_later(self, now: float, share: float) -> None:
        """It was tried just now, or given up. share: of the wait, drawn at random."""
        self._try_at = now + share * self._wait_s
        self._wait_s = min(2 * self._wait_s, _AGAIN_MAX_S)

    def try_never(self) -> None:
        """There is no other relay."""
        self._try_at = math.inf

    def nudged(self, now: float) -> None:
        """A sign of life was sent."""
        self._nudges -= 1
        self._nudge_at = now + _NUDGE_S if self._nudges else math.inf

    @property
    def relayed(self) -> bool:
        """Whether it is by a relay."""
        return self.via is not None

    @property
    def next_relayed(self) -> int:
        """The number of a relayed path that is newer than this one."""
        return self.number + 1 + self.number % 2

    def is_silent(self, listened_at: float) -> bool:
        """Whether nothing came by the relay for too long. listened_at: all that had arrived by then was received."""
        return self.relayed and listened_at - self._heard_at >= self._patience_s

    def is_to_try(self, now: float) -> bool:
        """Whether the relayed path is to be tried."""
        return now >= self._try_at

    def is_to_nudge(self, now: float) -> bool:
        """Whether a sign of life is due, so that the other end learns of this path."""
        return now >= self._nudge_at

    def next_deadline(self) -> float:
        """When one of these may hold."""
        silent_at = self._heard_at + self._patience_s if self.relayed else math.inf
        return min(silent_at, self._try_at, self._nudge_at)
