"""Detects that the daemon ended while training calls no method, warns, and looks for the next daemon.

The listening thread does this. Training loses no time: a save takes the connection from it within a tenth of a second.
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
from ckptd_client._local.save_record import SaveRecord
from ckptd_client._save.staging import Staging

log = logging.getLogger("ckptd_client")
_OTHERS_S: Final = 3.0  # time for others, who may have stopped the daemon, to start the next one
_START_S: Final = 10.0  # limit of an attempt to attach again
_AGAIN_S: Final = 15.0  # between two attempts; doubles after each
_MOST_S: Final = 240.0
_MAX_STEPS: Final = 4


class LostDaemon:
    """One client's warnings and attempts to attach since its daemon ended."""

    def __init__(self) -> None:
        self._lost_attachment = 0  # number of the attachment that was lost; 0: none
        self._others_until = 0.0
        self._again_at, self._pause_s = 0.0, _AGAIN_S
        self._last_error = ""  # of the last attempt
        self._named: list[weakref.ref[SaveRecord]] = []  # saves that the warning named as not durable

    @property
    def is_awaited(self) -> bool:
        """Whether the daemon was lost and no other was found."""
        return self._lost_attachment > 0

    def check(self, staging: Staging, waiting: Sequence[SaveRecord]) -> None:
        """Checks that the daemon exists; waiting: saves that have not ended. Blocks while it attaches to the next."""
        link, now = staging.link, time.monotonic()
        if not link.is_lost:
            self._on_daemon_found(link)
            return
        if not waiting or staging.closed:
            return
        if self._lost_attachment != link.attachments:
            self._lost_attachment, self._others_until, self._last_error = link.attachments, now + _OTHERS_S, ""
            self._named = [weakref.ref(handle) for handle in waiting]
            _warn_once(link, _ended(link, waiting))
        if now >= self._again_at and (_listens(link) or (link.is_restartable and now >= self._others_until)):
            self._reattach(staging, now)
            if not link.is_lost:
                self._on_daemon_found(link)

    def _on_daemon_found(self, link: Link) -> None:
        """Reports which of the named saves continue: one that the new daemon does not know has lost its memory."""
        if not self._lost_attachment or link.attachments <= self._lost_attachment:
            return
        self._lost_attachment, self._again_at, self._pause_s = 0, 0.0, _AGAIN_S
        named = [handle for reference in self._named if (handle := reference()) is not None]
        lost = [handle for handle in named if handle.known_end is End.FAILED]
        if lost:
            verb = "is" if len(lost) == 1 else "are"
            log.warning("ckptd: a daemon of this node runs again: %s %s lost: %s", _steps(lost), verb, lost[0].reason)
        went_on = [handle for handle in named if handle not in lost]
        if went_on:
            _warn_once(link, f"a daemon of this node runs again and has {_steps(went_on)}")

    def _reattach(self, staging: Staging, now: float) -> None:
        main = threading.main_thread()
        try:
            with contextlib.suppress(PreemptedError), staging.last(now) as mine:
                if mine and not staging.closed:
                    self._again_at, self._pause_s = now + self._pause_s, min(2 * self._pause_s, _MOST_S)
                    staging.link.revive(now + _START_S, lambda: not main.is_alive())
        except (CkptdError, zmq.ZMQError) as error:
            self._lost_attachment = staging.link.attachments  # also if it attached this rank and refused its saves
            if str(error) != self._last_error and main.is_alive():
                self._last_error = str(error)
                log.warning("ckptd: this rank did not come back to a daemon of this node: %s", error)


def _listens(link: Link) -> bool:
    """Whether a daemon has the socket. Takes microseconds."""
    return channel_listens(os.path.join(link.settings.arena, SOCKET))


def _ended(link: Link, waiting: Sequence[SaveRecord]) -> str:
    arena = link.settings.arena
    verb = "is" if len(waiting) == 1 else "are"
    next_one, why = f"start one: ckptd run --arena {arena}", "its stderr says why it ended, or journalctl"
    if link.is_restartable:
        next_one, why = f"one is started in {_OTHERS_S:g} s", f"why it ended: {link.log_path}"
    ended = f"the daemon of this node ended: {_steps(waiting)} {verb} not durable before another one runs"
    return f"{ended}; {next_one}; {why}"


def _steps(waiting: Sequence[SaveRecord]) -> str:
    steps = [handle.step for handle in waiting]
    listed = ", ".join(map(str, steps[:_MAX_STEPS])) + (", ..." if len(steps) > _MAX_STEPS else "")
    return f"step {listed}" if len(steps) == 1 else f"steps {listed}"


def _warn_once(link: Link, text: str) -> None:
    """Warns on one rank of each node, if the launcher numbers the ranks of a node."""
    first = link.group.world_size == 1 or os.environ.get("LOCAL_RANK", "0") == "0"
    log.log(logging.WARNING if first else logging.INFO, "ckptd: %s", text)
