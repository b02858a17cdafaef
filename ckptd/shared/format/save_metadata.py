"""What a training says of a save, such as its loss: few plain values, in rank 0's leaves, then in the commit. Pure."""

import math
import reprlib
from typing import Annotated, Final

import msgspec

from ckptd.shared.base.decoding import MALFORMED
from ckptd.shared.base.errors import UsageError
from ckptd.shared.format.layout import is_text

MAX_KEYS: Final = 64
MAX_NBYTES: Final = 4096  # encoded
_MAX_KEY_CHARS: Final = 128
_INT64: Final = range(-(1 << 63), 1 << 63)

Scalar = bool | int | float | str | None  # None: a number that is not finite, which JSON does not have
SaveMetadata = Annotated[
    dict[Annotated[str, msgspec.Meta(min_length=1, max_length=_MAX_KEY_CHARS)], Scalar],
    msgspec.Meta(max_length=MAX_KEYS),
]
_HINT = 'save(state, step, metadata={"loss": 1.23}): numbers, text and bools that say what this save is'


def checked_metadata(given: object) -> dict[str, Scalar]:
    """The values as they are stored: of plain types, numbers that are not finite as None.

    Raises UsageError, naming the key, for what is not of these types or too much.
    """
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise UsageError(f"metadata must be a dict, not {type(given).__name__}", hint=_HINT)
    if len(given) > MAX_KEYS:
        raise UsageError(f"metadata has {len(given)} keys, at most {MAX_KEYS}", hint=_HINT)
    made = {_key(key): _value(key, value) for key, value in given.items()}
    nbytes = len(msgspec.msgpack.encode(made))
    if nbytes > MAX_NBYTES:
        text = f"metadata has {nbytes} bytes, at most {MAX_NBYTES}"
        raise UsageError(text, hint="it is read with each list of checkpoints; what is larger goes into the state")
    return made


def _key(key: object) -> str:
    if not isinstance(key, str) or not is_text(str.__str__(key)) or not 0 < len(key) <= _MAX_KEY_CHARS:
        text = f"metadata has the key {reprlib.repr(key)}; a key is text of 1 to {_MAX_KEY_CHARS} characters"
        raise UsageError(text, hint=_HINT)
    return str.__str__(key)


def _value(key: str, value: object) -> Scalar:
    """Of subclasses, such as numpy's float64, what they are at heart."""
    match value:
        case bool():
            return value
        case int() if value in _INT64:
            return int.__int__(value)
        case float():
            return float.__float__(value) if math.isfinite(value) else None
        case str() if is_text(str.__str__(value)):
            return str.__str__(value)
    hint = f"metadata={{{key!r}: float(value)}}" if hasattr(value, "__float__") else _HINT
    text = f"metadata[{key!r}] is {reprlib.repr(value)} ({type(value).__name__}): it must be an int, float, str or bool"
    raise UsageError(text, hint=hint)


class _Said(msgspec.Struct, frozen=True, array_like=True):
    """A rank's leaves, of which only the metadata is decoded."""

    version: int
    leaves: msgspec.Raw
    metadata: SaveMetadata = {}


_said_decoder = msgspec.msgpack.Decoder(_Said)


def metadata_in(leaves: bytes) -> dict[str, Scalar]:
    """What the encoded leaves of rank 0 have of it. None of those that cannot be read: their reader says so."""
    try:
        return _said_decoder.decode(leaves).metadata
    except MALFORMED:
        return {}
