"""A daemon that ended while training calls nothing: it is said, and the next one is sought.

The thread that listens does this. Training loses no time: a save takes the connection from it within a tenth of a
second.
"""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Sequence
from typing import Final

import zmq

from ckptd.shared.base.errors import CkptdError
from ckptd.shared.format.arena_paths import SOCKET
from ckptd_client._daemon.channel import PreemptedError, channel_listens
from ckptd_client._daemon.link import Link
from ckptd_client._save.staging import Staging
from ckptd_client.handle import SaveHandle

log = logging.getLogger("ckptd_client")
_OTHERS_S: Final = 3.0  # how long it is left to others, who stopped it perhaps, to start the next one
_START_S: Final = 10.0  # how long an attempt to come back may take
_AGAIN_S: Final = 15.0  # between two attempts
_MAX_STEPS: Final = 4


class LostDaemon:
    """What one client has said and tried since its daemon ended."""

    def __init__(self) -> None:
        self._said_of = 0  # the attachment that was lost
        self._others_until = 0.0
        self._again_at = 0.0
        self._told = ""  # why the last attempt failed
        self._waiting = ""  # the steps that were named

    @property
    def is_awaited(self) -> bool:
        """Whether one was lost, and no other was found."""
        return self._said_of > 0

    def look(self, staging: Staging, waiting: Sequence[SaveHandle]) -> None:
        """Whether the daemon is there, for saves that are not over. Blocks while another one is sought."""
        link, now = staging.link, time.monotonic()
        if not link.is_lost:
            self._found(link.attachments)
            return
        if not waiting:
            return
        if self._said_of != link.attachments:
            self._said_of, self._others_until, self._told = link.attachments, now + _OTHERS_S, ""
            self._waiting = _steps(waiting)
            _say(_ended(link, waiting))
        if now >= self._again_at and (_listens(link) or (link.is_restartable and now >= self._others_until)):
            self._come_back(staging, now)
            if not link.is_lost:
                self._found(link.attachments)

    def _found(self, attachment: int) -> None:
        if self._said_of and attachment > self._said_of:
            _say(f"a daemon of this node runs again and goes on with {self._waiting}")
            self._said_of = 0

    def _come_back(self, staging: Staging, now: float) -> None:
        main = threading.main_thread()
        try:
            with contextlib.suppress(PreemptedError), staging.last(now) as mine:
                if mine and not staging.closed:
                    self._again_at = now + _AGAIN_S
                    staging.link.revive(now + _START_S, lambda: not main.is_alive())
        except (CkptdError, zmq.ZMQError) as error:
            if str(error) != self._told and main.is_alive():
                self._told = str(error)
                _say(f"this rank did not come back to a daemon of this node: {error}")


def _listens(link: Link) -> bool:
    """Whether a daemon has the socket. Costs microseconds."""
    return channel_listens(os.path.join(link.settings.arena, SOCKET))


def _ended(link: Link, waiting: Sequence[SaveHandle]) -> str:
    arena = link.settings.arena
    verb = "is" if len(waiting) == 1 else "are"
    next_one = f"one is started in {_OTHERS_S:g} s" if link.is_restartable else f"start one: ckptd run --arena {arena}"
    return (
        f"the daemon of this node ended: {_steps(waiting)} {verb} not durable before another one runs; {next_one}; "
        f"why it ended: {link.log_path}"
    )


def _steps(waiting: Sequence[SaveHandle]) -> str:
    steps = [handle.step for handle in waiting]
    listed = ", ".join(map(str, steps[:_MAX_STEPS])) + (", ..." if len(steps) > _MAX_STEPS else "")
    return f"step {listed}" if len(steps) == 1 else f"steps {listed}"


def _say(text: str) -> None:
    """Once on each node, where the launcher numbers its ranks there."""
    first = os.environ.get("LOCAL_RANK", "0") == "0"
    log.log(logging.WARNING if first else logging.INFO, "ckptd: %s", text)
