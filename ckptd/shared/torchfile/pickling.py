"""Pickles written opcode by opcode, for files that other programs unpickle. Imports no pickle and reads none.

The opcodes are those of protocol 2, which every reader knows, also a restricted one that refuses newer framing; bytes
alone need protocol 3, which the file declares. A file can make its reader import only the fixed list ALLOWED.
"""

import struct
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from ckptd.shared.format.dtypes import DTYPES, itemsize
from ckptd.shared.format.layout import contiguous_strides
from ckptd.shared.format.placement import Shape

DCP_METADATA = "torch.distributed.checkpoint.metadata"
DCP_FILESYSTEM = "torch.distributed.checkpoint.filesystem"
ALLOWED = frozenset({
    (DCP_METADATA, "Metadata"),
    (DCP_METADATA, "MetadataIndex"),
    (DCP_METADATA, "TensorStorageMetadata"),
    (DCP_METADATA, "BytesStorageMetadata"),
    (DCP_METADATA, "ChunkStorageMetadata"),
    (DCP_METADATA, "TensorProperties"),
    (DCP_METADATA, "StorageMeta"),
    (DCP_METADATA, "_MEM_FORMAT_ENCODING"),
    (DCP_FILESYSTEM, "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    *(("torch", dtype.torch) for dtype in DTYPES.values()),
})  # fmt: skip

_SHORT = 1 << 8
_SMALL_TUPLES = (b")", b"\x85", b"\x86", b"\x87")
_pack_u32 = struct.Struct("<I").pack
_pack_i32 = struct.Struct("<i").pack
_pack_f64 = struct.Struct(">d").pack


class Global(msgspec.Struct, frozen=True, eq=False):
    """What a module calls by this name. Raises ValueError for a name that ALLOWED lacks."""

    module: str
    name: str

    def __post_init__(self) -> None:
        if (self.module, self.name) not in ALLOWED:
            raise ValueError(f"{self.module}.{self.name} is not allowed in a pickle")


class Call(msgspec.Struct, frozen=True, eq=False):
    """What function returns for args. The same Call in several places is one object to the reader."""

    function: Global
    args: tuple[Any, ...]


class New(msgspec.Struct, frozen=True, eq=False):
    """An instance whose __init__ is never run: made bare, then given its state, as __getstate__ would return it."""

    kind: Global
    state: Any


class TensorRef(msgspec.Struct, frozen=True, eq=False):
    """A tensor that fills the storage with this key, contiguous. nbytes: of the storage."""

    key: int
    dtype: str
    shape: Shape
    nbytes: int


class Items(msgspec.Struct, frozen=True, eq=False):
    """A dict given by its items, which are taken one at a time and not kept."""

    pairs: Iterable[tuple[Any, Any]]


def dumps(value: Any) -> bytes:
    """The pickle of plain values, tuples, lists, dicts and the classes above, nested in any way.

    Equal strings and what is one Global or Call are written once and referred to from then on. Raises TypeError for
    what is none of these; a subclass is none of them.
    """
    writer = _Writer()
    writer.put(value)
    return writer.finish()


class _Writer:
    """One pickle in the making."""

    def __init__(self) -> None:
        self._out = bytearray(b"\x80\x02")
        self._seen: dict[str | Global | Call, bytes] = {}  # to the opcode that gets it again
        self._writers: dict[type, Callable[[Any], None]] = {
            type(None): self._none, bool: self._bool, int: self._int, float: self._float, str: self._str,
            bytes: self._bytes, tuple: self._tuple, list: self._list, dict: self._dict, Global: self._global,
            Call: self._call, New: self._new, Items: self._items, TensorRef: self._tensor,
        }  # fmt: skip

    def finish(self) -> bytes:
        """All that was put, ended."""
        return bytes(self._out + b".")

    def put(self, value: Any) -> None:
        writer = self._writers.get(type(value))
        if writer is None:
            raise TypeError(f"{type(value).__name__} has no pickle here")
        writer(value)

    def _remember(self, value: str | Global | Call) -> None:
        """Gives the object just written a number, under which it is got again."""
        number = len(self._seen)
        if number < _SHORT:
            self._out += b"q%c" % number
            self._seen[value] = b"h%c" % number
        else:
            packed = _pack_u32(number)
            self._out += b"r" + packed
            self._seen[value] = b"j" + packed

    def _none(self, _: None) -> None:
        self._out += b"N"

    def _bool(self, value: bool) -> None:
        self._out += b"\x88" if value else b"\x89"

    def _int(self, value: int) -> None:
        self._out += integer(value)

    def _tensor(self, value: TensorRef) -> None:
        self._out += tensor(value)

    def _float(self, value: float) -> None:
        self._out += b"G" + _pack_f64(value)

    def _str(self, value: str) -> None:
        seen = self._seen.get(value)
        if seen is not None:
            self._out += seen
            return
        self._out += text(value)
        self._remember(value)

    def _bytes(self, value: bytes) -> None:
        self._out[1] = 3
        length = b"C%c" % len(value) if len(value) < _SHORT else b"B" + _pack_u32(len(value))
        self._out += length + value

    def _tuple(self, value: tuple[Any, ...]) -> None:
        small = len(value) < len(_SMALL_TUPLES)
        if not small:
            self._out += b"("
        for item in value:
            self.put(item)
        self._out += _SMALL_TUPLES[len(value)] if small else b"t"

    def _list(self, value: list[Any]) -> None:
        self._out += b"]("
        for item in value:
            self.put(item)
        self._out += b"e"

    def _dict(self, value: dict[Any, Any]) -> None:
        self._pairs(value.items())

    def _items(self, value: Items) -> None:
        self._pairs(value.pairs)

    def _pairs(self, pairs: Iterable[tuple[Any, Any]]) -> None:
        self._out += b"}("
        for key, item in pairs:
            self.put(key)
            self.put(item)
        self._out += b"u"

    def _global(self, value: Global) -> None:
        seen = self._seen.get(value)
        if seen is not None:
            self._out += seen
            return
        self._out += name(value.module, value.name)
        self._remember(value)

    def _call(self, value: Call) -> None:
        seen = self._seen.get(value)
        if seen is not None:
            self._out += seen
            return
        self._global(value.function)
        self._tuple(value.args)
        self._out += b"R"
        self._remember(value)

    def _new(self, value: New) -> None:
        self._global(value.kind)
        self._out += b")\x81"
        self.put(value.state)
        self._out += b"b"


# -- opcodes --


def tensor(ref: TensorRef) -> bytes:
    """The opcodes that make a tensor over the whole of its storage.

    torch._utils._rebuild_tensor_v2 or _v3 (storage, offset, size, stride, requires_grad, hooks[, dtype, metadata]).
    """
    dtype, nbytes = ref.dtype, ref.nbytes
    typed = DTYPES[dtype].storage
    storage = name("torch", typed) if typed else name("torch.storage", "UntypedStorage")
    numel = nbytes // itemsize(dtype) if typed else nbytes
    place = b"(" + text("storage") + storage + text(str(ref.key)) + text("cpu") + integer(numel) + b"tQ"
    layout = integer(0) + _integers(ref.shape) + _integers(contiguous_strides(ref.shape))
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
    return b"X" + _pack_u32(len(raw)) + raw


def integer(value: int) -> bytes:
    """An int."""
    if 0 <= value < _SHORT:
        return b"K%c" % value
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + _pack_i32(value)
    raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    length = b"\x8a%c" % len(raw) if len(raw) < _SHORT else b"\x8b" + _pack_i32(len(raw))
    return length + raw


def _integers(values: Shape | list[int]) -> bytes:
    return b"(" + b"".join(map(integer, values)) + b"t"
