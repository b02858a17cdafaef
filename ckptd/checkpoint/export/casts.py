"""Casts of floating elements, rounded once, to the nearest, ties to even; NaN stays NaN, too large becomes infinite.

The one module that wants numpy, and only when a cast is asked for: in plain Python a gigabyte would take minutes.
"""

import importlib.util
from typing import TYPE_CHECKING, Any

from ckptd.shared.base.errors import UsageError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

FLOATS = frozenset({"BF16", "F16", "F32", "F64"})  # what is cast; F8 stays: it has scales that only its model knows
TARGETS = ("BF16", "F16", "F32")


def target_dtype(dtype: str, wanted: str | None) -> str:
    """What a tensor of dtype becomes when wanted is asked for (None: nothing is)."""
    return wanted if wanted and dtype in FLOATS else dtype


def require_numpy() -> None:
    """Raises UsageError when there is no numpy."""
    if importlib.util.find_spec("numpy") is None:
        raise UsageError("casting needs numpy, which is not installed", hint="pip install 'ckptd[torch]'")


def cast(source: memoryview, dtype: str, into: memoryview, wanted: str) -> None:
    """Elements of dtype in source, as wanted, in into. Both little-endian; into has the bytes that takes."""
    import numpy as np  # noqa: PLC0415  # optional

    out = np.frombuffer(into, dtype=_stored(wanted))
    with np.errstate(over="ignore", invalid="ignore"):
        if wanted == "BF16":
            out[:] = _to_bf16(source, dtype)
        elif dtype == "BF16":
            out[:] = _bf16_as_f32(source)  # exact; then once to F16 or not at all
        else:
            out[:] = np.frombuffer(source, dtype=_stored(dtype))


class Sum:
    """Elements of one floating dtype, added in F32; those of F64 in F64."""

    def __init__(self, dtype: str) -> None:
        self._dtype = dtype
        self._wide = "F64" if dtype == "F64" else "F32"
        self._total: npt.NDArray[Any] | None = None
        self._count = 0

    def add(self, source: memoryview) -> None:
        """Adds as many elements as in each call; source may be reused afterwards."""
        import numpy as np  # noqa: PLC0415

        plain = np.frombuffer(source, dtype=_stored(self._dtype)) if self._dtype != "BF16" else _bf16_as_f32(source)
        if self._total is None:
            self._total = plain.astype(_stored(self._wide))
        else:
            with np.errstate(over="ignore", invalid="ignore"):
                self._total += plain
        self._count += 1

    def mean(self, into: memoryview, wanted: str) -> None:
        """What was added, divided by how often, in the wanted dtype, rounded once. Ends the sum."""
        import numpy as np  # noqa: PLC0415

        assert self._total is not None  # noqa: S101 - something was added
        with np.errstate(over="ignore", invalid="ignore"):
            self._total /= self._count
        cast(self._total.data.cast("B"), self._wide, into, wanted)


def _stored(dtype: str) -> str:
    """Numpy's name for the elements as they are stored; it has no bfloat16."""
    return {"BF16": "<u2", "F16": "<f2", "F32": "<f4", "F64": "<f8"}[dtype]


def _bf16_as_f32(source: memoryview) -> "npt.NDArray[np.float32]":
    import numpy as np  # noqa: PLC0415

    bits = np.frombuffer(source, dtype="<u2").astype("<u4")
    bits <<= 16
    return bits.view("<f4")


def _to_bf16(source: memoryview, dtype: str) -> "npt.NDArray[np.uint16]":
    import numpy as np  # noqa: PLC0415

    values: npt.NDArray[Any] = np.frombuffer(source, dtype=_stored(dtype))
    if dtype == "BF16":
        return values
    single = _odd_f32(values) if dtype == "F64" else values.astype("<f4")
    bits = single.view("<u4")
    rounded = bits >> 16
    rounded &= 1
    rounded += 0x7FFF
    rounded += bits  # wraps only for NaN
    rounded >>= 16
    nan = np.isnan(single)
    if nan.any():
        rounded[nan] = (bits[nan] >> 16) | 0x40  # sign and upper payload kept, quiet
    return rounded.astype("<u2")


def _odd_f32(values: "npt.NDArray[np.float64]") -> "npt.NDArray[np.float32]":
    """F64 as F32, rounded to odd: a second rounding then gives what one alone would have given."""
    import numpy as np  # noqa: PLC0415

    single = values.astype("<f4")
    bits = single.view("<u4")
    wide = single.astype("<f8")
    even_inexact = (wide != values) & ~np.isnan(values) & (bits & 1 == 0)
    away = np.abs(wide) > np.abs(values)
    bits[even_inexact & away] -= 1
    bits[even_inexact & ~away] += 1
    return single
