"""A daemon that ended while training calls nothing: it is said, and the next one is sought.

The thread that listens does this. Training loses no time: a save takes the connection from it within a tenth of a
second.
"""

import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Final

import zmq

from ckptd.shared.base.errors import CkptdError
from ckptd.shared.format.arena_paths import SOCKET
from ckptd.shared.protocol.messages import End
from ckptd_client._daemon.channel import PreemptedError, channel_listens
from ckptd_client._daemon.link import Link
from ckptd_client._save.staging import Staging
from ckptd_client.handle import SaveHandle

log = logging.getLogger("ckptd_client")
_OTHERS_S: Final = 3.0  # how long it is left to others, who stopped it perhaps, to start the next one
_START_S: Final = 10.0  # how long an attempt to come back may take
_AGAIN_S: Final = 15.0  # between two attempts, twice as long after each
_MOST_S: Final = 240.0
_MAX_STEPS: Final = 4


class LostDaemon:
    """What one client has said and tried since its daemon ended."""

    def __init__(self) -> None:
        self._said_of = 0  # the attachment that was lost
        self._others_until = 0.0
        self._again_at, self._pause_s = 0.0, _AGAIN_S
        self._told = ""  # why the last attempt failed
        self._named: list[weakref.ref[SaveHandle]] = []  # what was said to be not durable

    @property
    def is_awaited(self) -> bool:
        """Whether one was lost, and no other was found."""
        return self._said_of > 0

    def look(self, staging: Staging, waiting: Sequence[SaveHandle]) -> None:
        """Whether the daemon is there, for saves that are not over. Blocks while another one is sought."""
        link, now = staging.link, time.monotonic()
        if not link.is_lost:
            self._found(link)
            return
        if not waiting or staging.closed:
            return
        if self._said_of != link.attachments:
            self._said_of, self._others_until, self._told = link.attachments, now + _OTHERS_S, ""
            self._named = [weakref.ref(handle) for handle in waiting]
            _say(link, _ended(link, waiting))
        if now >= self._again_at and (_listens(link) or (link.is_restartable and now >= self._others_until)):
            self._come_back(staging, now)
            if not link.is_lost:
                self._found(link)

    def _found(self, link: Link) -> None:
        """What was named goes on, or is lost: a daemon that knows nothing of it has found no memory of it."""
        if not self._said_of or link.attachments <= self._said_of:
            return
        self._said_of, self._again_at, self._pause_s = 0, 0.0, _AGAIN_S
        named = [handle for reference in self._named if (handle := reference()) is not None]
        lost = [handle for handle in named if handle.known_end is End.FAILED]
        if lost:
            verb = "is" if len(lost) == 1 else "are"
            log.warning("ckptd: a daemon of this node runs again: %s %s lost: %s", _steps(lost), verb, lost[0].reason)
        went_on = [handle for handle in named if handle not in lost]
        if went_on:
            _say(link, f"a daemon of this node runs again and has {_steps(went_on)}")

    def _come_back(self, staging: Staging, now: float) -> None:
        main = threading.main_thread()
        try:
            with contextlib.suppress(PreemptedError), staging.last(now) as mine:
                if mine and not staging.closed:
                    self._again_at, self._pause_s = now + self._pause_s, min(2 * self._pause_s, _MOST_S)
                    staging.link.revive(now + _START_S, lambda: not main.is_alive())
        except (CkptdError, zmq.ZMQError) as error:
            self._said_of = staging.link.attachments  # one that let us in, and did not take what is here, is no other
            if str(error) != self._told and main.is_alive():
                self._told = str(error)
                log.warning("ckptd: this rank did not come back to a daemon of this node: %s", error)


def _listens(link: Link) -> bool:
    """Whether a daemon has the socket. Costs microseconds."""
    return channel_listens(os.path.join(link.settings.arena, SOCKET))


def _ended(link: Link, waiting: Sequence[SaveHandle]) -> str:
    arena = link.settings.arena
    verb = "is" if len(waiting) == 1 else "are"
    next_one, why = f"start one: ckptd run --arena {arena}", "its stderr says why it ended, or journalctl"
    if link.is_restartable:
        next_one, why = f"one is started in {_OTHERS_S:g} s", f"why it ended: {link.log_path}"
    ended = f"the daemon of this node ended: {_steps(waiting)} {verb} not durable before another one runs"
    return f"{ended}; {next_one}; {why}"


def _steps(waiting: Sequence[SaveHandle]) -> str:
    steps = [handle.step for handle in waiting]
    listed = ", ".join(map(str, steps[:_MAX_STEPS])) + (", ..." if len(steps) > _MAX_STEPS else "")
    return f"step {listed}" if len(steps) == 1 else f"steps {listed}"


def _say(link: Link, text: str) -> None:
    """Once on each node, where the launcher numbers its ranks there."""
    first = link.group.world_size == 1 or os.environ.get("LOCAL_RANK", "0") == "0"
    log.log(logging.WARNING if first else logging.INFO, "ckptd: %s", text)
