"""Pickles leaves whose keys the user named, when they are saved and when they are loaded.

Such a leaf is a torch.save archive under the codec ``pickle``. All other parts of ckptd handle it as bytes.
"""

import fnmatch
import io
import pickle
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch

from ckptd.shared.base.errors import ConfigError, RestoreError, UsageError
from ckptd.shared.base.refusals import not_allowed
from ckptd.shared.format.layout import Leaf
from ckptd_client._state.leaves import decode_leaf, encode_leaf

CODEC = "pickle"
_ENOUGH_NBYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class PickleKeys:
    """The leaves that may be pickled: fnmatch patterns of names such as ``loader.sampler``."""

    patterns: tuple[str, ...] = ()

    def allow(self, name: str) -> bool:
        """Whether a pattern matches the name."""
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.patterns)


NO_PICKLE = PickleKeys()


def pickle_keys(patterns: Any) -> PickleKeys:
    """The keys of connect's allow_pickle. Raises ConfigError."""
    listed = isinstance(patterns, Collection) and not isinstance(patterns, str | bytes)
    if not listed or not all(isinstance(p, str) and p for p in patterns):
        raise not_allowed(ConfigError, "allow_pickle", patterns, "a list of keys, or of patterns", ["hooks.*"])
    return PickleKeys(tuple(patterns))


def encode(value: Any, name: str, where: str, *, allowed: bool) -> Leaf:
    """A leaf: in the safe encoding where there is one, as a pickle where that is allowed. Raises UsageError."""
    try:
        return encode_leaf(value, where)
    except UsageError as error:
        if not allowed:
            way = f"or let it be pickled: connect(allow_pickle=[{name!r}])"
            way = way if _can_be_pickled(value) else "or take it out of the state: no pickle can hold it either"
            raise UsageError(error.message, hint=f"{error.hint}; {way}") from None
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
    except Exception as error:  # pickle raises any exception, and runs methods of the user
        text = f"{where} cannot be saved, not even as a pickle: {type(error).__name__}: {error}"
        raise UsageError(text, hint="save plain values from which it can be made again") from error
    return Leaf(CODEC, buffer.getvalue())


def _can_be_pickled(value: Any) -> bool:
    """Whether allow_pickle would help: a lambda, an open file or a generator cannot be pickled."""
    try:
        pickle.Pickler(_Nowhere()).dump(value)
    except _EnoughError:
        return True
    except Exception:  # noqa: BLE001 - pickle raises any exception, and runs methods of the user
        return False
    return True


class _EnoughError(Exception):
    """Enough was pickled to assume that the rest can be."""


class _Nowhere:
    """A file that discards its content and stops the pickler after _ENOUGH_NBYTES."""

    def __init__(self) -> None:
        self._left = _ENOUGH_NBYTES

    def write(self, data: Any) -> int:
        self._left -= len(data)
        if self._left < 0:
            raise _EnoughError
        return len(data)


def check_allowed(leaf: Leaf, name: str, where: str, keys: PickleKeys, *, how: str = "connect({})") -> None:
    """Raises RestoreError for a pickle whose key is not allowed. how: what to type, with a place for allow_pickle."""
    if leaf.codec == CODEC and not keys.allow(name):
        raise RestoreError(
            f"{where} is a pickle, which may run any code when it is read",
            hint=f"if you trust who wrote the checkpoint: {how.format(f'allow_pickle=[{name!r}]')}",
        )


def decode(leaf: Leaf, name: str, where: str, keys: PickleKeys) -> Any:
    """The value of a leaf. Reads a pickle, which runs code of its writer, only for an allowed key.

    Raises RestoreError for a key that is not allowed and for what this process cannot build, DamagedError for bytes
    that encode nothing.
    """
    if leaf.codec != CODEC:
        return decode_leaf(leaf, where)
    check_allowed(leaf, name, where, keys)
    try:
        return torch.load(io.BytesIO(leaf.data), map_location="cpu", weights_only=False)
    except Exception as error:  # a class of the user may raise any exception
        text = f"{where}: its pickle cannot be read: {type(error).__name__}: {error}"
        raise RestoreError(text, hint="import what it needs first, in the versions that saved it") from error
