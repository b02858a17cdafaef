"""Checkpoints by what their trainings said of them: which come first, which match, which are the best. Pure."""

import difflib
import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple, TypeVar

from ckptd.shared.base.errors import UsageError
from ckptd.shared.format.save_metadata import Scalar

T = TypeVar("T")
Said = Mapping[str, Scalar]
_OPERATORS: Final[dict[str, Callable[[Any, Any], bool]]] = {
    "<=": operator.le, ">=": operator.ge, "!=": operator.ne, "=": operator.eq, "<": operator.lt, ">": operator.gt,
}  # fmt: skip
_CONDITION_RE: Final = re.compile(r"(.+?)\s*(<=|>=|!=|==?|<|>)\s*(.*)", re.DOTALL)


class Order(NamedTuple):
    """By the values of a key, the smallest first, or the largest."""

    key: str
    largest: bool = False


def order_of(text: str) -> Order:
    """The order in KEY, KEY:min or KEY:max."""
    key, _, last = text.rpartition(":")
    return Order(key, last == "max") if key and last in {"min", "max"} else Order(text)


def ordered(items: Iterable[T], said: Callable[[T], Said], order: Order) -> list[T]:
    """Numbers first, then text, then items without a value, and of equal ones as they came."""
    numbers: list[tuple[float, T]] = []
    texts: list[tuple[str, T]] = []
    others: list[T] = []
    for item in items:
        match said(item).get(order.key):
            case bool() | int() | float() as number if math.isfinite(number):
                numbers.append((number, item))
            case str() as text:
                texts.append((text, item))
            case _:
                others.append(item)
    for found in (numbers, texts):
        found.sort(key=operator.itemgetter(0), reverse=order.largest)
    return [*(item for _, item in numbers), *(item for _, item in texts), *others]


def best(items: Iterable[T], said: Callable[[T], Said], order: Order, count: int) -> list[T]:
    """So many of those with a number, the best first."""
    found = ordered(items, said, order)
    return [item for item in found if _number(said(item).get(order.key)) is not None][:count]


class Condition(NamedTuple):
    """A comparison with the value of a key."""

    key: str
    holds: Callable[[Any, Any], bool]
    value: Scalar

    def matches(self, said: Said) -> bool:
        """Whether a value is there, of the same kind, for which it holds."""
        value = said.get(self.key)
        numbers = _number(value), _number(self.value)
        if None not in numbers:
            return self.holds(*numbers)
        return isinstance(value, str) and isinstance(self.value, str) and self.holds(value, self.value)


def condition_of(text: str) -> Condition:
    """The condition in such as loss<1.5, epoch=3, best=true or run=a. Raises UsageError."""
    found = _CONDITION_RE.fullmatch(text)
    if found is None:
        raise UsageError(f"--where {text!r} compares nothing", hint="such as --where 'loss<1.5' or --where epoch=3")
    key, sign, value = found.groups()
    if value.startswith(tuple("<>=!")):
        raise UsageError(f"--where {text!r}: {sign}{value[0]} compares nothing", hint="<, <=, =, !=, >= or >")
    return Condition(key, _OPERATORS[sign.replace("==", "=")], _scalar(value))


def check_key(key: str, said: Iterable[Said], where: str = "here") -> None:
    """Raises UsageError, with the nearest that is there, for a key that none has."""
    known = {name for one in said for name in one}
    if key in known:
        return
    near = difflib.get_close_matches(key, known, 1)
    names = f"did you mean {near[0]}?" if near else f"there are {', '.join(sorted(known))}" if known else ""
    give = "a training gives them: client.save(state, step, metadata={...})"
    raise UsageError(f"no checkpoint {where} has metadata {key!r}", hint=names or give)


def _number(value: Scalar) -> float | None:
    return value if isinstance(value, bool | int | float) and math.isfinite(value) else None


def _scalar(text: str) -> Scalar:
    if text.lower() in {"true", "false"}:
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
