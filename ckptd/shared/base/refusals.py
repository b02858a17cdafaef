"""The one sentence for a value that a setting or an argument does not take: what, where, what it must be. Pure."""

import json
import reprlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from ckptd.shared.base.errors import CkptdError

E = TypeVar("E", bound=CkptdError)


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value was given, and the line that gives another one there."""

    place: str
    line: Callable[[str, object], str]


def call_of(function: str) -> Origin:
    """An argument of a function."""
    return Origin(function, lambda name, value: f"{function}({name}={value!r})")


def variable(name: str) -> Origin:
    """An environment variable."""
    return Origin(name, lambda _, value: f"{name}={_plain(value)}")


def flag(name: str) -> Origin:
    """A flag of the command line. One without a value, such as --exit-when-empty, has none that is refused."""
    return Origin(name, lambda _, value: f"{name} {_plain(value)}")


def toml(path: str) -> Origin:
    """A key of a TOML file."""
    return Origin(path, lambda name, value: f"{name} = {json.dumps(value)} in {path}")


CONNECT = call_of("connect")


def not_allowed(  # noqa: PLR0913 - the parts of one sentence
    kind: type[E], name: str, value: object, must: str, *examples: object, origin: Origin = CONNECT, see: str = ""
) -> E:
    """The error, to be raised. must: what a value is, after "it must be"; examples: values that can be typed.

    see: a command that shows which values there are.
    """
    text = f"{name}={reprlib.repr(value)} (from {origin.place}) is not allowed: it must be {must}"
    shows = [f"{see} shows it"] if see else []
    return kind(text, hint=", or ".join([*(origin.line(name, example) for example in examples), *shows]))


def _plain(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
