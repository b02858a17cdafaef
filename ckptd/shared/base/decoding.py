"""Decoding of bytes of unknown origin. Every decoder of ours makes an error that names the place."""

from collections.abc import Callable
from typing import TypeVar

import msgspec

from ckptd.shared.base.errors import CkptdError, DamagedError
from ckptd.shared.base.wording import cut

# A nesting of 1,000 levels is a RecursionError. A count of 2^32 items is a MemoryError where the system refuses the
# memory for it; nothing of it is touched before the bytes end.
MALFORMED = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, MemoryError)
R = TypeVar("R", bytes, memoryview)
T = TypeVar("T")


def decoded(
    decode: Callable[[R], T], raw: R, what: str, kind: type[CkptdError] = DamagedError,
    look: Callable[[R], object] = bool,
) -> T:  # fmt: skip
    """The value in raw. Raises an error of the kind, whose message begins with what, where decode finds none.

    look: looks at such bytes first, and may raise an error that says more.
    """
    try:
        return decode(raw)
    except MALFORMED as error:
        look(raw)
        raise kind(f"{what}: {cut(error)}") from error
