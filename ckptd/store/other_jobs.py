"""Which other jobs have checkpoints on a store: for a user whose job has none there, and may be misspelt."""

import contextlib
import difflib

from ckptd.shared.base.ids import parse_dirname
from ckptd.store.interface import Store

MOST_JOBS = 5  # that are named
_MOST_DIRECTORIES = 20  # that are looked into: a store may have thousands


def other_jobs(store: Store, job: str) -> list[str]:
    """Some of them with the step of the newest checkpoint, the likest name first; "..." at the end: there may be more.

    Goes by names alone, and raises nothing: what cannot be listed is left out.
    """
    found: list[str] = []
    names: list[str] = []
    with contextlib.suppress(OSError):
        names = [name for name in store.jobs() if name != job]
    likest = difflib.get_close_matches(job, names, n=MOST_JOBS)
    ordered = [*likest, *sorted(set(names).difference(likest))]
    for name in ordered[:_MOST_DIRECTORIES]:
        with contextlib.suppress(OSError):
            newest = store.names(name)[:1]
            found += [f"{name} (step {_step(dirname)})" for dirname in newest]
    more = len(found) > MOST_JOBS or (bool(found) and len(ordered) > _MOST_DIRECTORIES)
    return [*found[:MOST_JOBS], *(["..."] if more else [])]


def _step(dirname: str) -> int:
    parsed = parse_dirname(dirname)
    assert parsed is not None  # noqa: S101 - names lists no other ones
    return parsed[0]
