"""The pickle inside a torch.save file, written opcode by opcode: nothing here imports or runs a pickle module."""

import struct
from collections.abc import Iterator

from ckptd.shared.format.layout import Shape

# safetensors code -> torch's typed storage. The other dtypes lie in an untyped one.
_STORAGES = {
    "BOOL": "BoolStorage", "U8": "ByteStorage", "I8": "CharStorage", "I16": "ShortStorage", "I32": "IntStorage",
    "I64": "LongStorage", "F16": "HalfStorage", "BF16": "BFloat16Storage", "F32": "FloatStorage",
    "F64": "DoubleStorage", "C64": "ComplexFloatStorage", "complex128": "ComplexDoubleStorage",
}  # fmt: skip
_UNTYPED = {
    "U16": "uint16", "U32": "uint32", "U64": "uint64",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz", "float4_e2m1fn_x2": "float4_e2m1fn_x2",
}  # fmt: skip
_BYTE, _WORD, _INT32 = 1 << 8, 1 << 16, 1 << 31


class TensorRef:
    """A tensor that fills the storage with this key, contiguous. nbytes: of the storage."""

    def __init__(self, key: int, dtype: str, shape: Shape, nbytes: int, count: int) -> None:
        self.key = key
        self.dtype = dtype
        self.shape = shape
        self.nbytes = nbytes
        self.count = count  # elements


Value = TensorRef | dict[str | int, "Value"] | list["Value | None"] | tuple["Value | None", ...]


def dumps(value: Value) -> bytes:
    """The pickle (protocol 2) of nested containers of tensors."""
    return b"\x80\x02" + b"".join(_value(value)) + b"."


def _value(value: "Value | None") -> Iterator[bytes]:
    match value:
        case None:
            yield b"N"
        case TensorRef():
            yield from _tensor(value)
        case dict():
            yield b"}("
            for key, below in value.items():
                yield _text(key) if isinstance(key, str) else _integer(key)
                yield from _value(below)
            yield b"u"
        case list():
            yield b"]("
            for item in value:
                yield from _value(item)
            yield b"e"
        case tuple():
            yield b"("
            for item in value:
                yield from _value(item)
            yield b"t"


def _tensor(tensor: TensorRef) -> Iterator[bytes]:
    """torch._utils._rebuild_tensor_v2 or _v3 (storage, offset, size, stride, requires_grad, hooks[, dtype])."""
    untyped = _UNTYPED.get(tensor.dtype)
    yield _global("torch._utils", "_rebuild_tensor_v3" if untyped else "_rebuild_tensor_v2")
    yield b"("
    yield b"(" + _text("storage")
    yield _global("torch.storage", "UntypedStorage") if untyped else _global("torch", _STORAGES[tensor.dtype])
    yield _text(str(tensor.key)) + _text("cpu") + _integer(tensor.nbytes if untyped else tensor.count) + b"tQ"
    yield _integer(0) + _integers(tensor.shape) + _integers(_strides(tensor.shape)) + b"\x89"
    yield _global("collections", "OrderedDict") + b")R"
    if untyped:
        yield _global("torch", untyped)
    yield b"tR"


def _strides(shape: Shape) -> list[int]:
    strides = [1] * len(shape)
    for dim in range(len(shape) - 1, 0, -1):
        strides[dim - 1] = strides[dim] * max(1, shape[dim])
    return strides


def _global(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def _text(text: str) -> bytes:
    raw = text.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(raw)) + raw


def _integers(numbers: Shape | list[int]) -> bytes:
    return b"(" + b"".join(map(_integer, numbers)) + b"t"


def _integer(number: int) -> bytes:
    if 0 <= number < _BYTE:
        return b"K" + struct.pack("<B", number)
    if 0 <= number < _WORD:
        return b"M" + struct.pack("<H", number)
    if -_INT32 <= number < _INT32:
        return b"J" + struct.pack("<i", number)
    raw = number.to_bytes((number.bit_length() + 8) // 8, "little", signed=True)
    return b"\x8a" + struct.pack("<B", len(raw)) + raw
