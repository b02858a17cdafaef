"""Kinds of stores by the scheme of their URLs: one line of ``_KINDS`` each. A kind is imported when it is used."""

import importlib
from collections.abc import Callable

from ckptd.shared.base.errors import UsageError
from ckptd.shared.format.integrity import Integrity
from ckptd.store.interface import Store

_KINDS = {
    "": "ckptd.store.posix.store:PosixStore",  # a path
}


def open_store(url: str, integrity: Integrity) -> Store:
    """The store at the URL, which need not be there yet. Touches nothing. Raises UsageError for an unknown scheme."""
    scheme, mark, _ = url.partition("://")
    kind = _KINDS.get(scheme if mark else "")
    if kind is None:
        known = ", ".join(f"{name}://" for name in _KINDS if name) or "no other kind of store"
        raise UsageError(f"{url}: ckptd has no store for {scheme}://", hint=f"give a path; it has {known}")
    module, _, name = kind.partition(":")
    made: Callable[[str, Integrity], Store] = getattr(importlib.import_module(module), name)
    return made(url, integrity)
