"""Checks of arguments that are independent of their meaning: names, types, numbers."""

import difflib
import functools
import inspect
import math
import os
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from ckptd.shared.base.errors import ConfigError, UsageError
from ckptd.shared.base.refusals import CONNECT, Origin, call_of, not_allowed

P = ParamSpec("P")
R = TypeVar("R")


def checks_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Makes a function raise UsageError with a suggestion for arguments that it does not have."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name not in signature.parameters:
                raise UsageError(f"{function.__name__} has no option {name!r}", hint=_meant(name, signature))
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            taken = [name for name, one in signature.parameters.items() if one.kind is one.POSITIONAL_OR_KEYWORD]
            hint = f"{function.__name__}({', '.join(taken)}, ...): what comes after is given by name, such as store=..."
            raise UsageError(f"{function.__name__}: {error}", hint=hint) from None
        return function(*args, **kwargs)

    return checked


def _meant(name: str, signature: inspect.Signature) -> str:
    near = difflib.get_close_matches(name, signature.parameters, n=1, cutoff=0.7)
    return f"did you mean {near[0]}?" if near else f"it has {', '.join(signature.parameters)}"


def as_flag(name: str, value: object) -> bool:
    """True or False. Raises ConfigError for all else: any text would count as true."""
    if not isinstance(value, bool):
        raise not_allowed(ConfigError, name, value, "True or False", True, False)
    return value


def looks_like_path(value: object) -> bool:
    """Whether the value is the path of a file, as for torch.save."""
    return isinstance(value, os.PathLike) or (isinstance(value, str) and os.sep in value)


def as_seconds(name: str, value: object, *, such_as: int, origin: Origin = CONNECT) -> float:
    """A finite number of seconds above 0. Raises ConfigError."""
    if is_number(value) and 0 < float(value) < math.inf:  # type: ignore[arg-type]
        return float(value)  # type: ignore[arg-type]
    raise not_allowed(ConfigError, name, value, "a number of seconds above 0", such_as, origin=origin)


def as_patience(value: object) -> float | None:
    """The timeout_s of a wait; None waits for ever. Raises UsageError if it is not a time."""
    if value is None:
        return None
    if is_number(value) and float(value) >= 0:  # type: ignore[arg-type]
        return float(value) if float(value) < math.inf else None  # type: ignore[arg-type]
    must = "a number of seconds, or None to wait for as long as it takes"
    raise not_allowed(UsageError, "timeout_s", value, must, 60, None, origin=call_of("wait"))


def is_number(value: object) -> bool:
    """Whether the value counts as a real number: no text, no bool, no complex number, not NaN."""
    if isinstance(value, str | bytes | bool):
        return False
    try:
        return not math.isnan(float(value))  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return False
