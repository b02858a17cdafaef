"""The types of elements that ckptd knows: the one table of them, by the code that images, headers and records have."""

from typing import NamedTuple

from ckptd.shared.base.errors import DamagedError
from ckptd.shared.base.wording import shown


class Dtype(NamedTuple):
    """An element: its name in the module torch, its bytes.

    storage: the typed storage that torch had when its file format was made; later types name themselves. view: code and
    extra last dimension in the file, for types that safetensors has no code for. The dimension is there even if it is
    1, so that no reader takes the numbers for the values.
    """

    torch: str
    nbytes: int
    storage: str = ""
    view: tuple[str, int] | None = None


# The codes are those of safetensors, or torch's name where it has none.
DTYPES = {
    "BOOL": Dtype("bool", 1, "BoolStorage"),
    "U8": Dtype("uint8", 1, "ByteStorage"),
    "I8": Dtype("int8", 1, "CharStorage"),
    "F8_E4M3": Dtype("float8_e4m3fn", 1),
    "F8_E5M2": Dtype("float8_e5m2", 1),
    "F8_E8M0": Dtype("float8_e8m0fnu", 1),
    "F8_E4M3FNUZ": Dtype("float8_e4m3fnuz", 1),
    "F8_E5M2FNUZ": Dtype("float8_e5m2fnuz", 1),
    "I16": Dtype("int16", 2, "ShortStorage"),
    "U16": Dtype("uint16", 2),
    "F16": Dtype("float16", 2, "HalfStorage"),
    "BF16": Dtype("bfloat16", 2, "BFloat16Storage"),
    "I32": Dtype("int32", 4, "IntStorage"),
    "U32": Dtype("uint32", 4),
    "F32": Dtype("float32", 4, "FloatStorage"),
    "I64": Dtype("int64", 8, "LongStorage"),
    "U64": Dtype("uint64", 8),
    "F64": Dtype("float64", 8, "DoubleStorage"),
    "C64": Dtype("complex64", 8, "ComplexFloatStorage"),
    "complex128": Dtype("complex128", 16, "ComplexDoubleStorage", ("F64", 2)),
    "float4_e2m1fn_x2": Dtype("float4_e2m1fn_x2", 1, view=("U8", 1)),
}
CODE_OF_STORAGE = {dtype.storage: code for code, dtype in DTYPES.items() if dtype.storage}


def is_inexact(dtype: str) -> bool:
    """Whether its elements are floating-point or complex numbers. False for an unknown code."""
    return dtype in DTYPES and DTYPES[dtype].torch.startswith(("float", "bfloat", "complex"))


def itemsize(dtype: str) -> int:
    """Bytes per element of a dtype code. Raises DamagedError for an unknown code."""
    try:
        return DTYPES[dtype].nbytes
    except KeyError:
        raise DamagedError(f"unknown dtype code {shown(dtype)}") from None


def file_view(dtype: str, sizes: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """Code and sizes of a box as the file's header has them: safetensors has no code for some dtypes."""
    view = DTYPES[dtype].view if dtype in DTYPES else None
    return (view[0], (*sizes, view[1])) if view is not None else (dtype, sizes)
