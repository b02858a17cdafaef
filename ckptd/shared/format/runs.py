"""Runs of ranks: the first and the end of each, one after the other. Pure."""

from collections.abc import Iterable, Iterator, Sequence


def runs_of(ranks: Iterable[int]) -> list[int]:
    """Of ranks in ascending order."""
    runs: list[int] = []
    for rank in ranks:
        if runs and runs[-1] == rank:
            runs[-1] = rank + 1
        else:
            runs += [rank, rank + 1]
    return runs


def pairs(runs: Sequence[int]) -> Iterator[tuple[int, int]]:
    """First and end of each run."""
    return zip(runs[::2], runs[1::2], strict=True)
