"""Starts a daemon for this node when none runs. Several ranks may do so at once: the arena's lock lets one live."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from ckptd.shared.base.errors import ConnectError
from ckptd.shared.files import locks, spare_pages
from ckptd.shared.format.arena_paths import LOCK, LOG

# The shell stays until it is let go, to know how the daemon ended, if it does.
_DETACH = 'exec >>"$CKPTD_LOG" 2>&1 </dev/null; unset CKPTD_LOG; "$@" & wait "$!"'
_LINES = 3  # of the log, for an error message
_TAIL_NBYTES = 8192
_MISSED = "already serves arena"  # of a daemon that found another one there
_TOLD = {126: "could not be executed", 127: "was not found"}


class Launch:
    """One that is on its way, in the background, for an arena that exists. A context manager that lets it go.

    Then it is nobody's child here, and outlives this process and its terminal. flags: settings that its starter was
    told. Raises ConnectError when none can be started; BudgetError when memory is full.
    """

    def __init__(self, arena: str, flags: Sequence[str] = ()) -> None:
        self._arena = arena
        self.log = os.path.join(arena, LOG)
        if not sys.executable:
            text = "no daemon can be started: this Python does not know its own program (sys.executable is empty)"
            raise ConnectError(text, hint=f"start one: ckptd run --arena {arena}")
        paths = [path for path in (_import_root(), os.environ.get("PYTHONPATH")) if path]
        environ = os.environ | {"CKPTD_LOG": self.log, "PYTHONPATH": os.pathsep.join(paths)}
        command = [sys.executable, "-P", "-m", "ckptd", "run", "--arena", arena, "--exit-when-empty", *flags]
        shell = ["/bin/sh", "-c", _DETACH, "ckptd", *command]
        flags_of_log = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            with spare_pages.told_when_full(arena, "the daemon's log"):
                os.close(os.open(self.log, flags_of_log, 0o600))  # whatever the umask is
            self._said = os.path.getsize(self.log)
            self._shell = subprocess.Popen(shell, env=environ, start_new_session=True)
        except (OSError, subprocess.SubprocessError) as error:
            hint = f"start one: ckptd run --arena {arena}"
            raise ConnectError(f"no daemon can be started: {error}", hint=hint) from None

    @property
    def over(self) -> bool:
        """Whether it has ended."""
        return self._shell.poll() is not None

    @property
    def was_late(self) -> bool:
        """Whether it has ended because another one was there, or was about to go."""
        return self.over and _MISSED in self._words()

    @property
    def other_serves(self) -> bool:
        """Whether some daemon has the arena now."""
        return locks.holder(os.path.join(self._arena, LOCK)) is not None

    def error(self, seconds: float) -> ConnectError:
        """Why it does not listen after so many seconds: how it ended, what it said last, or that it said nothing."""
        told, hint = _told(self._words())
        full = spare_pages.why_full(self._arena)
        told = told or f"{self.log} says nothing of it" + (f"; {full}" if full else "")
        how = _ended(self._shell.returncode) if self.over else f"it does not listen after {seconds:.3g} s"
        hint = hint or (spare_pages.how_to_free(self._arena) if full else f"see {self.log}, or try: ckptd run")
        hint += "; dmesg | tail shows whether memory ran out" if "SIGKILL" in how else ""
        return ConnectError(f"the daemon did not start: {how}: {told}", hint=hint)

    def _words(self) -> str:
        """What it has logged."""
        with contextlib.suppress(OSError), open(self.log, "rb") as file:
            file.seek(max(self._said, os.path.getsize(self.log) - _TAIL_NBYTES))
            return file.read().decode("utf-8", "replace")
        return ""

    def let_go(self) -> None:
        """From here on nobody is told how it ends. Idempotent."""
        if self._shell.poll() is None:
            self._shell.kill()  # the shell alone: the daemon goes on
            self._shell.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.let_go()


def _told(words: str) -> tuple[str, str]:
    """The error and the hint that the command line ended with; else the last lines."""
    lines = [line.strip() for line in words.splitlines() if line.strip()]
    errors = [at for at, line in enumerate(lines) if line.startswith("error: ")]
    if not errors:
        return " | ".join(lines[-_LINES:]), ""
    hints = [line.removeprefix("hint: ") for line in lines[errors[-1] + 1 :] if line.startswith("hint: ")]
    return lines[errors[-1]].removeprefix("error: "), "; ".join(hints)


def _ended(status: int) -> str:
    """Of a status as a shell gives it."""
    if status in _TOLD:
        return f"{sys.executable} {_TOLD[status]}"
    number = -status if status < 0 else status - 128
    if number > 0:
        with contextlib.suppress(ValueError):
            return f"it was killed by {signal.Signals(number).name}"
    return f"it ended with exit status {status}"


def _import_root() -> str:
    """Directory that the daemon's package is imported from, so that it starts with the very same version."""
    import ckptd.shared.protocol  # noqa: PLC0415 - only its place is wanted

    return os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(ckptd.shared.protocol.__file__))))
