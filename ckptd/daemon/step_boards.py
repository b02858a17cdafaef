"""The daemon's side of the step boards of its ranks: files, read and written, never mapped.

For what is in them see ckptd.shared.format.step_board.
A file that its rank has mapped can be cut short by anybody of this user; one that only reads and writes it is not hurt.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence

from ckptd.core import actions as act
from ckptd.core import events as ev
from ckptd.daemon.background import Background
from ckptd.shared.base.ids import JobKey
from ckptd.shared.format import arena_paths, step_board

_SETTLE_S = 0.002  # longer than a processor keeps a write to itself: after it either side sees what the other wrote
_LOOKS = 50  # at a step that changes while it is read


class StepBoards:
    """``directory`` gives a job's, ``deliver`` takes what was read, ``note`` what could not be written."""

    def __init__(
        self,
        directory: Callable[[JobKey], str],
        deliver: Callable[[ev.Event], None],
        note: Callable[[JobKey, str], None],
    ) -> None:
        self.work = Background(1, "boards")
        self._directory = directory
        self._deliver = deliver
        self._note = note

    def _paths(self, action: act.HoldRanks | act.AnnounceStep) -> list[str]:
        directory = self._directory(action.job)
        return [os.path.join(directory, arena_paths.steps_name(rank, action.session)) for rank in action.ranks]

    def announce(self, action: act.AnnounceStep) -> None:
        """In a thread of its own: it takes milliseconds, and an allocation, or a digest, may take seconds."""
        paths, word = self._paths(action), step_board.encode_word(step_board.at(action.step))

        def done(outcome: list[str] | Exception) -> None:
            for failed in [str(outcome)] if isinstance(outcome, Exception) else outcome:
                self._note(action.job, f"step {action.step} could not be announced to a rank: {failed}")

        self.work.run(lambda: _write_all(paths, word), done)

    def hold(self, action: act.HoldRanks) -> None:
        """In the same thread."""
        paths, failed = self._paths(action), list[str]()

        def done(outcome: tuple[int, int | None] | Exception) -> None:
            for text in failed:
                self._note(action.job, f"a rank could not be asked at which step it is: {text}")
            if isinstance(outcome, Exception):
                self._note(action.job, f"ranks could not be asked at which step they are: {outcome}")
                outcome = (-1, None)
            highest, fixed = outcome
            self._deliver(ev.StepsRead(job=action.job, session=action.session, highest=highest, fixed=fixed))

        self.work.run(lambda: hold(paths, failed), done)


def hold(paths: Sequence[str], failed: list[str] | None = None) -> tuple[int, int | None]:
    """The highest step of these ranks, none of which goes past it now; and one that was announced to them before.

    failed gets what is wrong with a board, if any: its rank has none either, and the others are held all the same.
    """
    fixed, held = None, []
    for path in paths:
        try:
            known = _hold_one(path)
        except OSError as error:
            if failed is not None:
                failed.append(_told(path, error))
            continue
        held.append(path)
        fixed = known if fixed is None else fixed
    time.sleep(_SETTLE_S)
    return max(map(_step_of, held), default=-1), fixed


def _hold_one(path: str) -> int | None:
    """The step that was announced to it; if none was, it waits for one now."""
    with _open(path) as fd:
        word = step_board.decode_word(os.pread(fd, step_board.WORD_NBYTES, step_board.WORD_OFFSET))
        known = step_board.announced(word)
        if known is None:
            os.pwrite(fd, step_board.encode_word(step_board.HOLD), step_board.WORD_OFFSET)
    return known


def _told(path: str, error: OSError) -> str:
    return f"{os.path.basename(path)}: {error.strerror or error}"


def _step_of(path: str) -> int:
    """Read until two reads agree: a rank that has not seen the word yet may be writing."""
    with _open(path) as fd:
        before = os.pread(fd, 8, step_board.STEP_OFFSET)
        for _ in range(_LOOKS):
            time.sleep(_SETTLE_S / 10)
            now = os.pread(fd, 8, step_board.STEP_OFFSET)
            if now == before:
                break
            before = now
    return step_board.decode_step(before)


def _write_all(paths: Sequence[str], word: bytes) -> list[str]:
    """What is wrong with a board, if any; the others are written all the same."""
    failed = []
    for path in paths:
        try:
            with _open(path) as fd:
                os.pwrite(fd, word, step_board.WORD_OFFSET)
        except OSError as error:
            failed.append(_told(path, error))
    return failed


@contextlib.contextmanager
def _open(path: str) -> Iterator[int]:
    """The board, made if its rank has not asked yet."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    try:
        yield fd
    finally:
        os.close(fd)
