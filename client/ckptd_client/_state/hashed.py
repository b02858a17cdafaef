"""Dicts and sets of keys that a file chose: keys may have one hash, and then each takes as long as all before it.

Text and bytes hash by a secret of the process. Numbers, and tuples of them, do not, so whoever writes a file can choose
ten thousand of one hash. They are counted by their hashes before anything is made of them: an int that is a hash is its
own hash, so that the counting itself is never slow, and the answer is the same on a slow machine as on a fast one.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, TypeVar

_ALIKE = 64  # keys of one hash: each is compared with so many at most

_Made = TypeVar("_Made", dict[Any, Any], set[Any])


def dict_of(pairs: Sequence[Any]) -> dict[Any, Any]:
    """Of [key, value] pairs, each key once. Raises ValueError when one is there twice, or too many have one hash."""
    _check(key for key, _ in pairs)
    return _each_once(dict(pairs), pairs)


def set_of(items: Sequence[Any]) -> set[Any]:
    """Of items that differ. Raises ValueError when one is there twice, or too many have one hash."""
    _check(items)
    return _each_once(set(items), items)


def _check(keys: Iterable[Hashable]) -> None:
    if max(Counter(map(hash, keys)).values(), default=0) > _ALIKE:
        raise ValueError("keys that were chosen to have one hash")


def _each_once(made: _Made, of: Sequence[Any]) -> _Made:
    if len(made) != len(of):
        raise ValueError("a key that is there twice")
    return made
