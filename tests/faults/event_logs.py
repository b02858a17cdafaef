"""What ranks noted while they lived: one file for each run and rank, a line for each word."""

import glob
import json
import os
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

_NAME = re.compile(r"diary-([0-9]+)-([0-9]+)\Z")


class Told(NamedTuple):
    """A save whose milestone a rank was told."""

    run: int
    step: int
    milestone: str


def diary_of(directory: str, run: int, rank: int) -> str:
    """Path of a rank's diary."""
    return os.path.join(directory, f"diary-{run}-{rank}")


def lines_of(directory: str, run: int | None = None) -> Iterator[tuple[int, int, Any]]:
    """(run, rank, word) of all diaries, or of one run's. A line that a killed rank did not end is none."""
    for path in sorted(glob.glob(os.path.join(glob.escape(directory), f"diary-{'*' if run is None else run}-*"))):
        match = _NAME.search(path)
        assert match, path
        with open(path, encoding="utf-8") as file:
            for line in file:
                if line.endswith("\n"):
                    yield int(match[1]), int(match[2]), json.loads(line)


def told_in(directory: str, run: int | None = None) -> set[Told]:
    """All milestones that any rank was told."""
    words = ((number, word) for number, _, word in lines_of(directory, run) if isinstance(word, list))
    return {Told(number, step, milestone) for number, (step, milestone, _) in words if milestone}
