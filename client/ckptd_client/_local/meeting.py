"""Whether all ranks of the job have called connect: known before the first collective, in which a rank would be stuck.

Rank 0 waits for the others. The ranks that came hear from it that all have, with the name of their session, or who has
not: then each of them raises that, and all may call connect again. How they speak is in meeting_store.py and
meeting_mpi.py; what is common stands here.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence

from ckptd.shared.base.errors import ConnectError
from ckptd.shared.base.wording import named_ranks

log = logging.getLogger("ckptd_client")
SAID_S = 5.0  # ranks of a normal job differ by seconds
GRACE_S = 2.0  # for the verdict of rank 0, whose time counts from when it came itself
DECIDES_S = 30.0  # how long rank 0, once a rank is counted, may take to decide
_FIRST_S, _PER_RANK_S, _LEAST_S = 0.005, 0.0002, 0.25  # between two looks: at first, and at most
SPEAKERS = 8  # of the ranks that wait while rank 0 is missing, those that may say so
_ALONE = "one rank alone: connect(alone=True)"


class AbsentError(Exception):
    """Who has not come, as far as is known."""

    def __init__(self, ranks: Sequence[int]) -> None:
        super().__init__(ranks)
        self.ranks = ranks


def not_all_came(ranks: Sequence[int], world_size: int, seconds: float) -> ConnectError:
    """The error of those that came."""
    text = f"{named_ranks(ranks)} of {world_size} did not call connect within {seconds:g} s"
    return ConnectError(text, hint=f"every rank calls connect; {_ALONE}")


def turns(world_size: int, seconds: float, late: Callable[[], Sequence[int]]) -> Iterator[None]:
    """Turns of a wait, with longer and longer pauses. After 5 s of it says, once, which ranks are late; if any are."""
    began, pause, said = time.monotonic(), _FIRST_S, False
    most = max(_LEAST_S, world_size * _PER_RANK_S)
    while (waited := time.monotonic() - began) < seconds:
        yield
        if waited > SAID_S and not said:
            said = True
            if ranks := late():
                text = "ckptd: connect waits, up to %g s, for %s of %d: every rank calls connect; %s"
                log.warning(text, seconds, named_ranks(ranks), world_size, _ALONE)
        time.sleep(min(pause, most))
        pause *= 1.5


def meet_at_files(exists: Callable[[int], bool], world_size: int, seconds: float) -> None:
    """Waits until each rank's file exists: ranks that run on one node and cannot speak. Raises ConnectError."""
    waiting = list(range(world_size))
    for _ in turns(world_size, seconds, lambda: waiting):
        waiting[:] = [rank for rank in waiting if not exists(rank)]
        if not waiting:
            return
    raise not_all_came(waiting, world_size, seconds)
