"""Messages to other nodes that wait for a later turn of the loop: one event may order something of each node."""

import math
from collections import deque
from collections.abc import Callable

from ckptd.core.actions import ToNode

_TURN_S = 0.015  # of a turn that has lasted longer, no more messages are sent in it
_SEND_S = 0.01  # for those that waited, in each turn


class Outbox:
    """In the order in which they were given: those of a turn that has not lasted long are sent at once.

    send: what sends one. Nothing waits unless ``begins`` was called.
    """

    def __init__(self, send: Callable[[ToNode], None], clock: Callable[[], float]) -> None:
        self._send, self._clock = send, clock
        self._waiting: deque[ToNode] = deque()
        self._until = math.inf

    def __bool__(self) -> bool:
        """Whether some wait."""
        return bool(self._waiting)

    def begins(self) -> None:
        """A turn of the loop."""
        self._until = self._clock() + _TURN_S

    def carry(self, action: ToNode) -> None:
        """Sends it, or keeps it for ``send_more``."""
        if self._waiting or self._clock() >= self._until:
            self._waiting.append(action)
        else:
            self._send(action)

    def send_more(self, seconds: float = _SEND_S) -> None:
        """Some of those that wait."""
        until = self._clock() + seconds
        while self._waiting and self._clock() < until:
            self._send(self._waiting.popleft())

    def drop(self, node: str) -> None:
        """What waits for the node is lost with its link, as what was sent is."""
        if self._waiting:
            self._waiting = deque(action for action in self._waiting if action.node != node)
