"""What campaigns on real daemons share: an end that cleans up whatever ends them, and calls of which each rank says."""

import contextlib
import signal
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any, NamedTuple

from tests.faults.nodes.clusters import Ranks
from tests.faults.ranks import RankError

_ENDS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class OverdueError(Exception):
    """A part of a campaign took longer than it may."""


class Answer(NamedTuple):
    """What a rank's call came to: a value, or the class and text of an error. Class "stuck": no answer."""

    value: Any = None
    kind: str = ""
    text: str = ""


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """SIGTERM, SIGINT and SIGHUP unwind the program, once, so that every context in it cleans up."""

    def leave(number: int, _frame: FrameType | None) -> None:
        for end in _ENDS:
            signal.signal(end, signal.SIG_IGN)
        raise SystemExit(128 + number)

    before = {end: signal.signal(end, leave) for end in _ENDS}
    try:
        yield
    finally:
        for end, handler in before.items():
            signal.signal(end, handler)


@contextlib.contextmanager
def no_longer_than(seconds: float) -> Iterator[None]:
    """Raises OverdueError in what takes longer. A timer that runs already (a test has one) is set again afterwards."""

    def overdue(_number: int, _frame: FrameType | None) -> None:
        raise OverdueError(f"took longer than {seconds:g} s")

    left, began = signal.getitimer(signal.ITIMER_REAL)[0], time.monotonic()
    before = signal.signal(signal.SIGALRM, overdue)
    signal.setitimer(signal.ITIMER_REAL, min(seconds, left) if left else seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if left:
            signal.setitimer(signal.ITIMER_REAL, max(0.001, left - (time.monotonic() - began)))


def answers(ranks: Ranks, name: str, *args: Any, timeout_s: float = 60.0, **named: Any) -> list[Answer]:
    """The same call on all ranks at once, and what it came to on each."""
    begun = []
    for rank in ranks.all:
        with contextlib.suppress(OSError):
            begun.append(rank.start(name, *args, **named))
    found = []
    for rank in ranks.all:
        try:
            found.append(Answer(rank.result(timeout_s)) if rank in begun else Answer(kind="stuck", text="it is gone"))
        except RankError as error:
            found.append(Answer(kind=error.kind, text=str(error)))
        except (AssertionError, OSError) as error:
            found.append(Answer(kind="stuck", text=f"{name} on rank {rank.rank}: {error}"))
    return found
