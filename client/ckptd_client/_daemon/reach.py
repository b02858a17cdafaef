"""The way to this node's daemon: one that listens, one that is waited for, one that is started."""

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
_LISTEN_S = 0.2  # how long a daemon that runs may take to accept a connection
_START_S = 10.0  # how long a new one may take to get there
_LISTENER_S = 1.0  # how long a daemon may take to say how it is configured
_SILENT_S = 4.0  # a wait is told after this
_LOOK_S = 0.1
_WORTH_SAYING_S = 1.0  # of what is left of a wait: else its error comes at once
_PAUSE_S = 0.02  # between two daemons that end at once
T = TypeVar("T")


class Unstarted(NamedTuple):
    """Why no daemon is started here, and what else to do about it."""

    why: str
    hint: str


def starts_of(settings: Settings, *, here: bool, again: bool) -> Sequence[str] | Unstarted:
    """For reach. here: whether this side starts daemons; not, as connect was told, or as the lost one was no client's.

    again: one was here before. Else the likeliest cause is that it runs with another arena.
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
    """Returns once a daemon listens: the log of the one that was started for it, empty if none was.

    starts: flags of the daemon to be started when none listens; Unstarted starts none, and waits for one to deadline
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
    """Whether a daemon listens, that one or the one that was quicker. False at once when there is none any more."""
    while not channel.open(min(until, time.monotonic() + _LOOK_S)):
        if channel.lost or time.monotonic() >= until or (launch.over and not launch.other_serves):
            return channel.open(min(until, time.monotonic() + _LISTEN_S))
    return True


def _await(channel: Channel, arena: str, began: float, deadline: float, unstarted: Unstarted) -> None:
    """Somebody else starts it, or is about to: he is given the time, and the user is told."""
    path = os.path.join(arena, SOCKET)
    if channel.open(min(deadline, began + _SILENT_S)):
        return
    if deadline - time.monotonic() > _WORTH_SAYING_S and os.environ.get("LOCAL_RANK", "0") == "0":
        left = deadline - time.monotonic()
        log.warning("ckptd: no daemon listens at %s; it is waited for, %.3g s more; %s", path, left, unstarted.hint)
    if not channel.open(deadline):
        text = f"no daemon listens at {path}, and none came in {time.monotonic() - began:.3g} s; {unstarted.why}"
        raise ConnectError(text, hint=unstarted.hint)


def named_daemon(arena: str) -> str:
    """The daemon of the arena for a sentence, with its pid where that can be known: not in another pid namespace."""
    pid = None
    with contextlib.suppress(OSError):  # no descriptor is left, say: a sentence is worth no error
        pid = locks.holder(os.path.join(arena, LOCK))
    return f"daemon pid {pid}" if pid else "daemon"


def say_started(arena: str, its_log: str, job: JobKey, group: Group, *, again: bool) -> None:
    """A line about the daemon that was started for this rank. again: the one before has ended."""
    started = f"{named_daemon(arena)} started, log {its_log}"
    if again:
        log.warning("ckptd: job %s: the daemon of this node had ended; %s", job.job, started)
        return
    whose = f"job {job.job}, rank {group.rank} of {group.world_size}, store {job.store}"
    log.warning("ckptd: %s: %s", whose, started)


def configured_store(arena: str) -> str:
    """What the daemon of the arena has for jobs that name no store, empty if none runs or answers within a second."""
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


def until_one_stays(talk: Callable[[], T], deadline: float) -> T:
    """What talk returns, begun again while daemons end in the middle of it.

    A daemon that is being killed still accepts connections for a moment after it dropped ours.
    """
    while True:
        try:
            return talk()
        except ChannelLostError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(_PAUSE_S)
