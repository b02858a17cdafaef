"""Builds dicts and sets of keys from a file, protected against keys that were chosen to have one hash.

Hashes of text and bytes depend on a secret of the process. Those of numbers, and of tuples of numbers, do not, so the
writer of a file can choose ten thousand keys of one hash; each then takes as long to insert as all before it. Keys are
counted by their hashes before a dict or set is built: an int that is a hash is its own hash, so counting is never slow.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, TypeVar

_ALIKE = 64  # keys of one hash that are allowed

_Made = TypeVar("_Made", dict[Any, Any], set[Any])


def dict_of(pairs: Sequence[Any]) -> dict[Any, Any]:
    """A dict of [key, value] pairs. Raises ValueError for a key that occurs twice, and for too many of one hash."""
    _check(key for key, _ in pairs)
    return _each_once(dict(pairs), pairs)


def set_of(items: Sequence[Any]) -> set[Any]:
    """A set of items. Raises ValueError for an item that occurs twice, and for too many of one hash."""
    _check(items)
    return _each_once(set(items), items)


def _check(keys: Iterable[Hashable]) -> None:
    if max(Counter(map(hash, keys)).values(), default=0) > _ALIKE:
        raise ValueError("keys that were chosen to have one hash")


def _each_once(made: _Made, of: Sequence[Any]) -> _Made:
    if len(made) != len(of):
        raise ValueError("a key that is there twice")
    return made
