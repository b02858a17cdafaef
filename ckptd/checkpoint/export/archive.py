"""What torch.save writes, as a file or a range of one: a zip of stored entries, around data that others write."""

import struct
import zlib

from ckptd.shared.format.slot import PAGE

_ROOT = "archive"
_ALIGNMENT = 64  # of every storage, as torch does
_LARGE_NBYTES = 64 << 10  # from here on a page
_ZIP64 = 0xFFFFFFFF
_VERSION = 45  # of the zip format, the first with zip64
_PADDING = 0x4246  # "FB": the extra field that torch pads with
_LOCAL = struct.Struct("<IHHHHHIIIHH")
_CENTRAL = struct.Struct("<IHHHHHHIIIHHHHHII")


class Archive:
    """A zip being laid out: blobs, by offset in the file, with room between them for data that others write.

    start: where it begins in its file. Its own offsets count from there, what is aligned is aligned in the file.
    """

    def __init__(self, start: int = 0) -> None:
        self.blobs: list[tuple[int, bytes]] = []
        self.start = start
        self.nbytes = 0
        self._directory: list[bytes] = []

    def _put(self, data: bytes) -> None:
        self.blobs.append((self.start + self.nbytes, data))
        self.nbytes += len(data)

    def add(self, name: str, data: bytes) -> None:
        """An entry with its data."""
        self._open(name, len(data), zlib.crc32(data), 1)
        self._put(data)

    def reserve(self, name: str, nbytes: int) -> int:
        """An entry whose data others write; where that begins in the file. Torch does not look at the CRC: it is 0."""
        self._open(name, nbytes, 0, PAGE if nbytes >= _LARGE_NBYTES else _ALIGNMENT)
        at = self.start + self.nbytes
        self.nbytes += nbytes
        return at

    def _open(self, name: str, nbytes: int, crc: int, alignment: int) -> None:
        raw, begin = f"{_ROOT}/{name}".encode(), self.nbytes
        large = nbytes >= _ZIP64
        extra = struct.pack("<HHQQ", 1, 16, nbytes, nbytes) if large else b""
        pad = -(self.start + begin + _LOCAL.size + len(raw) + len(extra) + 4) % alignment
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
