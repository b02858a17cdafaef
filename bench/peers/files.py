"""Saves as directories of files: where they lie, how large they are, and that they are on the disk."""

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from bench.peers import Place
from bench.states import State


class Directories:
    """A directory for each save. pattern: names of a rank's own files in it."""

    def __init__(self, place: Place, pattern: str) -> None:
        self._place = place
        self._pattern = pattern.format(rank=place.rank)

    def directory(self, step: int) -> Path:
        """Of one save, the same on all ranks; not made."""
        return self._place.disk / f"step-{step}"

    def prepare(self, state: State) -> None:
        """Most know nothing to do ahead."""

    def before_step(self) -> None:
        """Most hold nothing that the optimizer writes."""

    def nbytes(self, step: int) -> int:
        """Bytes of this rank's files of a save."""
        return nbytes_of(self.directory(step).glob(self._pattern))

    def discard(self, step: int) -> None:
        """Removes a save."""
        shutil.rmtree(self.directory(step))

    def close(self) -> None:
        """Most hold nothing."""


def nbytes_of(paths: Iterable[Path]) -> int:
    """Sum of the sizes of files."""
    return sum(path.stat().st_size for path in paths)


def sync(directory: Path) -> None:
    """Fsync of every file in a directory, the directory and its parent."""
    for path in (*directory.iterdir(), directory, directory.parent):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
