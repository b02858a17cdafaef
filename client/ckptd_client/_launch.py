"""Starts a daemon for this node when none runs. Several ranks may do so at once: the arena's lock lets one live."""

import os
import subprocess
import sys
from collections.abc import Sequence

from ckptd import ballast
from ckptd.protocol.errors import ConnectError
from ckptd.protocol.places import LOG

_DETACH = 'exec >>"$CKPTD_LOG" 2>&1 </dev/null; unset CKPTD_LOG; "$@" &'


def start_daemon(arena: str, flags: Sequence[str] = ()) -> str:
    """Starts one in the background for an arena that exists, and returns its log's path. Does not wait for it.

    flags: settings that its starter was told.

    Raises ConnectError; BudgetError when memory is full.
    """
    log = os.path.join(arena, LOG)
    root = _import_root()
    paths = [path for path in (root, os.environ.get("PYTHONPATH")) if path]
    environ = os.environ | {"CKPTD_LOG": log, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-P", "-m", "ckptd", "run", "--arena", arena, "--exit-when-empty", *flags]
    # The shell leaves at once, so the daemon is nobody's child here and outlives this process and its terminal.
    shell = ["/bin/sh", "-c", _DETACH, "ckptd", *command]
    try:
        with ballast.told_when_full(arena, "the daemon's log"):
            os.close(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))  # whatever umask is
        subprocess.run(shell, env=environ, start_new_session=True, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise ConnectError(f"the daemon could not be started: {error}", hint="start one: ckptd run") from error
    return log


def log_tail(log: str, lines: int = 3) -> str:
    """The last lines of a daemon's log, for an error message."""
    try:
        with open(log, encoding="utf-8", errors="replace") as file:
            return " | ".join(line.strip() for line in file.readlines()[-lines:])
    except OSError:
        return ""


def _import_root() -> str:
    """Directory that the daemon's package is imported from, so that it starts with the very same version."""
    import ckptd.protocol  # noqa: PLC0415 - only its place is wanted

    return os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(ckptd.protocol.__file__))))
