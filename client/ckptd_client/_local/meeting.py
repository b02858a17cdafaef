"""Checks that all ranks of the job have called connect, before a collective in which a rank would be stuck.

Rank 0 waits for the others. Then it sends its verdict to the ranks that came: the name of their session, or the ranks
that are missing. In that case each of them raises an error, and all may call connect again. The messages are in
meeting_store.py and meeting_mpi.py; the common parts are here.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence

from ckptd.shared.base.errors import ConnectError
from ckptd.shared.base.wording import named_ranks

log = logging.getLogger("ckptd_client")
WARN_AFTER_S = 5.0  # ranks of a normal job differ by seconds
GRACE_S = 2.0  # longer wait for the verdict of rank 0, whose time begins with its own call
DECIDES_S = 30.0  # limit for the verdict after rank 0 has counted a rank
_FIRST_S, _PER_RANK_S, _LEAST_S = 0.005, 0.0002, 0.25  # between two checks: at first, and at most
MAX_WARNING_RANKS = 8  # ranks that may warn that rank 0 is missing
_ALONE = "one rank alone: connect(alone=True)"


class AbsentError(Exception):
    """The ranks that are known to be missing."""

    def __init__(self, ranks: Sequence[int]) -> None:
        super().__init__(ranks)
        self.ranks = ranks


def not_all_came(ranks: Sequence[int], world_size: int, seconds: float) -> ConnectError:
    """The error on the ranks that came."""
    text = f"{named_ranks(ranks)} of {world_size} did not call connect within {seconds:g} s"
    return ConnectError(text, hint=f"every rank must call connect; {_ALONE}")


def turns(world_size: int, seconds: float, late: Callable[[], Sequence[int]]) -> Iterator[None]:
    """The turns of a wait, with increasing pauses. After 5 s warns once of the late ranks, if there are any."""
    began, pause, warned = time.monotonic(), _FIRST_S, False
    most = max(_LEAST_S, world_size * _PER_RANK_S)
    while (waited := time.monotonic() - began) < seconds:
        yield
        if waited > WARN_AFTER_S and not warned:
            warned = True
            if ranks := late():
                text = "ckptd: connect waits, up to %g s, for %s of %d: every rank must call connect; %s"
                log.warning(text, seconds, named_ranks(ranks), world_size, _ALONE)
        time.sleep(min(pause, most))
        pause *= 1.5


def meet_at_files(exists: Callable[[int], bool], world_size: int, seconds: float) -> None:
    """Waits until each rank's file exists, for ranks on one node that have no messages. Raises ConnectError."""
    waiting = list(range(world_size))
    for _ in turns(world_size, seconds, lambda: waiting):
        waiting[:] = [rank for rank in waiting if not exists(rank)]
        if not waiting:
            return
    raise not_all_came(waiting, world_size, seconds)
