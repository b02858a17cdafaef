"""This rank's step board in the arena: one page that its daemon reads and writes (ckptd.shared.format.step_board)."""

import logging
import mmap
import os
import threading
import time

from ckptd.shared.files import spare_pages
from ckptd.shared.format import step_board
from ckptd_client._local.slots import file_at

_STEP = step_board.STEP_OFFSET // 8
_MARK = step_board.MARK_OFFSET // 8
_WORD = step_board.WORD_OFFSET // 8
_CHECK_S = 1.0  # between two checks that the board exists
_NO_BOARD = (
    "ckptd: rank %d cannot hear of a preemption, but of a signal to itself, nor report its steps: no page at %s: %s\n"
    "  It is tried again in each step. Where the memory is full, make room there: df -h %s"
)


log = logging.getLogger("ckptd_client")


def _arena_of(path: str) -> str:
    """The arena of a file in a job's directory."""
    return os.path.dirname(os.path.dirname(os.path.dirname(path)))


class StepBoard:
    """The mapped page: to write a step and read the daemon's word needs no system call. Raises OSError."""

    def __init__(self, path: str) -> None:
        self._path = path
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            # A write to a missing page would kill the process.
            spare_pages.write(_arena_of(path), lambda: os.posix_fallocate(fd, 0, step_board.NBYTES))
            found = os.fstat(fd)
            self._file = (found.st_dev, found.st_ino)
            self._memory = mmap.mmap(fd, step_board.NBYTES)
        finally:
            os.close(fd)
        self._memory.madvise(mmap.MADV_DONTFORK)
        self._numbers = memoryview(self._memory).cast("Q")
        self._barrier = threading.Lock()

    def at(self, step: int) -> int:
        """Writes the step, then reads the daemon's word, always in this order."""
        numbers = self._numbers
        numbers[_STEP] = step + 1
        with self._barrier:  # an atomic instruction: the processor must not read before it
            pass
        return step_board.checked(numbers[_WORD], numbers[_WORD + 1])

    def reached(self, step: int) -> None:
        """Writes that the step is reached, and when. A read between the two gives the step before."""
        self._numbers[_MARK + 1] = time.monotonic_ns()
        self._numbers[_MARK] = step + 1

    def word(self) -> int:
        """The word that the daemon wrote last."""
        return step_board.checked(self._numbers[_WORD], self._numbers[_WORD + 1])

    @property
    def lost(self) -> bool:
        """Whether the file was removed, for example with its arena, so that no daemon finds it."""
        return file_at(self._path) != self._file

    def close(self) -> None:
        """Unmaps the page."""
        self._numbers.release()
        self._memory.close()


class KeptBoard:
    """The board of a client: made at the first use, and again if its file was removed. Warns once if it cannot be."""

    def __init__(self, path: str, rank: int) -> None:
        self._path, self._rank = path, rank
        self._board: StepBoard | None = None
        self._check_at = 0.0
        self._warned = False

    def get(self, now: float) -> StepBoard | None:
        """The board, None if there is none. now: of time.monotonic."""
        if now >= self._check_at or self._board is None:
            self._check(now)
        return self._board

    def _check(self, now: float) -> None:
        self._check_at = now + _CHECK_S
        if self._board is not None and not self._board.lost:
            return
        try:
            self._board = StepBoard(self._path)
        except OSError as error:
            self._board = None
            if not self._warned:
                self._warned = True
                log.warning(_NO_BOARD, self._rank, self._path, error, os.path.dirname(self._path))

    def close(self) -> None:
        """Unmaps the page."""
        if self._board is not None:
            self._board.close()
            self._board = None
