"""What a checkpoint has had and has no more: names below which values were dropped from it. Pure."""

from collections.abc import Iterable, Sequence
from typing import Annotated

import msgspec

from ckptd.shared.base.errors import UsageError

MAX_DROPPED, MAX_DROPPED_CHARS = 64, 512
MAX_DROPPED_NBYTES = 8192  # of all keys in JSON: COMMITTED, which is read with each list of checkpoints, has them
# In order, each once: a key of the state, such as "optimizer", or a path of keys, joined with dots.
Dropped = Annotated[
    tuple[Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_DROPPED_CHARS)], ...],
    msgspec.Meta(max_length=MAX_DROPPED),
]


def check_dropped(keys: Iterable[str]) -> None:
    """Raises UsageError for more keys than a checkpoint may have lost."""
    said = tuple(keys)
    for key in said:
        if not 0 < len(key) <= MAX_DROPPED_CHARS:
            raise UsageError(f"--drop {key!r} is no key of a state", hint="such as --drop optimizer")
    nbytes = len(msgspec.json.encode(said))
    if len(said) > MAX_DROPPED or nbytes > MAX_DROPPED_NBYTES:
        raise UsageError(
            f"the {len(said)} keys that were dropped have {nbytes:,} bytes, at most {MAX_DROPPED_NBYTES:,} and "
            f"{MAX_DROPPED} keys",
            hint="drop what is above them, such as --drop optimizer",
        )


def dropped_by(votes: Iterable[Sequence[str]]) -> tuple[str, ...]:
    """What a checkpoint lacks, from what each of its votes says."""
    return tuple(sorted({key for keys in votes for key in keys}))


def is_below(name: str, keys: Iterable[str]) -> bool:
    """Whether the value of this name is, or lies below, one of the keys."""
    return any(name == key or name.startswith(f"{key}.") for key in keys)


def dropped_of(names: Iterable[str], dropped: Sequence[str]) -> list[str]:
    """Those of the dropped keys below which some of the names lie."""
    found = list(names)
    return [key for key in dropped if any(is_below(name, [key]) for name in found)]
