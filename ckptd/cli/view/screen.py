"""A terminal that is drawn over and over, without flicker: one write per frame, no line cleared before it is drawn.

Works on the alternate screen, so that what was on the terminal is there again afterwards, however it ends.
"""

import contextlib
import os
import signal
from collections.abc import Callable
from types import FrameType
from typing import Self

from rich.console import Console, RenderableType

_ENTER = "\x1b[?1049h\x1b[?25l"  # the other screen, no cursor
_LEAVE = "\x1b[?25h\x1b[?1049l"
_BEGIN, _END = "\x1b[?2026h", "\x1b[?2026l"  # one update, for terminals that know of it; others ignore it
_HOME, _TO_LINE_END, _TO_SCREEN_END = "\x1b[H", "\x1b[K", "\x1b[J"
_MORE = "\N{HORIZONTAL ELLIPSIS} {count} more lines: a taller terminal shows them"


def watch(console: Console, frame: Callable[[], RenderableType], interval_s: float) -> RenderableType | None:
    """Draws frame() again and again, and at once when the terminal changes size; until Ctrl-C or SIGTERM.

    Returns the last frame, for the screen that comes back. frame may block; what it raises ends the watch.
    """
    last: RenderableType | None = None
    with _Screen(console) as screen, contextlib.suppress(KeyboardInterrupt):
        while True:
            last = frame()
            screen.draw(last)
            while screen.resized_within(interval_s):
                screen.draw(last)
    return last


class _Screen:
    """Owns the terminal's modes and the signals while it is entered."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._fd = console.file.fileno()
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> Self:
        self._blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGWINCH})
        for number, handler in (
            (signal.SIGTERM, _interrupt),
            (signal.SIGHUP, _interrupt),
            (signal.SIGTSTP, self._rest),
        ):
            self._before[number] = signal.signal(number, handler)
        self._write(_ENTER)
        return self

    def __exit__(self, *_exception: object) -> None:
        with contextlib.suppress(OSError):  # the terminal itself may be gone
            self._write(_LEAVE)
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # what signal() itself gave
        signal.pthread_sigmask(signal.SIG_SETMASK, self._blocked)

    def _rest(self, _number: int, _frame: FrameType | None) -> None:
        """Ctrl-Z: the shell gets its screen back until somebody types fg."""
        self._write(_LEAVE)
        os.kill(os.getpid(), signal.SIGSTOP)
        self._write(_ENTER)

    def draw(self, what: RenderableType) -> None:
        """The frame over the one before. What does not fit below is counted, not scrolled."""
        columns, rows = os.get_terminal_size(self._fd)
        lines = _lines(self._console, what, max(1, columns))
        if len(lines) > rows:
            lines = [*lines[: rows - 1], _MORE.format(count=len(lines) - rows + 1)[:columns]]
        body = "\r\n".join(f"{line}{_TO_LINE_END}" for line in lines)
        self._write(f"{_BEGIN}{_HOME}{body}{_TO_SCREEN_END}{_END}")

    def resized_within(self, seconds: float) -> bool:
        """Sleeps; True as soon as the terminal has another size."""
        return signal.sigtimedwait({signal.SIGWINCH}, seconds) is not None

    def _write(self, text: str) -> None:
        data = memoryview(text.encode(self._console.encoding, "replace"))
        while data:
            data = data[os.write(self._fd, data) :]


def _lines(console: Console, what: RenderableType, columns: int) -> list[str]:
    """Rows of the terminal, with their colours; blanks that only fill them up are left out."""
    console.width = columns
    with console.capture() as captured:
        console.print(what)
    return [line.rstrip() for line in captured.get().rstrip("\n").split("\n")]


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
