"""The bytes that make a payload a torch.save archive: a zip head before it and a zip tail after it.

An archive of one tensor holds three stored records: ``data.pkl`` (a pickle that rebuilds a contiguous CPU tensor over
storage 0), ``version``, and ``data/0``, which is the payload itself. Written by hand because torch can only write an
archive whole, payload included, and because a plan of a thousand tensors must cost milliseconds. See docs/format.md.
"""

import struct
import zlib
from typing import NamedTuple

from ckptd.shared.format.layout import itemsize

# Typed storages for the dtypes that had one when the format was made; the others name their dtype.
_STORAGES = {
    "F32": "FloatStorage",
    "F64": "DoubleStorage",
    "F16": "HalfStorage",
    "BF16": "BFloat16Storage",
    "I64": "LongStorage",
    "I32": "IntStorage",
    "I16": "ShortStorage",
    "I8": "CharStorage",
    "U8": "ByteStorage",
    "BOOL": "BoolStorage",
    "C64": "ComplexFloatStorage",
    "complex128": "ComplexDoubleStorage",
}
_DTYPES = {
    "U16": "uint16",
    "U32": "uint32",
    "U64": "uint64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "float4_e2m1fn_x2": "float4_e2m1fn_x2",
}
_ROOT = b"a/"  # every record lies in one directory; torch takes its name from the first
_ZIP64 = 0xFFFFFFFF  # sizes and offsets from here on do not fit the old fields
_LOCAL = struct.Struct("<IHHHHHIIIHH")
_CENTRAL = struct.Struct("<IHHHHHHIIIHHHHHII")
_END = struct.Struct("<IHHHHIIH")
_END64 = struct.Struct("<IQHHIIQQQQ")
_LOCATOR64 = struct.Struct("<IIQI")
_PADDING = struct.Struct("<HH")  # an extra field of zip: id, length
_PADDING_ID = 0x4246  # torch's own, "FB"


class Wrap(NamedTuple):
    """Head and tail around a payload. Head, payload and tail together are the archive."""

    head: bytes
    tail: bytes


class Record(NamedTuple):
    """A stored entry of an archive: offset is that of its header."""

    name: bytes
    nbytes: int
    crc: int
    offset: int


def wrap(dtype: str, sizes: tuple[int, ...], nbytes: int, *, start: int, align: int) -> Wrap:
    """Head and tail of an archive that begins at file offset start, its payload at a multiple of align (64 or more)."""
    records = []
    head = bytearray()
    for name, data in ((b"data.pkl", tensor_pickle(dtype, sizes, nbytes)), (b"version", b"3\n")):
        record = Record(_ROOT + name, len(data), zlib.crc32(data), len(head))
        records.append(record)
        head += local_header(record) + data
    payload = Record(
        _ROOT + b"data/0", nbytes, 0, len(head)
    )  # torch does not check the sum; readers of ours have better
    head += padded_header(payload, start=start + len(head), align=align)
    records.append(payload)
    return Wrap(bytes(head), directory(records, len(head) + nbytes))


def padded_header(record: Record, *, start: int, align: int) -> bytes:
    """The header of a record that begins at file offset start, its data at a multiple of align (64 or more)."""
    unpadded = start + len(local_header(record, _PADDING.pack(_PADDING_ID, 0)))
    pad = -unpadded % align
    return local_header(record, _PADDING.pack(_PADDING_ID, pad) + b"Z" * pad)


def local_header(record: Record, extra: bytes = b"") -> bytes:
    """What stands before a record's data."""
    big = record.nbytes >= _ZIP64
    if big:
        extra = struct.pack("<HHQQ", 1, 16, record.nbytes, record.nbytes) + extra
    size = _ZIP64 if big else record.nbytes
    version = 45 if big else 20
    fields = (0x04034B50, version, 0, 0, 0, 0, record.crc, size, size, len(record.name), len(extra))
    return _LOCAL.pack(*fields) + record.name + extra


def directory(records: list[Record], offset: int) -> bytes:
    """Central directory and end of an archive whose directory begins offset bytes after its start."""
    out = b"".join(_central(record) for record in records)
    count, nbytes = len(records), len(out)
    if offset >= _ZIP64 or count >= 0xFFFF:  # noqa: PLR2004 - what the old field holds
        out += _END64.pack(0x06064B50, 44, 45, 45, 0, 0, count, count, nbytes, offset)
        out += _LOCATOR64.pack(0x07064B50, 0, offset + nbytes, 1)
    small = min(count, 0xFFFF)
    return out + _END.pack(0x06054B50, 0, 0, small, small, nbytes, min(offset, _ZIP64), 0)


def _central(record: Record) -> bytes:
    big, far = record.nbytes >= _ZIP64, record.offset >= _ZIP64
    wide = [record.nbytes, record.nbytes] * big + [record.offset] * far  # in this order, only what does not fit
    extra = struct.pack(f"<HH{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""
    size, offset = _ZIP64 if big else record.nbytes, _ZIP64 if far else record.offset
    version = 45 if wide else 20
    fields = (version, version, 0, 0, 0, 0, record.crc, size, size, len(record.name), len(extra), 0, 0, 0, 0)
    return _CENTRAL.pack(0x02014B50, *fields, offset) + record.name + extra


def tensor_pickle(dtype: str, sizes: tuple[int, ...], nbytes: int) -> bytes:
    """The pickle, protocol 2, that rebuilds a contiguous tensor of these sizes over storage 0 of nbytes."""
    typed = dtype in _STORAGES
    storage = b"ctorch\n%s\n" % _STORAGES[dtype].encode() if typed else b"ctorch.storage\nUntypedStorage\n"
    numel = nbytes // itemsize(dtype)
    key = b"(" + _text("storage") + storage + _text("0") + _text("cpu") + _int(numel if typed else nbytes) + b"t"
    body = key + b"Q" + _int(0) + _ints(sizes) + _ints(_strides(sizes)) + b"\x89" + b"ccollections\nOrderedDict\n)R"
    if typed:
        return b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(" + body + b"tR."
    name = b"ctorch\n%s\n" % _DTYPES[dtype].encode()
    return b"\x80\x02ctorch._utils\n_rebuild_tensor_v3\n(" + body + name + b"}tR."


def _strides(sizes: tuple[int, ...]) -> tuple[int, ...]:
    strides, stride = [], 1
    for size in reversed(sizes):
        strides.append(stride)
        stride *= max(size, 1)
    return tuple(reversed(strides))


def _text(text: str) -> bytes:
    data = text.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def _ints(values: tuple[int, ...]) -> bytes:
    return b"(" + b"".join(map(_int, values)) + b"t"


def _int(value: int) -> bytes:
    if value < 1 << 8:
        return b"K" + bytes((value,))
    if value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    data = value.to_bytes(value.bit_length() // 8 + 1, "little")
    return b"\x8a" + bytes((len(data),)) + data
