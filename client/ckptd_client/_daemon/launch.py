"""Starts a daemon for this node if none runs. Several ranks may do so at once: the arena's lock lets one run."""

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
from ckptd.shared.files.child_process import command, environment
from ckptd.shared.format.arena_paths import LOCK, LOG

# The shell waits for the daemon until detach, so that its exit status is known.
_DETACH = 'exec >>"$CKPTD_LOG" 2>&1 </dev/null; unset CKPTD_LOG; "$@" & wait "$!"'
_LINES = 3  # of the log, for an error message
_TAIL_NBYTES = 8192
_OTHER_SERVES = "already serves arena"  # logged by a daemon that found another one
_EXIT_CAUSES = {126: "could not be executed", 127: "was not found"}


class Launch:
    """A daemon that starts in the background, for an arena that exists. A context manager that detaches it at the end.

    The detached daemon outlives this process and its terminal. flags: command-line settings for it. Raises ConnectError
    if it cannot be started, BudgetError if memory is full.
    """

    def __init__(self, arena: str, flags: Sequence[str] = ()) -> None:
        self._arena = arena
        self.log = os.path.join(arena, LOG)
        if not sys.executable:
            text = "no daemon can be started: this Python does not know its own program (sys.executable is empty)"
            raise ConnectError(text, hint=f"start one: ckptd run --arena {arena}")
        environ = environment() | {"CKPTD_LOG": self.log}
        words = command("ckptd", "run", "--arena", arena, "--exit-when-empty", *flags)
        shell = ["/bin/sh", "-c", _DETACH, "ckptd", *words]
        flags_of_log = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            with spare_pages.told_when_full(arena, "the daemon's log"):
                os.close(os.open(self.log, flags_of_log, 0o600))  # independent of the umask
            self._log_start = os.path.getsize(self.log)
            self._shell = subprocess.Popen(shell, env=environ, start_new_session=True)
        except (OSError, subprocess.SubprocessError) as error:
            hint = f"start one: ckptd run --arena {arena}"
            raise ConnectError(f"no daemon can be started: {error}", hint=hint) from None

    @property
    def over(self) -> bool:
        """Whether the daemon has ended."""
        return self._shell.poll() is not None

    @property
    def was_late(self) -> bool:
        """Whether the daemon has ended because another one had the arena."""
        return self.over and _OTHER_SERVES in self._logged()

    @property
    def other_serves(self) -> bool:
        """Whether a daemon has the arena now."""
        return locks.holder(os.path.join(self._arena, LOCK)) is not None

    def error(self, seconds: float) -> ConnectError:
        """The error if the daemon does not listen after so many seconds: its end and its last log lines."""
        text_of_error, hint = _error_of(self._logged())
        full = spare_pages.why_full(self._arena)
        text_of_error = text_of_error or f"{self.log} says nothing of it" + (f"; {full}" if full else "")
        how = _ended(self._shell.returncode) if self.over else f"it does not listen after {round(seconds, 1):g} s"
        hint = hint or (spare_pages.how_to_free(self._arena) if full else f"see {self.log}, or try: ckptd run")
        hint += "; dmesg | tail shows whether memory ran out" if "SIGKILL" in how else ""
        return ConnectError(f"the daemon did not start: {how}: {text_of_error}", hint=hint)

    def _logged(self) -> str:
        """The last part of its log."""
        with contextlib.suppress(OSError), open(self.log, "rb") as file:
            file.seek(max(self._log_start, os.path.getsize(self.log) - _TAIL_NBYTES))
            return file.read().decode("utf-8", "replace")
        return ""

    def detach(self) -> None:
        """Ends the shell that waits for the daemon. Idempotent."""
        if self._shell.poll() is None:
            self._shell.kill()  # only the shell: the daemon continues
            self._shell.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.detach()


def _error_of(logged: str) -> tuple[str, str]:
    """The error and the hint at the end of a log; else its last lines."""
    lines = [line.strip() for line in logged.splitlines() if line.strip()]
    errors = [at for at, line in enumerate(lines) if line.startswith("error: ")]
    if not errors:
        return " | ".join(lines[-_LINES:]), ""
    hints = [line.removeprefix("hint: ") for line in lines[errors[-1] + 1 :] if line.startswith("hint: ")]
    return lines[errors[-1]].removeprefix("error: "), "; ".join(hints)


def _ended(status: int) -> str:
    """A text for an exit status of a shell."""
    if status in _EXIT_CAUSES:
        return f"{sys.executable} {_EXIT_CAUSES[status]}"
    number = -status if status < 0 else status - 128
    if number > 0:
        with contextlib.suppress(ValueError):
            return f"it was killed by {signal.Signals(number).name}"
    return f"it ended with exit status {status}"
