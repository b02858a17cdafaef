"""How torch.save pickles a contiguous CPU tensor: opcodes of protocol 2, without a pickle module. Pure."""

import struct

from ckptd.shared.format.dtypes import DTYPES, itemsize
from ckptd.shared.format.layout import Shape, contiguous_strides


def tensor(key: int, dtype: str, shape: Shape, nbytes: int) -> bytes:
    """The opcodes that make a tensor over the whole of storage ``key``, which has so many bytes.

    torch._utils._rebuild_tensor_v2 or _v3 (storage, offset, size, stride, requires_grad, hooks[, dtype, metadata]).
    """
    typed = DTYPES[dtype].storage
    storage = name("torch", typed) if typed else name("torch.storage", "UntypedStorage")
    numel = nbytes // itemsize(dtype) if typed else nbytes
    place = b"(" + text("storage") + storage + text(str(key)) + text("cpu") + integer(numel) + b"tQ"
    layout = integer(0) + _integers(shape) + _integers(contiguous_strides(shape))
    body = b"(" + place + layout + b"\x89" + name("collections", "OrderedDict") + b")R"
    if typed:
        return name("torch._utils", "_rebuild_tensor_v2") + body + b"tR"
    return name("torch._utils", "_rebuild_tensor_v3") + body + name("torch", DTYPES[dtype].torch) + b"}tR"


def name(module: str, member: str) -> bytes:
    """What a module calls by this name."""
    return f"c{module}\n{member}\n".encode()


def text(value: str) -> bytes:
    """A str."""
    raw = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(raw)) + raw


def integer(value: int) -> bytes:
    """An int."""
    if 0 <= value < 1 << 8:
        return b"K%c" % value
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a%c" % len(raw) + raw


def _integers(values: Shape | list[int]) -> bytes:
    return b"(" + b"".join(map(integer, values)) + b"t"
