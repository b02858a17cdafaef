"""Paths as people write them: ``~`` is a home directory, and a relative path begins where this process works."""

import os

from ckptd.shared.base.errors import ConfigError

_URL = "://"


def is_url(location: str) -> bool:
    """Whether it has a scheme: all else is a path."""
    return _URL in location


def resolved(path: str) -> str:
    """The absolute path. Raises ConfigError for a home directory or a working directory that is not there."""
    found = os.path.expanduser(path)
    if found.startswith("~"):
        raise ConfigError(f"{path!r}: there is no home directory {found.split('/')[0]}", hint=f"such as './{path}'")
    try:
        return os.path.abspath(found)
    except FileNotFoundError:
        text = f"{path!r} is relative, and the working directory of this process was removed"
        raise ConfigError(text, hint="an absolute path, or cd to a directory that is there") from None


def resolved_location(location: str) -> str:
    """As resolved; a URL stays as it is."""
    return location if is_url(location) else resolved(location)
