"""Patterns of names that a user gives to connect, and lists of names and ranks for messages."""

import fnmatch
import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

log = logging.getLogger("ckptd_client")
_LISTED = 3  # in one line


@dataclass(frozen=True, slots=True)
class Named:
    """fnmatch patterns of names that belong to one rank each, and of names whose values are equal on all ranks."""

    per_rank: tuple[str, ...] = ()
    replicated: tuple[str, ...] = ()

    def is_own(self, name: str) -> bool:
        """Whether each rank has its own value: a pattern matches the name, or that of a container around it.

        ``loader.*`` also matches ``loader``, the name of an object whose state_dict() is still empty.
        """
        return any(
            name == p.removesuffix(".*") or fnmatch.fnmatchcase(name, p) or fnmatch.fnmatchcase(name, f"{p}.*")
            for p in self.per_rank
        )

    def is_common(self, name: str) -> bool:
        """Whether the user named it as equal on all ranks."""
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.replicated) and not self.is_own(name)

    def warn_of_idle(self, names: Sequence[str]) -> None:
        """Logs the patterns of per_rank that match no name of a state."""
        idle = [p for p in self.per_rank if not any(replace(self, per_rank=(p,)).is_own(name) for name in names)]
        if idle:
            keys = ", ".join(names[:3])
            log.warning("ckptd: per_rank=%r names nothing in the state; its keys are %s, ...", idle, keys)


NOTHING_NAMED = Named()


def listed(places: list[str]) -> str:
    """The first places of a list, and the number of the others."""
    more = f", and {len(places) - _LISTED} more" if len(places) > _LISTED else ""
    return f"{', '.join(places[:_LISTED])}{more}"


def ranks_of(ranks: Collection[int]) -> str:
    """Ranks in words: "rank 3", "ranks 0 to 3", "ranks 0, 2, 5"."""
    ordered = sorted(ranks)
    if len(ordered) == 1:
        return f"rank {ordered[0]}"
    if ordered[-1] - ordered[0] == len(ordered) - 1:
        return f"ranks {ordered[0]} to {ordered[-1]}"
    return f"ranks {listed([*map(str, ordered)])}"
