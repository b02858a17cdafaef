"""The step board of a rank: one page in the arena by which rank and daemon agree on a step, without a message. Pure.

It has two parts. By the first they agree on the step at which all ranks save when the job is about to be ended. The
rank writes the step that it is at, and then reads the daemon's word; the daemon writes its word, and then reads the
rank's step. So either the rank sees the word in this step, or the daemon sees the step: no rank is past what the daemon
reads without having seen its word first. By the second, the mark, the rank shows how far it has come, and when: that is
for the job's journal, and may be half written when it is read. All numbers are of the machine's own byte order: nobody
else reads them.
"""

import struct

NBYTES = 4096
STEP_OFFSET = 0  # of the rank's u64: its step and one; 0: it has not asked yet
MARK_OFFSET = 16  # of what the rank has reached: u64 of its step and one, u64 of nanoseconds of CLOCK_MONOTONIC
MARK_NBYTES = 16
WORD_OFFSET = 64  # of the daemon's u64 and its complement, in another cache line
WORD_NBYTES = 16

NONE = 0  # nobody preempts the job
HOLD = 1  # somebody does, and the step is being agreed: wait for it
_FIRST = 2  # the step and this: save at that step
_MASK = (1 << 64) - 1
_WORD = struct.Struct("=QQ")
_STEP = struct.Struct("=Q")


def encode_word(word: int) -> bytes:
    """NONE, HOLD or what ``at`` gives, with its complement, so that a torn write is recognized."""
    return _WORD.pack(word, word ^ _MASK)


def decode_word(raw: bytes) -> int:
    """The word. One that is being written reads as HOLD: the reader looks again."""
    if len(raw) < WORD_NBYTES:
        return NONE
    return checked(*_WORD.unpack_from(raw))


def checked(word: int, complement: int) -> int:
    """The word of a page that nobody has written to, or its complement proves; else HOLD."""
    if word == 0 == complement:
        return NONE
    return word if word ^ _MASK == complement else HOLD


def at(step: int) -> int:
    """The word for: save at this step."""
    return step + _FIRST


def announced(word: int) -> int | None:
    """The step at which to save; None: there is none, or none yet."""
    return word - _FIRST if word >= _FIRST else None


def decode_step(raw: bytes) -> int:
    """The step of a rank, -1 before it first asked."""
    return _STEP.unpack_from(raw)[0] - 1 if len(raw) >= _STEP.size else -1


def decode_mark(raw: bytes) -> tuple[int, float]:
    """The step that the rank has reached, -1: none yet; and when (time.monotonic)."""
    step, at = _WORD.unpack_from(raw) if len(raw) >= _WORD.size else (0, 0)
    return step - 1, at / 1e9


def verdict(step: int, word: int) -> bool | None:
    """Whether a rank at this step saves now; None: it waits for the daemons to agree on a step, and reads again.

    Such a wait needs nothing of any rank: daemons read the steps by themselves.
    """
    if word == HOLD:
        return None
    fixed = announced(word)
    return fixed is not None and step >= fixed
