"""One file as torch.save writes it: a zip of stored entries, a pickle of references and one entry per storage."""

import math
import struct
import zlib
from collections.abc import Mapping

from ckptd.export.names import Chosen
from ckptd.export.plan import FilePlan, Tensor
from ckptd.export.torch_pickle import TensorRef, Value, dumps
from ckptd.protocol.errors import UsageError
from ckptd.protocol.layout import Path
from ckptd.protocol.slot import PAGE

_ROOT = "archive"
_ALIGNMENT = 64  # of every storage, as torch does
_LARGE_NBYTES = 64 << 10  # from here on a page
_MAX_ROW = 1 << 20  # items of a list; what claims more stays a dict
_ZIP64 = 0xFFFFFFFF
_VERSION = 45  # of the zip format, the first with zip64
_PADDING = 0x4246  # "FB": the extra field that torch pads with
_LOCAL = struct.Struct("<IHHHHHIIIHH")
_CENTRAL = struct.Struct("<IHHHHHHIIIHHHHHII")


class _Zip:
    """A zip file being laid out: blobs, by offset, with room between them for data that others write."""

    def __init__(self) -> None:
        self.blobs: list[tuple[int, bytes]] = []
        self.nbytes = 0
        self._directory: list[bytes] = []

    def _put(self, data: bytes) -> None:
        self.blobs.append((self.nbytes, data))
        self.nbytes += len(data)

    def add(self, name: str, data: bytes) -> None:
        """An entry with its data."""
        self._open(name, len(data), zlib.crc32(data), 1)
        self._put(data)

    def reserve(self, name: str, nbytes: int) -> int:
        """An entry whose data others write; where it begins. Its CRC stays 0, which torch does not look at."""
        self._open(name, nbytes, 0, PAGE if nbytes >= _LARGE_NBYTES else _ALIGNMENT)
        start = self.nbytes
        self.nbytes += nbytes
        return start

    def _open(self, name: str, nbytes: int, crc: int, alignment: int) -> None:
        raw, begin = f"{_ROOT}/{name}".encode(), self.nbytes
        large = nbytes >= _ZIP64
        extra = struct.pack("<HHQQ", 1, 16, nbytes, nbytes) if large else b""
        pad = -(begin + _LOCAL.size + len(raw) + len(extra) + 4) % alignment
        extra += struct.pack("<HH", _PADDING, pad) + b"Z" * pad
        size = _ZIP64 if large else nbytes
        self._put(_LOCAL.pack(0x04034B50, _VERSION, 0, 0, 0, 0, crc, size, size, len(raw), len(extra)) + raw + extra)
        wide = large or begin >= _ZIP64
        extra = struct.pack("<HHQQQ", 1, 24, nbytes, nbytes, begin) if wide else b""
        size, at = (_ZIP64, _ZIP64) if wide else (nbytes, begin)
        head = (0x02014B50, _VERSION, _VERSION, 0, 0, 0, 0, crc, size, size, len(raw), len(extra), 0, 0, 0, 0, at)
        self._directory.append(_CENTRAL.pack(*head) + raw + extra)

    def close(self) -> None:
        """The directory and both forms of its end."""
        directory, begin, count = b"".join(self._directory), self.nbytes, len(self._directory)
        end64 = begin + len(directory)
        self._put(directory)
        self._put(
            struct.pack("<IQHHIIQQQQ", 0x06064B50, 44, _VERSION, _VERSION, 0, 0, count, count, len(directory), begin)
            + struct.pack("<IIQI", 0x07064B50, 0, end64, 1)
            + struct.pack(
                "<IHHHHIIH", 0x06054B50, 0, 0, min(count, 0xFFFF), min(count, 0xFFFF),
                min(len(directory), _ZIP64), min(begin, _ZIP64), 0,
            )
        )  # fmt: skip


def plan_file(name: str, chosen: list[Chosen], paths: Mapping[str, Path] | None = None) -> FilePlan:
    """The file. paths: places in the nesting, by the name in the checkpoint; None for one flat dict.

    Tied names share a storage. Torch reads it with weights_only=True.
    """
    keys: dict[str, int] = {}
    refs: dict[str, TensorRef] = {}
    for one in chosen:
        key = keys.setdefault(one.tensor.name, len(keys))
        refs[one.source] = TensorRef(key, one.dtype, one.tensor.shape, one.nbytes, math.prod(one.tensor.shape))
    flat: Value = {one.name: refs[one.source] for one in chosen}
    zipped = _Zip()
    zipped.add("data.pkl", dumps(flat if paths is None else nest(refs, paths)))
    zipped.add("byteorder", b"little")
    targets: list[tuple[Tensor, str, int]] = []
    for one in chosen:
        if keys.get(one.tensor.name) == len(targets):
            targets.append((one.tensor, one.dtype, zipped.reserve(f"data/{len(targets)}", one.nbytes)))
    zipped.add("version", b"3\n")
    zipped.close()
    return FilePlan(name, zipped.nbytes, tuple(zipped.blobs), tuple(targets), tuple(one.name for one in chosen))


class _Node:
    """A container being filled: its kind and its items by key."""

    def __init__(self) -> None:
        self.kind = "k"
        self.items: dict[str | int, _Node | TensorRef] = {}

    def built(self) -> Value:
        """As plain containers; what a list or tuple had besides tensors is None in it."""
        items = {key: item.built() if isinstance(item, _Node) else item for key, item in self.items.items()}
        if self.kind not in "lt":
            return items
        last = max((key for key in items if isinstance(key, int)), default=-1)
        if last >= _MAX_ROW or any(isinstance(key, str) for key in items):
            return items
        row = [items.get(i) for i in range(last + 1)]
        return row if self.kind == "l" else tuple(row)


def nest(refs: Mapping[str, TensorRef], paths: Mapping[str, Path]) -> Value:
    """The tensors at their places in nested containers."""
    root = _Node()
    for name, ref in refs.items():
        path = paths.get(name) or (("k", name),)
        node = root
        for i, (kind, key) in enumerate(path):
            node.kind = kind
            if i == len(path) - 1:
                node.items[key] = ref
                break
            below = node.items.setdefault(key, _Node())
            if isinstance(below, TensorRef):
                raise UsageError(f"{name!r} lies below a tensor", hint="export without --nested")
            node = below
    return root.built()
