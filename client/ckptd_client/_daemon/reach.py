"""Reaches this node's daemon: connects to one that listens, waits for one, or starts one."""

import contextlib
import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from ckptd.shared.base.errors import CkptdError, ConnectError
from ckptd.shared.base.ids import JobKey
from ckptd.shared.files import locks
from ckptd.shared.format.arena_paths import LOCK, SOCKET
from ckptd.shared.protocol.messages import AskNode, NodeInfo
from ckptd_client._daemon.channel import Channel, ChannelLostError, channel_listens
from ckptd_client._daemon.launch import Launch
from ckptd_client._daemon.options import Settings
from ckptd_client._local.rank import Group

log = logging.getLogger("ckptd_client")
_LISTEN_S = 0.2  # limit for a running daemon to accept a connection
_START_S = 10.0  # limit for a new daemon to listen
_LISTENER_S = 1.0  # limit for a daemon to answer with its configuration
_SILENT_S = 4.0  # without a warning about a wait
_POLL_S = 0.1
_WARN_ABOVE_S = 1.0  # a shorter rest of a wait gets no warning: its error follows at once
_PAUSE_S = 0.02  # between two attempts
T = TypeVar("T")


class Unstarted(NamedTuple):
    """Why connect starts no daemon, and a hint."""

    why: str
    hint: str


def starts_of(settings: Settings, *, here: bool, again: bool) -> Sequence[str] | Unstarted:
    """The argument starts of reach. here: whether connect may start a daemon: start=True, and no other program did.

    again: the node had a daemon before. Else it probably runs with another arena.
    """
    if here:
        return settings.proof.flags
    why, run = settings.unstarted, f"ckptd run --arena {settings.arena}"
    if again:
        why = why or "the one that was here was not started by a client, and none is now"
        return Unstarted(why, f"start it as it was started before, such as {run} in another terminal")
    ours = "unset CKPTD_NO_AUTOSTART" if "CKPTD_NO_AUTOSTART" in why else "connect(start=True)"
    return Unstarted(
        why,
        "if yours runs with another arena: connect(arena=...) as its --arena; else start one in another terminal: "
        f"{run}, or let connect do it: {ours}",
    )


def reach(channel: Channel, arena: str, starts: Sequence[str] | Unstarted, deadline: float) -> str:
    """Connects to a daemon. Returns the log of the daemon that it started; empty if it started none. Blocks.

    starts: flags of a daemon to start if none listens; Unstarted: start none, and wait for one until deadline
    (time.monotonic). Raises ConnectError, BudgetError.
    """
    began = time.monotonic()
    if channel.open(min(deadline, began + _LISTEN_S)):
        return ""
    if isinstance(starts, Unstarted):
        _await(channel, arena, began, deadline, starts)
        return ""
    until = min(deadline, began + _START_S)
    while True:
        with Launch(arena, starts) as launch:
            if _follow(channel, launch, until):
                return launch.log
            if not launch.was_late or time.monotonic() >= until:
                raise launch.error(time.monotonic() - began)


def _follow(channel: Channel, launch: Launch, until: float) -> bool:
    """Waits until a daemon listens: the new one, or one that was faster. False at once if both have ended."""
    while not channel.open(min(until, time.monotonic() + _POLL_S)):
        if channel.lost or time.monotonic() >= until or (launch.over and not launch.other_serves):
            return channel.open(min(until, time.monotonic() + _LISTEN_S))
    return True


def _await(channel: Channel, arena: str, began: float, deadline: float, unstarted: Unstarted) -> None:
    """Waits for a daemon that another program starts, with a warning. Raises ConnectError."""
    path = os.path.join(arena, SOCKET)
    if channel.open(min(deadline, began + _SILENT_S)):
        return
    if deadline - time.monotonic() > _WARN_ABOVE_S and os.environ.get("LOCAL_RANK", "0") == "0":
        left = deadline - time.monotonic()
        log.warning("ckptd: no daemon listens at %s; it is waited for, %.3g s more; %s", path, left, unstarted.hint)
    if not channel.open(deadline):
        text = f"no daemon listens at {path}, and none came in {time.monotonic() - began:.3g} s; {unstarted.why}"
        raise ConnectError(text, hint=unstarted.hint)


def named_daemon(arena: str) -> str:
    """The daemon of the arena for a message, with its pid if it is in this pid namespace."""
    pid = None
    with contextlib.suppress(OSError):  # for example no free descriptor: a message must not fail for it
        pid = locks.holder(os.path.join(arena, LOCK))
    return f"daemon pid {pid}" if pid else "daemon"


def log_started(arena: str, its_log: str, job: JobKey, group: Group, *, again: bool) -> None:
    """Logs that this rank started a daemon. again: after an earlier daemon ended."""
    started = f"{named_daemon(arena)} started, log {its_log}"
    if again:
        log.warning("ckptd: job %s: the daemon of this node had ended; %s", job.job, started)
        return
    whose = f"job {job.job}, rank {group.rank} of {group.world_size}, store {job.store}"
    log.warning("ckptd: %s: %s", whose, started)


def configured_store(arena: str) -> str:
    """The default store of the arena's daemon; empty if none runs or answers within a second."""
    path = os.path.join(arena, SOCKET)
    if not channel_listens(path):
        return ""
    channel = Channel(path, lambda _push: None)
    try:
        info = channel.request(lambda seq: AskNode(seq=seq), time.monotonic() + _LISTENER_S)
    except CkptdError:
        return ""
    finally:
        channel.close()
    return info.store if isinstance(info, NodeInfo) else ""


def retry_while_daemons_end(talk: Callable[[], T], deadline: float) -> T:
    """Calls talk, again while daemons end during the call, and returns its result.

    A daemon that is being killed still accepts connections for a moment after it dropped ours.
    """
    while True:
        try:
            return talk()
        except ChannelLostError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(_PAUSE_S)
