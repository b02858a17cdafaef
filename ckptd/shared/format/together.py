"""Calls that wait for a store, several at once, with a sign of life after each. Blocks as long as the store does."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

AT_ONCE = 16  # a call to a parallel file system is a wait of about a millisecond, not work
Alive = Callable[[], None]  # called from one thread, whenever a part of the work is done
T = TypeVar("T")
R = TypeVar("R")


def silent() -> None:
    """The sign of life for nobody."""


def together(work: Callable[[T], R], items: Iterable[T], alive: Alive = silent) -> list[R]:
    """The results of work, in the order of the items. Raises what work raises, for the first item of which it does.

    alive: called in this thread after each result. Items whose work has not begun when one fails are left.
    """
    items = list(items)
    found: list[R] = []
    with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="together") as pool:  # each starts when it has work
        try:
            for result in pool.map(work, items) if len(items) > 1 else map(work, items):
                found.append(result)
                alive()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return found
