"""A rate for work that reports the bytes it has done."""

import time
from collections.abc import Callable


def _nothing() -> None:
    return None


class Throttle:
    """For progress: sleeps so that no more than bytes_per_s are done; 0: never. alive: called meanwhile, too."""

    def __init__(self, bytes_per_s: int, alive: Callable[[], None] = _nothing) -> None:
        self._rate, self._alive = bytes_per_s, alive
        self._began_s = time.monotonic()

    def __call__(self, done: int) -> None:
        """So many bytes are, in all."""
        self._alive()
        until_s = self._began_s + done / self._rate if self._rate else 0.0
        while (left_s := until_s - time.monotonic()) > 0:
            time.sleep(min(left_s, 1.0))
            self._alive()
