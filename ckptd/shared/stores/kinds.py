"""Kinds of stores by the scheme of their URLs: a kind is one line of ``KINDS``, and is imported when it is used."""

import importlib
import os
from typing import Any, NamedTuple

from ckptd.shared.base.errors import UsageError
from ckptd.shared.files.paths import is_url, resolved
from ckptd.shared.format.integrity import XXH3, Integrity
from ckptd.shared.format.stored_files import StoredFiles


class Kind(NamedTuple):
    """The two classes of a kind of store, each as module:class."""

    files: str  # a StoredFiles, made of a location and an integrity: the side that a training imports
    store: str  # a ckptd.store.interface.Store, made of a URL and an integrity


KINDS = {
    "": Kind("ckptd.shared.stores.directory:DirectoryFiles", "ckptd.store.posix.store:PosixStore"),  # a path
}
_MARK = "://"


def kind_of(location: str) -> Kind:
    """The kind of store that a location is on. Raises UsageError for an unknown scheme."""
    scheme = location.partition(_MARK)[0] if is_url(location) else ""
    if scheme not in KINDS:
        known = ", ".join(["a path", *(f"{name}{_MARK}" for name in KINDS if name)])
        raise UsageError(f"{location}: ckptd has no store for {scheme}{_MARK}", hint=f"a store is {known}")
    return KINDS[scheme]


def loaded(name: str) -> Any:
    """The class that module:class names."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def open_files(location: str, integrity: Integrity) -> StoredFiles:
    """The files at a location, to be read. Touches nothing. Raises UsageError for an unknown scheme."""
    made: StoredFiles = loaded(kind_of(location).files)(location, integrity)
    return made


def is_there(location: str) -> bool:
    """Whether anything lies at a location that can have files. Raises OSError."""
    try:
        open_files(location, XXH3).names()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def is_store_url(location: str) -> bool:
    """Whether it is the URL of a kind of store that there is; False for a path."""
    return is_url(location) and location.partition(_MARK)[0] in KINDS


def normal(location: str) -> str:
    """The one spelling of a location."""
    return location.rstrip("/") if is_url(location) else os.path.normpath(location)


def absolute(location: str) -> str:
    """As normal, of a location as people write it (``~``, relative). Raises ConfigError as resolved does."""
    return normal(location) if is_url(location) else resolved(location)


def real(location: str) -> str:
    """As absolute, with all links followed: a checkpoint is held against its directory's name."""
    return location if is_url(location) else os.path.realpath(resolved(location))
