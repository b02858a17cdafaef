"""Saves as directories of files: their paths, their sizes, and their sync to the disk."""

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
        """The directory of one save, equal on all ranks; not created."""
        return self._place.disk / f"step-{step}"

    def prepare(self, state: State) -> None:
        """Most adapters prepare nothing."""

    def before_step(self) -> None:
        """Most adapters keep no tensors that the optimizer writes."""

    def nbytes(self, step: int) -> int:
        """Bytes of this rank's files of a save."""
        return nbytes_of(self.directory(step).glob(self._pattern))

    def discard(self, step: int) -> None:
        """Removes a save."""
        shutil.rmtree(self.directory(step))

    def close(self) -> None:
        """Most adapters have no resources."""


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
