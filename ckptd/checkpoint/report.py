"""What a check of a checkpoint or slot has found so far."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec

from ckptd.shared.format.digest import BLOCK_NBYTES
from ckptd.shared.format.integrity import XXH3, Integrity

Found = tuple[str, str, tuple[int, int] | None]  # location, what is wrong, which bytes


class Problem(msgspec.Struct, frozen=True):
    """Something wrong in one file, or in one block of it: bytes start to stop, of which block is the index."""

    path: str
    what: str
    block: int | None = None
    start: int = 0
    stop: int = 0

    def __str__(self) -> str:
        place = "" if self.block is None else f" block {self.block} (bytes {self.start} to {self.stop - 1}):"
        return f"{self.path}:{place} {self.what}"


def ignore(_nbytes: int) -> None:
    """Of progress."""


@dataclass
class Report:
    """What a check found. notes are no damage: unfinished saves, leftovers, slots without digests yet."""

    path: str
    checked: list[str] = field(default_factory=list)  # checkpoints and slots
    files: int = 0
    nbytes: int = 0
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    progress: Callable[[int], None] = ignore  # called with the bytes checked so far
    integrity: Integrity = XXH3  # how all of it must be proved
    cached: bool = True  # blocks are read by way of the page cache; else from the medium, where its file system lets us
    _named: set[str] = field(default_factory=set)  # files with a problem

    @property
    def ok(self) -> bool:
        """Whether something was checked and nothing is wrong."""
        return bool(self.checked) and not self.problems

    def problem(self, path: str, what: str, block: tuple[int, int] | None = None) -> None:
        """Adds a problem of a file, or of the block of it that starts and stops there."""
        self._named.add(path)
        if block is None:
            self.problems.append(Problem(path, what.removeprefix(f"{path}: ")))
        else:
            self.problems.append(Problem(path, what, block[0] // BLOCK_NBYTES, *block))

    def names(self, path: str) -> bool:
        """Whether a problem of this file is known."""
        return path in self._named

    def read(self, nbytes: int) -> None:
        """Counts bytes as checked."""
        self.nbytes += nbytes
        self.progress(self.nbytes)

    def take(self, found: Iterable[Found | int]) -> None:
        """Adds what a check of parity yields: problems, and bytes. What is known of a file as a whole stays so."""
        for one in found:
            if isinstance(one, int):
                self.read(one)
            elif one[2] is not None or not self.names(one[0]):
                self.problem(*one)
