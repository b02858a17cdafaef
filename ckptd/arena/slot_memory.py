"""A slot file gets its memory: every page is touched before anybody needs it, in huge ones where there are any."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from ckptd.shared.files.mapping import HUGE_NBYTES, Mapping, fill, fill_huge

_MAX_REFUSALS = 8  # of huge pages: then memory is too scattered to ask for more
_FILL_NBYTES = 2 * HUGE_NBYTES  # per call: each holds the process's memory lock, for which the main loop may wait
_COLLAPSE_NBYTES = 8 * _FILL_NBYTES  # the same of huge pages, whose making drops the lock; a call alone costs 3 ms


def make_slot(path: str, capacity: int) -> Iterator[int]:
    """Makes the file and gives it its memory part by part; yields the bytes of each. Raises OSError (ENOSPC)."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(fd, capacity)
        mapping, refusals, made = Mapping(fd, capacity), 0, 0
        for nbytes in _filled_huge(mapping, capacity):
            made += nbytes
            yield nbytes
        for start in range(made, capacity, _FILL_NBYTES):
            nbytes = min(_FILL_NBYTES, capacity - start)
            if nbytes < _FILL_NBYTES or refusals > _MAX_REFUSALS or not fill_huge(mapping, start, nbytes):
                refusals += 1
                os.posix_fallocate(fd, start, nbytes)  # says that there is no room, where a touch would kill us
                fill(mapping, start, nbytes)
            yield nbytes
    finally:
        os.close(fd)


def _filled_huge(mapping: Mapping, capacity: int) -> Iterator[int]:
    """Fills large parts from the start on, by two threads at once; yields the bytes of each, until one is refused.

    Pages behind that may be filled too, or partly: filling them again is harmless.
    """
    starts = range(0, capacity - _COLLAPSE_NBYTES + 1, _COLLAPSE_NBYTES)
    if not starts:
        return
    with ThreadPoolExecutor(2, thread_name_prefix="fill") as pool:
        parts = [pool.submit(fill_huge, mapping, start, _COLLAPSE_NBYTES) for start in starts]
        try:
            for part in parts:
                if not part.result():
                    return
                yield _COLLAPSE_NBYTES
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
