"""The directory of a zip whose entries are all stored, as torch.save writes them. Bytes by way of a function; pure.

An archive is as large as it looks: no entry is compressed or overlaps another, and their sizes add up to no more than
the file has. So a reader of an entry takes no more memory than it has bytes on the disk.
"""

import struct
import zlib
from collections.abc import Callable
from typing import NamedTuple

from ckptd.shared.base.wording import shown
from ckptd.shared.torchfile.pickle_read import MAX_NBYTES, Stored

Read = Callable[[int, int], bytes]  # (offset, nbytes): fewer bytes only at the end
_LOCAL = struct.Struct("<4s2xHH16xHH")  # magic, flags, method; lengths of the name and of what else precedes the data
_CENTRAL = struct.Struct("<4s4xHH4xIIIHHHHH4xI")
_END = struct.Struct("<4sHHHHIIH")
_END64 = struct.Struct("<4s20xQQQQ")
_LOCATOR64 = struct.Struct("<4sIQI")
_WIDE = 0xFFFFFFFF
_MAX_COMMENT = 65535
_ENCRYPTED = 0x2061  # flags: encrypted in any way, or patched data


class Entry(NamedTuple):
    """A file in the archive. header: where its own header begins. crc: CRC-32 of its bytes, 0 for none."""

    name: str
    header: int
    nbytes: int
    crc: int


def entries(read: Read, nbytes: int) -> dict[str, Entry]:
    """Every entry of the archive of so many bytes, by name. Raises ValueError, with what is wrong."""
    count, size, start = _end_of(read, nbytes)
    raw = read(start, size)
    if len(raw) != size or count * (_LOCAL.size + _CENTRAL.size) > nbytes:
        raise ValueError("its directory does not lie in it")
    found: dict[str, Entry] = {}
    at = total = 0
    for _ in range(count):
        entry, at = _entry(raw, at)
        if entry.name in found:
            raise ValueError(f"{shown(entry.name)} is in it twice")
        found[entry.name] = entry
        total += _LOCAL.size + entry.nbytes
    if total > start or at != size:
        raise ValueError("its entries are more than it has bytes")
    return found


def data_start(read: Read, entry: Entry, nbytes: int) -> int:
    """First byte of an entry's data. Raises ValueError when it does not end in the file."""
    head = read(entry.header, _LOCAL.size)
    if len(head) == _LOCAL.size:
        magic, _, method, name_nbytes, more_nbytes = _LOCAL.unpack(head)
        start: int = entry.header + _LOCAL.size + name_nbytes + more_nbytes
        if magic == b"PK\x03\x04" and method == 0 and start + entry.nbytes <= nbytes:
            return start
    raise ValueError(f"{shown(entry.name)} is not where its directory says")


def _end_of(read: Read, nbytes: int) -> tuple[int, int, int]:
    """Number of entries, bytes and first byte of the directory."""
    tail_at = max(0, nbytes - _END.size - _MAX_COMMENT)
    tail = read(tail_at, nbytes - tail_at)
    found = tail.rfind(b"PK\x05\x06")
    if found < 0 or len(tail) - found < _END.size:
        raise ValueError("it has no directory")
    _, disk, first_disk, here, count, size, start, comment = _END.unpack_from(tail, found)
    if comment != len(tail) - found - _END.size or disk or first_disk or here != count:
        raise ValueError("its end says something else than the file")
    end = tail_at + found
    if end >= _LOCATOR64.size:
        magic, _, place, _ = _LOCATOR64.unpack(read(end - _LOCATOR64.size, _LOCATOR64.size))
        if magic == b"PK\x06\x07":
            count, size, start = _end64(read, place)
            end = place
    if start + size != end:
        raise ValueError("its directory is not where its end says")
    return count, size, start


def _end64(read: Read, place: int) -> tuple[int, int, int]:
    raw = read(place, _END64.size)
    if len(raw) != _END64.size:
        raise ValueError("it has no directory")
    magic, here, count, size, start = _END64.unpack(raw)
    if magic != b"PK\x06\x06" or here != count:
        raise ValueError("its end says something else than the file")
    return count, size, start


def _entry(raw: bytes, at: int) -> tuple[Entry, int]:
    """The entry whose record begins there, and where the next one begins."""
    if at + _CENTRAL.size > len(raw):
        raise ValueError("its directory is cut off")
    magic, flags, method, crc, packed, nbytes, name_nbytes, more_nbytes, comment, _, _, header = _CENTRAL.unpack_from(
        raw, at
    )
    at += _CENTRAL.size
    name = raw[at : at + name_nbytes].decode(errors="replace")
    wide = [nbytes == _WIDE, packed == _WIDE, header == _WIDE]
    if any(wide):
        more = iter(_wide_fields(raw[at + name_nbytes : at + name_nbytes + more_nbytes], sum(wide)))
        nbytes, packed, header = (next(more) if w else n for w, n in zip(wide, (nbytes, packed, header), strict=True))
    if magic != b"PK\x01\x02" or flags & _ENCRYPTED:
        raise ValueError("its directory is damaged")
    if method != 0 or packed != nbytes:
        raise ValueError(f"{shown(name)} is compressed")
    return Entry(name, header, nbytes, crc), at + name_nbytes + more_nbytes + comment


def _wide_fields(extra: bytes, count: int) -> tuple[int, ...]:
    """Of zip64: what does not fit the old fields, in their order."""
    at = 0
    while at + 4 <= len(extra):
        kind, size = struct.unpack_from("<HH", extra, at)
        if kind == 1 and size >= 8 * count and at + 4 + size <= len(extra):
            return struct.unpack_from(f"<{count}Q", extra, at + 4)
        at += 4 + size
    raise ValueError("its directory lacks sizes")


class SavedArchive:
    """The archive of so many bytes. Raises ValueError, with what is wrong, for what is none."""

    def __init__(self, read: Read, nbytes: int) -> None:
        self._read, self._nbytes = read, nbytes
        found = entries(read, nbytes)
        self.entries = {name.partition("/")[2]: entry for name, entry in found.items()}
        if "data.pkl" not in self.entries:
            raise ValueError("a zip without data.pkl")
        if "byteorder" in self.entries and self.content("byteorder", 16) != b"little":
            raise ValueError("its numbers are not little-endian")
        self.pickle = self.content("data.pkl", MAX_NBYTES)
        storages = [name for name in self.entries if name.startswith("data/")]
        self.storages = {name.removeprefix("data/"): self.entries[name] for name in storages}

    def content(self, name: str, most: int) -> bytes:
        """Of an entry that has no more bytes than that, checked against its CRC-32, if it has one. ValueError."""
        entry = self.entries[name]
        if entry.nbytes > most:
            raise ValueError(f"{shown(name)} is too large")
        data = self._read(self.start_of(entry), entry.nbytes)
        if len(data) != entry.nbytes:
            raise ValueError(f"{shown(name)} is cut off")
        if entry.crc and zlib.crc32(data) != entry.crc:
            raise ValueError(f"the CRC-32 of {shown(name)} does not match")
        return data

    def start_of(self, entry: Entry) -> int:
        """First byte of its data. Raises ValueError when it does not end in the archive."""
        return data_start(self._read, entry, self._nbytes)

    def storage_of(self, tensor: Stored) -> Entry:
        """Raises ValueError when the archive does not have it."""
        entry = self.storages.get(tensor.key)
        if entry is None:
            raise ValueError(f"it has no {shown(f'data/{tensor.key}')}")
        return entry
