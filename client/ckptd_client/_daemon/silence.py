"""The error for a daemon that has its socket and does not answer: its process, the state of it, and a hint."""

import os

from ckptd.shared.base.errors import WaitTimeoutError
from ckptd.shared.files import locks
from ckptd.shared.format import arena_paths
from ckptd_client._local.processes import process_of


def silent_daemon(arena: str, waited_s: float, limit: str) -> WaitTimeoutError:
    """The error of a request without an answer. limit: the setting with the timeout; empty: the caller's timeout."""
    daemon = process_of(locks.holder(os.path.join(arena, arena_paths.LOCK)))
    within = f"did not answer within {waited_s:.3g} s{f' ({limit})' if limit else ''}"
    text = f"the daemon behind {os.path.join(arena, arena_paths.SOCKET)}"
    if daemon is None:  # in another pid namespace
        return WaitTimeoutError(f"{text} {within}", hint=f"see what it does: ckptd status --arena {arena}")
    go_on = f"kill -CONT {daemon.pid}" if daemon.is_stopped else f"its log: tail {arena}/{arena_paths.LOG}"
    hint = f"{go_on}; or kill -KILL {daemon.pid}: what is staged outlives it, and the next daemon has it"
    return WaitTimeoutError(f"{text} (pid {daemon.pid}, {daemon.condition}) {within}", hint=hint)
