"""Which tensors are exported, under which names and with which dtype. Pure."""

import math
from collections.abc import Mapping, Sequence

import msgspec

from ckptd.checkpoint.export import casts
from ckptd.checkpoint.export.average import Source
from ckptd.checkpoint.export.plan import Tensor
from ckptd.shared.base.errors import UsageError
from ckptd.shared.format.dtypes import is_inexact, itemsize

_NAMES_SHOWN = 5


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """What the user asks for. Prefixes are whole steps of a name: "model" is not the beginning of "model2.weight"."""

    only: tuple[str, ...] = ()  # prefixes; none: all
    strip: str = ""  # prefix taken off
    renames: dict[str, str] = msgspec.field(default_factory=dict)  # by the name in the checkpoint; strip leaves these
    dtype: str | None = None  # of floating tensors, but for those of no dimensions


class Chosen(msgspec.Struct, frozen=True):
    """One tensor of the output. Tied names have the same tensor."""

    name: str
    source: str  # its name in the checkpoint
    tensor: Tensor
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes in the output."""
        return math.prod(self.tensor.shape) * itemsize(self.dtype)


def choose(source: Source, choice: Choice) -> list[Chosen]:
    """The tensors to export, in the order of the state that was saved.

    Only what is chosen has to be whole. Raises DamagedError when it is not; UsageError when nothing is chosen, a
    rename names nothing, or two tensors get one name.
    """
    known = source.names
    names = [name for name in known if wanted(name, choice)]
    _check(choice, names, known)
    tensors = source.tensors(set(names))
    chosen = [_chosen(name, tensors[name], choice) for name in names]
    _check_unique(chosen)
    return chosen


def not_averaged(chosen: Sequence[Chosen], step: int) -> list[str]:
    """What a mean has of the newest checkpoint alone though it is no whole number: a note, where there is such."""
    inexact = [one for one in chosen if is_inexact(one.tensor.dtype) and one.tensor.dtype not in casts.FLOATS]
    if not inexact:
        return []
    dtypes = ", ".join(sorted({one.tensor.dtype for one in inexact}))
    names = _some(sorted(one.source for one in inexact))
    return [f"of step {step} alone, because their dtypes are not averaged ({dtypes}): {names}"]


def wanted(name: str, choice: Choice) -> bool:
    """Whether a value of this name is exported."""
    return not choice.only or any(is_below(name, prefix) for prefix in choice.only)


def new_name(name: str, choice: Choice) -> str:
    """What it is called in the output."""
    new = choice.renames.get(name)
    if new is not None:
        return new
    if not choice.strip or not is_below(name, choice.strip):
        return name
    return name.removeprefix(choice.strip.rstrip(".")).removeprefix(".") or name


def is_below(name: str, prefix: str) -> bool:
    """Whether name is prefix, or begins with its steps."""
    return name == prefix.rstrip(".") or name.startswith(prefix.rstrip(".") + ".")


def _chosen(name: str, tensor: Tensor, choice: Choice) -> Chosen:
    wanted_dtype = choice.dtype if tensor.shape else None  # a count of steps or a scale: it saves nothing, and may lose
    return Chosen(new_name(name, choice), name, tensor, casts.target_dtype(tensor.dtype, wanted_dtype))


def _check(choice: Choice, names: list[str], known: list[str]) -> None:
    if not names:
        tops = sorted({name.partition(".")[0] for name in known})
        raise UsageError(
            f"no tensor begins with {' or '.join(choice.only)}" if known else "the checkpoint has no tensors",
            hint=f"it has {_some(tops)}" if known else "what is no tensor is not exported; use client.load",
        )
    strangers = sorted(set(choice.renames) - set(names))
    if strangers:
        raise UsageError(f"--map names what is not there: {_some(strangers)}", hint=f"there is {_some(names)}")


def _check_unique(chosen: list[Chosen]) -> None:
    seen: dict[str, str] = {}
    for one in chosen:
        other = seen.setdefault(one.name, one.source)
        if other != one.source:
            raise UsageError(f"{other!r} and {one.source!r} would both be called {one.name!r}", hint="change --map")


def _some(names: Sequence[str] | Mapping[str, object]) -> str:
    shown = list(names)[:_NAMES_SHOWN]
    return ", ".join(shown) + (f" and {len(names) - len(shown)} more" if len(names) > len(shown) else "")
