"""Reports to systemd, by datagram: READY, STATUS, STOPPING, WATCHDOG. Does nothing outside a Type=notify unit.

A manager that does not listen must not end the daemon, so failures are returned, never raised.
"""

import math
import os
import socket
from collections.abc import Callable, Mapping

_TIMEOUT_S = 1.0
_AGAIN_S = 1.0  # between two lines of status
_CLOSING_S = 25.0  # after a drain: ending workers and threads takes its time


def notify(*assignments: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the assignments ("READY=1", ...) reached the manager. Blocks for at most a second."""
    address = environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return False
    if address.startswith("@"):  # abstract: no file, the name starts with a zero byte
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
            channel.settimeout(_TIMEOUT_S)
            channel.sendto("\n".join(assignments).encode(), address)
    except OSError:
        return False
    return True


def ready(status: str = "") -> bool:
    """Says that the daemon serves."""
    return notify("READY=1", f"STATUS={_one_line(status)}")


def status(text: str) -> bool:
    """Puts text on the unit's Status line."""
    return notify(f"STATUS={_one_line(text)}")


def stopping(text: str = "", *, drain_s: float = 0.0) -> bool:
    """Says that the daemon is on its way out, and takes the time for a drain of drain_s, if TimeoutStopSec is less."""
    longer = [f"EXTEND_TIMEOUT_USEC={math.ceil((drain_s + _CLOSING_S) * 1e6)}"] if drain_s else []
    return notify("STOPPING=1", *longer, f"STATUS={_one_line(text)}")


def watchdog() -> bool:
    """Says that the loop still turns."""
    return notify("WATCHDOG=1")


def watchdog_interval_s(environ: Mapping[str, str] = os.environ, pid: int | None = None) -> float | None:
    """Seconds between two watchdog() calls, half of what the unit allows; None when nobody waits for this process."""
    usec = environ.get("WATCHDOG_USEC", "")
    meant_for = environ.get("WATCHDOG_PID", "")
    if not usec.isdigit() or int(usec) == 0:
        return None
    if meant_for and meant_for != str(os.getpid() if pid is None else pid):
        return None
    return int(usec) / 2e6


class Manager:
    """Receives once a second what the daemon does, and that its loop turns. text: says the first."""

    def __init__(self, text: Callable[[], str], environ: Mapping[str, str] = os.environ) -> None:
        self._text = text
        self._listens, self._watchdog_s = "NOTIFY_SOCKET" in environ, watchdog_interval_s(environ)
        self._told_at = 0.0

    def next_deadline(self) -> float | None:
        """When ``tell`` must be called at the latest; None: nobody waits for it."""
        return None if self._watchdog_s is None else self._told_at + self._watchdog_s

    def tell(self, now: float) -> None:
        """To be called in each turn. Blocks as ``notify`` does."""
        if not self._listens or now < self._told_at + _AGAIN_S:
            return
        self._told_at = now
        if self._watchdog_s is not None:
            watchdog()
        status(self._text())


def _one_line(text: str) -> str:
    """A newline would start the next assignment."""
    return " ".join(text.split())
