"""What a save returns, and the book of all of them."""

import time
from collections.abc import Callable, Iterable

from ckptd.protocol.errors import SaveFailedError, UsageError, WaitTimeoutError
from ckptd.protocol.ids import SaveId
from ckptd.protocol.messages import End, Milestone, Progress

_ORDER = list(Milestone)
_FINAL = frozenset({End.DURABLE, End.SUPERSEDED, End.SKIPPED, End.ABANDONED, End.FAILED})
_KEPT_HINT = "client.wait('durable') forces the newest; save(..., drain=True) forces one; drain_every decides"
MAX_HANDLES = 256

Pump = Callable[[float], None]


class SaveHandle:
    """One save's fate. ``milestone`` and ``end`` are as of the last news; reading them fetches what has come."""

    def __init__(self, save: SaveId, pump: Pump) -> None:
        self._save = save
        self._pump = pump
        self._milestone: Milestone | None = None
        self._end: End | None = None
        self._reason = ""
        self._failed_here = False
        self.stall_s = 0.0
        """Seconds that ``save`` held up the caller."""

    @property
    def step(self) -> int:
        """The training step."""
        return self._save.step

    @property
    def save_id(self) -> SaveId:
        """Incarnation, counter and step: the checkpoint's identity."""
        return self._save

    @property
    def milestone(self) -> Milestone | None:
        """The highest milestone reached so far: 'staged', 'protected', 'durable', or None."""
        self._pump(0.0)
        return self._milestone

    @property
    def end(self) -> End | None:
        """How it ended, None while more can come."""
        self._pump(0.0)
        return self._end

    @property
    def reason(self) -> str:
        """Why it ended so, or what went wrong."""
        return self._reason

    def wait(self, milestone: str = "staged", timeout_s: float | None = None) -> "SaveHandle":
        """Blocks until the milestone is reached.

        Raises SaveFailedError, with the reason, as soon as it is out of reach; WaitTimeoutError after timeout_s.
        """
        wanted = check_milestone(milestone)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._pump(0.0)
        while not self.reached(wanted):
            if self._end is not None:
                hint = _KEPT_HINT if self._end is End.KEPT else ""
                text = f"step {self.step} will not become {wanted}: it ended {self._end}"
                raise SaveFailedError(f"{text} ({self._reason})" if self._reason else text, hint=hint)
            left = 1.0 if deadline is None else deadline - time.monotonic()
            if left <= 0:
                raise WaitTimeoutError(f"step {self.step} is {self._milestone or 'not staged'} after {timeout_s:g} s")
            self._pump(min(left, 1.0))
        return self

    def reached(self, wanted: Milestone) -> bool:
        """Whether the milestone, or a higher one, is known to be reached."""
        return self._milestone is not None and _ORDER.index(self._milestone) >= _ORDER.index(wanted)

    @property
    def ended(self) -> bool:
        """Whether no news will change it, short of a forced drain of a kept one."""
        return self._end in _FINAL

    def hear(self, news: Progress) -> None:
        """Takes in what the daemon says."""
        if news.milestone is None and self._failed_here:
            return  # what happened here says more than what the daemon makes of it
        if news.milestone is not None and not self.reached(news.milestone):
            self._milestone = news.milestone
        self._end, self._reason = news.end, news.reason
        if self._end is End.ABANDONED and self._milestone is not None:
            # It was staged, then a newer one; the daemon died while it freed the slots, and the next finds only some.
            self._end = End.SUPERSEDED

    def fail(self, end: End, reason: str) -> None:
        """The save ended on this side."""
        self._end, self._reason, self._failed_here = end, reason, True

    @property
    def failed_here(self) -> bool:
        """Whether it ended on this side."""
        return self._failed_here

    def reopen(self) -> None:
        """A forced drain gives a kept or failed save another chance."""
        if self._end in (End.KEPT, End.FAILED) and self._milestone is not None:
            self._end, self._reason = None, ""

    def __repr__(self) -> str:
        state = self._end or self._milestone or "staging"
        return f"<SaveHandle step {self.step} {state}{': ' + self._reason if self._reason else ''}>"


def check_milestone(name: str) -> Milestone:
    """The milestone of that name. Raises UsageError for any other word."""
    try:
        return Milestone(name)
    except ValueError:
        raise UsageError(f"no milestone is called {name!r}", hint="staged, protected or durable") from None


class HandleBook:
    """The handles of one client, newest last; the oldest ended ones are let go."""

    def __init__(self) -> None:
        self._handles: dict[SaveId, SaveHandle] = {}

    def add(self, handle: SaveHandle) -> None:
        """A new save."""
        self._handles[handle.save_id] = handle
        for save in list(self._handles)[:-MAX_HANDLES]:
            del self._handles[save]

    def hear(self, news: Iterable[Progress]) -> None:
        """Passes news on to the handles they concern."""
        for item in news:
            if item.save in self._handles:
                self._handles[item.save].hear(item)

    def give_up(self, save: SaveId, reason: str) -> None:
        """The save can no more be handed over; if its handle knows nothing better, it failed."""
        handle = self._handles.get(save)
        if handle is not None and handle._milestone is None and handle._end is None:  # noqa: SLF001
            handle.fail(End.FAILED, reason)

    @property
    def newest(self) -> SaveHandle | None:
        """The newest save that may have reached, or may still reach, something."""
        lost = (End.SKIPPED, End.ABANDONED)
        alive = [h for h in self._handles.values() if h._end not in lost and (h._milestone or not h.ended)]  # noqa: SLF001
        return alive[-1] if alive else next(reversed(self._handles.values()), None)
