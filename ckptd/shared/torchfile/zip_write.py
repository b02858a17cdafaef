"""Zips of stored entries as torch.save writes them, laid out around data that others write. Pure.

Written by hand: torch and zipfile write an archive whole, payloads included, and a plan of a thousand tensors must cost
milliseconds. See docs/format.md.
"""

import struct
import zlib
from typing import NamedTuple

from ckptd.shared.format.slot import PAGE

_ZIP64 = 0xFFFFFFFF  # sizes and offsets from here on do not fit the old fields
_LOCAL = struct.Struct("<IHHHHHIIIHH")
_CENTRAL = struct.Struct("<IHHHHHHIIIHHHHHII")
_END = struct.Struct("<IHHHHIIH")
_END64 = struct.Struct("<IQHHIIQQQQ")
_LOCATOR64 = struct.Struct("<IIQI")
_PADDING = struct.Struct("<HH")  # an extra field of zip: id, length
_PADDING_ID = 0x4246  # torch's own, "FB"
ALIGNMENT = 64  # of every storage, as torch does
_LARGE_NBYTES = 64 << 10  # from here on a page


class Archive:
    """A zip being laid out: blobs, by offset in the file, with room between them for data that others write.

    start: where it begins in its file. Its own offsets count from there, what is aligned is aligned in the file. root:
    the one directory of all entries, from which torch takes its name.
    """

    def __init__(self, start: int = 0, root: str = "archive/") -> None:
        self.blobs: list[tuple[int, bytes]] = []
        self.start = start
        self.nbytes = 0
        self._root = root
        self._records: list[_Record] = []

    def add(self, name: str, data: bytes) -> None:
        """An entry with its data."""
        self._put(_local_header(self._record(name, len(data), zlib.crc32(data))) + data)

    def reserve(self, name: str, nbytes: int, align: int = 0) -> int:
        """An entry whose data others write, without a CRC, which torch does not look at; where that begins in the file.

        align: what that is a multiple of, 64 or more; 0: torch's 64, and a page for large ones.
        """
        record = self._record(name, nbytes, 0)
        unpadded = self.start + self.nbytes + len(_local_header(record, _PADDING.pack(_PADDING_ID, 0)))
        pad = -unpadded % (align or (PAGE if nbytes >= _LARGE_NBYTES else ALIGNMENT))
        self._put(_local_header(record, _PADDING.pack(_PADDING_ID, pad) + b"Z" * pad))
        self.nbytes += nbytes
        return self.start + self.nbytes - nbytes

    def close(self) -> None:
        """The central directory and its end."""
        out = b"".join(map(_central, self._records))
        offset, count, nbytes = self.nbytes, len(self._records), len(out)
        if offset >= _ZIP64 or count >= 0xFFFF:  # noqa: PLR2004 - what the old field holds
            out += _END64.pack(0x06064B50, 44, 45, 45, 0, 0, count, count, nbytes, offset)
            out += _LOCATOR64.pack(0x07064B50, 0, offset + nbytes, 1)
        small = min(count, 0xFFFF)
        self._put(out + _END.pack(0x06054B50, 0, 0, small, small, nbytes, min(offset, _ZIP64), 0))

    def _record(self, name: str, nbytes: int, crc: int) -> "_Record":
        self._records.append(_Record((self._root + name).encode(), nbytes, crc, self.nbytes))
        return self._records[-1]

    def _put(self, data: bytes) -> None:
        self.blobs.append((self.start + self.nbytes, data))
        self.nbytes += len(data)


class _Record(NamedTuple):
    """A stored entry of an archive: offset is that of its header."""

    name: bytes
    nbytes: int
    crc: int
    offset: int


def _local_header(record: _Record, extra: bytes = b"") -> bytes:
    """The header before a record's data."""
    big = record.nbytes >= _ZIP64
    if big:
        extra = struct.pack("<HHQQ", 1, 16, record.nbytes, record.nbytes) + extra
    size = _ZIP64 if big else record.nbytes
    version = 45 if big else 20
    fields = (0x04034B50, version, 0, 0, 0, 0, record.crc, size, size, len(record.name), len(extra))
    return _LOCAL.pack(*fields) + record.name + extra


def _central(record: _Record) -> bytes:
    big, far = record.nbytes >= _ZIP64, record.offset >= _ZIP64
    wide = [record.nbytes, record.nbytes] * big + [record.offset] * far  # in this order, only what does not fit
    extra = struct.pack(f"<HH{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""
    size, offset = _ZIP64 if big else record.nbytes, _ZIP64 if far else record.offset
    version = 45 if wide else 20
    fields = (version, version, 0, 0, 0, 0, record.crc, size, size, len(record.name), len(extra), 0, 0, 0, 0)
    return _CENTRAL.pack(0x02014B50, *fields, offset) + record.name + extra
