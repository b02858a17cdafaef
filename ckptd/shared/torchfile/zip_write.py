"""Zips of stored entries as torch.save writes them, laid out around data that others write. Pure.

Written by hand: torch and zipfile write an archive whole, payloads included, and a plan of a thousand tensors must cost
milliseconds. See docs/format.md.
"""

import struct
import zlib
from typing import NamedTuple

_ZIP64 = 0xFFFFFFFF  # sizes and offsets from here on do not fit the old fields
_LOCAL = struct.Struct("<IHHHHHIIIHH")
_CENTRAL = struct.Struct("<IHHHHHHIIIHHHHHII")
_END = struct.Struct("<IHHHHIIH")
_END64 = struct.Struct("<IQHHIIQQQQ")
_LOCATOR64 = struct.Struct("<IIQI")
_PADDING = struct.Struct("<HH")  # an extra field of zip: id, length
_PADDING_ID = 0x4246  # torch's own, "FB"


class Record(NamedTuple):
    """A stored entry of an archive: offset is that of its header. crc: 0 where others write; torch does not look."""

    name: bytes
    nbytes: int
    crc: int
    offset: int


def record_of(name: bytes, data: bytes, offset: int) -> Record:
    """An entry with this data."""
    return Record(name, len(data), zlib.crc32(data), offset)


def padded_header(record: Record, *, start: int, align: int) -> bytes:
    """The header of a record that begins at file offset start, its data at a multiple of align (64 or more)."""
    unpadded = start + len(local_header(record, _PADDING.pack(_PADDING_ID, 0)))
    pad = -unpadded % align
    return local_header(record, _PADDING.pack(_PADDING_ID, pad) + b"Z" * pad)


def local_header(record: Record, extra: bytes = b"") -> bytes:
    """The header before a record's data."""
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
