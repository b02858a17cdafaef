"""Around each step of the daemon's loop: a bug that it meets costs its cause an answer, and the loop nothing."""

import contextlib
import logging
import time
from collections.abc import Callable, Iterable
from functools import partial

from ckptd.shared.base.log_line import line

log = logging.getLogger("ckptd")
_PAUSE_S = 0.05  # after one that comes again at once: else it would take a processor
_MAX_CHARS = 500


class BugFence:
    """``bugs`` counts what was caught."""

    def __init__(self) -> None:
        self.bugs = 0
        self._last = ""

    def met(self, error: Exception, what: str, tell: Callable[[str], None]) -> None:
        """Logs it with its traceback, and puts it into a line. It must not be misuse or a fault.

        To be called where it was caught. Blocks for a moment when it is what was caught last: a step that is always due
        would be tried without end.
        """
        self.bugs += 1
        text = f"a bug of ckptd's in {what}: {type(error).__name__}: {error}"[:_MAX_CHARS]
        log.error(line("met a bug", step=what), exc_info=error)
        if text == self._last:
            time.sleep(_PAUSE_S)
        self._last = text
        with contextlib.suppress(Exception):
            tell(text)

    def each(self, steps: Iterable[Callable[[], object]], tell: Callable[[str], None]) -> None:
        """All of them in turn, whatever becomes of any."""
        for step in steps:
            try:
                step()
            except Exception as error:  # noqa: BLE001 - whatever it is, the loop continues
                self.met(error, _name_of(step), tell)


def _name_of(step: Callable[[], object]) -> str:
    return str(getattr(step.func if isinstance(step, partial) else step, "__qualname__", "a step"))
