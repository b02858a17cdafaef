"""The records of a client's saves, and the book of all records."""

import logging
import time
import weakref
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from ckptd.shared.base.errors import SaveFailedError, UsageError, WaitTimeoutError, parted
from ckptd.shared.base.ids import SaveId
from ckptd.shared.format.schemes import Scheme
from ckptd.shared.protocol.messages import End, Milestone, Progress
from ckptd_client._local.argument_checks import as_patience
from ckptd_client._local.why_late import Cause

log = logging.getLogger("ckptd_client")
_ORDER = list(Milestone)
_FINAL = frozenset({End.DURABLE, End.SUPERSEDED, End.SKIPPED, End.ABANDONED, End.FAILED})
_HINTS = {
    End.KEPT: "client.wait('durable') forces the newest; save(..., drain=True) forces one; drain_every decides",
    End.ABANDONED: "every rank must call save at each step; where a rank has ended, start the job again",
}
MAX_HANDLES = 256  # beyond these, records of ended saves are dropped
MAX_OPEN = 4096
_GONE = "the daemon that knew of it is gone"
_PATIENCE_S = 5.0  # limit of a wait for a slot that only saves of other ranks would free
_ALONE_HINT = "client.wait('durable'); redundancy takes two nodes and connect(redundancy='xor')"


class Pump(Protocol):
    """Receives updates for so many seconds. patience_s: limit of a wait for a new daemon."""

    def __call__(self, seconds: float, patience_s: float | None = None) -> None: ...


@dataclass(slots=True)
class Outlook:
    """The common state of all records of a client."""

    scheme: Scheme = Scheme.NONE  # in force for this rank's node
    why_none: str = ""
    newest_staged: SaveId | None = None
    newest_durable: SaveId | None = None
    notice: str = ""  # the last notice about this job's store
    missed: dict[SaveId, str] = field(
        default_factory=dict
    )  # newer saves of other ranks that were given up, with the reason
    stuck: str = ""  # why saves have stayed in memory since the newest durable one, if that is known
    why_late: Callable[[SaveId, Milestone], Cause] = lambda _save, _wanted: Cause()  # asks the daemon

    def hear(self, save: SaveId, milestone: Milestone) -> None:
        """Records that the save has reached the milestone."""
        self.newest_staged = newest = max(save, self.newest_staged or save)
        self.missed = {missed: why for missed, why in self.missed.items() if missed > newest}
        if milestone is Milestone.DURABLE and (self.newest_durable is None or save > self.newest_durable):
            self.newest_durable, self.stuck = save, ""


class SaveRecord:
    """The record of one save. Reading ``milestone`` and ``end`` receives pending updates first."""

    def __init__(self, save: SaveId, pump: Pump) -> None:
        self.save_id = save
        self._pump = pump
        self.known_milestone: Milestone | None = None  # at the last update
        self.known_end: End | None = None  # likewise
        self.reason = ""  # why it ended so, or its problem
        self.failed_here = self._idle = False  # idle: it waits for ranks that do not save
        self.began = time.monotonic()
        self._outlook = Outlook()
        self.handle: Callable[[], Any] = lambda: None  # a weak reference to the SaveHandle
        self.stall_s = 0.0
        """Seconds that ``save`` held up the caller."""
        self.held_since: float | None = None  # of time.perf_counter: it holds the caller up now, not in stall_s yet
        self.late_nbytes = 0  # copied after save returned

    @property
    def held_s(self) -> float:
        """``stall_s``, with what it comes to now."""
        since = self.held_since
        return self.stall_s + (time.perf_counter() - since if since is not None else 0.0)

    @property
    def late_s(self) -> float:
        """Seconds since the call, without ``held_s``."""
        return max(0.0, time.monotonic() - self.began - self.held_s)

    @property
    def step(self) -> int:
        """The training step."""
        return self.save_id.step

    @property
    def milestone(self) -> Milestone | None:
        """The highest milestone reached so far: 'staged', 'protected', 'durable', or None."""
        self._pump(0.0)
        return self.known_milestone

    @property
    def end(self) -> End | None:
        """How it ended; None while it can still reach a milestone."""
        self._pump(0.0)
        return self.known_end

    def wait(self, milestone: str = "staged", timeout_s: float | None = None) -> "SaveRecord":
        """See SaveHandle.wait."""
        wanted, timeout_s = check_milestone(milestone), as_patience(timeout_s)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._pump(0.0)
        while not self.reached(wanted):
            if self.known_end is not None and not (wanted is Milestone.PROTECTED and self._is_being_protected):
                raise self._out_of_reach(wanted)
            left = 1.0 if deadline is None else deadline - time.monotonic()
            if left <= 0:
                raise self._too_late(wanted, timeout_s)
            self._pump(min(left, 1.0), None if deadline is None else left)
        return self

    def _too_late(self, wanted: Milestone, timeout_s: float | None) -> WaitTimeoutError:
        text, hint = self._outlook.why_late(self.save_id, wanted) if timeout_s else Cause()
        if self.reason and (not text or (self.known_milestone is None and not text.startswith("it "))):
            text, hint = f"it {self.reason}", ""  # from the coordinator; the status of other nodes lacks it
        text = text or (self._outlook.notice if self.known_milestone else "")
        so_far = f"step {self.step} is {self.known_milestone or 'not staged'} after {timeout_s:g} s"
        return WaitTimeoutError(f"{so_far}: {text}" if text else so_far, hint=hint)

    @property
    def _is_being_protected(self) -> bool:
        """Whether it may still become protected, though it will not be drained."""
        newest = self._outlook.newest_staged
        outrun = newest is not None and newest > self.save_id
        return self.known_end is End.KEPT and self._outlook.scheme is not Scheme.NONE and not outrun

    def _out_of_reach(self, wanted: Milestone) -> SaveFailedError:
        text = f"step {self.step} will not become {wanted}: it ended as '{self.known_end}'"
        reason, hint = self.cause
        text += f" ({reason})" if reason else ""
        if wanted is Milestone.PROTECTED and self._outlook.scheme is Scheme.NONE:
            text += f"; without a drain nothing protects it: {self._outlook.why_none}"
            hint = _ALONE_HINT
        elif wanted is Milestone.PROTECTED and self.known_end is End.KEPT:
            text += f"; {self._outlook.newest_staged} was staged before it was protected"
            hint = "wait for the newest: client.wait('protected')"
        return SaveFailedError(text, hint=hint)

    @property
    def cause(self) -> tuple[str, str]:
        """The reason at the last update, and a hint."""
        reason, hint = parted(self.reason)
        return reason, hint or (_HINTS.get(self.known_end, "") if self.known_end is not None else "")

    def reached(self, wanted: Milestone) -> bool:
        """Whether the milestone, or a higher one, is known to be reached."""
        return self.known_milestone is not None and _ORDER.index(self.known_milestone) >= _ORDER.index(wanted)

    @property
    def in_vain(self) -> bool:
        """Whether it has ended, at the last update, and was never staged."""
        return self.known_milestone is None and self.known_end in (End.FAILED, End.SKIPPED, End.ABANDONED)

    @property
    def ended(self) -> bool:
        """Whether no update will change it, but for a forced drain of a kept one."""
        return self.known_end in _FINAL

    @property
    def waits(self) -> bool:
        """Whether it is neither staged nor ended, at the last update."""
        return self.known_milestone is None and self.known_end is None

    @property
    def waits_in_vain(self) -> bool:
        """Whether it waits for ranks that run and do not save, at the last update."""
        return self.waits and self._idle

    def hear(self, news: Progress) -> None:
        """Applies an update of the daemon."""
        if news.milestone is None and news.end is None:  # only the ranks for which it waits
            if self.waits:
                self.reason, self._idle = news.reason, news.idle
            return
        if news.milestone is None and self.failed_here:
            return  # the failure on this rank has the cause
        if news.milestone is not None and not self.reached(news.milestone):
            self.known_milestone = news.milestone
        if news.milestone is Milestone.PROTECTED and news.end is None and not self.failed_here:
            return  # it is protected; the drain does not depend on it
        self.known_end, self.reason = news.end, news.reason
        if self.known_end is End.ABANDONED and self.known_milestone is not None:
            # It was staged, then a newer one; the daemon died while it freed the slots, and the next finds only some.
            self.known_end = End.SUPERSEDED

    def share(self, outlook: Outlook) -> None:
        """Connects the record with the others of its client."""
        self._outlook = outlook

    def fail(self, end: End, reason: str) -> None:
        """Records that the save ended on this rank."""
        self.known_end, self.reason, self.failed_here = end, reason, True

    def reopen(self) -> None:
        """Reopens a kept or failed save for a forced drain."""
        if self.known_end in (End.KEPT, End.FAILED) and self.known_milestone is not None:
            self.known_end, self.reason = None, ""

    def __repr__(self) -> str:
        state = self.known_end or self.known_milestone or "staging"
        reason = self.reason.partition("\n")[0]
        return f"<SaveHandle step {self.step} {state}{': ' + reason if reason else ''}>"


def check_milestone(name: str) -> Milestone:
    """The milestone of that name. Raises UsageError for any other text."""
    try:
        return Milestone(name)
    except ValueError:
        raise UsageError(f"no milestone is called {name!r}", hint="staged, protected or durable") from None


class HandleBook:
    """The records of one client, the newest last; drops the oldest ended ones.

    A dropped record still receives updates while a handle refers to it.
    """

    def __init__(self) -> None:
        self.outlook = Outlook()
        self._handles: dict[SaveId, SaveRecord] = {}
        self._said = ""  # the last logged reason of a waiting save
        self._alive: weakref.WeakValueDictionary[SaveId, SaveRecord] = weakref.WeakValueDictionary()

    def add(self, handle: SaveRecord) -> None:
        """Adds the record of a new save."""
        handle.share(self.outlook)
        self._handles[handle.save_id] = self._alive[handle.save_id] = handle
        surplus = len(self._handles) - MAX_HANDLES
        if surplus > 0:
            ended = [save for save, known in self._handles.items() if known.known_end is not None][:surplus]
            for save in ended or list(self._handles)[:-MAX_OPEN]:
                del self._handles[save]

    def hear(self, news: Iterable[Progress]) -> None:
        """Passes updates to their records. Logs once the ranks for which a save waits."""
        for item in news:
            if item.milestone is not None:
                self.outlook.hear(item.save, item.milestone)
            self.outlook.stuck = item.stuck or self.outlook.stuck
            handle = self._alive.get(item.save)
            if handle is not None:
                handle.hear(item)
                self._say(handle)
            elif item.end is End.ABANDONED and len(self.outlook.missed) < MAX_OPEN:
                self.outlook.missed[item.save] = item.reason

    def _say(self, handle: SaveRecord) -> None:
        if not handle.waits:
            self._said = "" if handle.known_milestone is not None else self._said
        elif handle.reason and handle.reason != self._said:
            self._said = handle.reason
            log.warning("ckptd: step %d %s", handle.step, handle.reason)

    @property
    def handles(self) -> list[SaveRecord]:
        """The records, the oldest first."""
        return list(self._handles.values())

    @property
    def waiting(self) -> list[SaveRecord]:
        """Saves that are neither staged nor ended, the oldest first."""
        return [handle for handle in list(self._handles.values()) if handle.waits]

    @property
    def open(self) -> list[SaveRecord]:
        """Saves whose end is not known, the oldest first."""
        return [handle for handle in list(self._handles.values()) if handle.known_end is None]

    @property
    def waits_for(self) -> str:
        """The save that waits for other ranks, with these ranks and a hint; empty: none is known."""
        return next((f"step {handle.step} {handle.reason}" for handle in self.waiting if handle.reason), "")

    def in_vain(self, slots: int, unsealed: Collection[SaveId]) -> bool:
        """Whether no slot can become free: the daemon keeps slots of saves that wait for ranks which do not save.

        slots: the number of slots of the daemon; unsealed: saves that have none of these.
        """
        waiting = [handle for handle in self.waiting if handle.save_id not in unsealed]
        late = [handle for handle in waiting if handle.waits_in_vain and time.monotonic() >= handle.began + _PATIENCE_S]
        return bool(late) and len(waiting) + (self.outlook.newest_staged is not None) >= slots

    def orphan(self, known: Iterable[SaveId], held: Iterable[SaveId]) -> None:
        """Ends all saves that a new daemon does not know and that this rank is not about to report to it."""
        known = set(known)
        newest = max(known, default=None)
        for save in sorted(set(self._alive.keys()) - known - set(held)):
            handle = self._alive.get(save)
            if handle is not None and handle.known_end is None:
                outrun = handle.known_milestone is not None and newest is not None and save < newest
                handle.fail(End.SUPERSEDED if outrun else End.FAILED, _GONE)

    def of_step(self, incarnation: int, step: int) -> SaveRecord | None:
        """The newest save of the step in the incarnation; None if its record was dropped."""
        same = [h for save, h in list(self._alive.items()) if (save.incarnation, save.step) == (incarnation, step)]
        return max(same, key=lambda h: h.save_id, default=None)

    def give_up(self, save: SaveId, reason: str) -> None:
        """Records that a save cannot be handed over any more; it failed unless its end or milestone is known."""
        handle = self._alive.get(save)
        if handle is not None and handle.known_milestone is None and handle.known_end is None:
            handle.fail(End.FAILED, reason)

    @property
    def newest(self) -> SaveRecord | None:
        """The newest save that has reached a milestone or still can."""
        lost = (End.SKIPPED, End.ABANDONED)
        handles = list(self._handles.values())
        alive = [h for h in handles if h.known_end not in lost and (h.known_milestone or not h.ended)]
        return next(reversed(alive or handles), None)
