"""What torch.save writes, as a file or a range of one: a zip of stored entries, around data that others write."""

from ckptd.shared.format.slot import PAGE
from ckptd.shared.torchfile.zip_write import Record, directory, local_header, padded_header, record_of

_ALIGNMENT = 64  # of every storage, as torch does
_LARGE_NBYTES = 64 << 10  # from here on a page


class Archive:
    """A zip being laid out: blobs, by offset in the file, with room between them for data that others write.

    start: where it begins in its file. Its own offsets count from there, what is aligned is aligned in the file.
    """

    def __init__(self, start: int = 0) -> None:
        self.blobs: list[tuple[int, bytes]] = []
        self.start = start
        self.nbytes = 0
        self._records: list[Record] = []

    def _put(self, data: bytes) -> None:
        self.blobs.append((self.start + self.nbytes, data))
        self.nbytes += len(data)

    def add(self, name: str, data: bytes) -> None:
        """An entry with its data."""
        self._records.append(record_of(_entry(name), data, self.nbytes))
        self._put(local_header(self._records[-1]) + data)

    def reserve(self, name: str, nbytes: int) -> int:
        """An entry whose data others write; where that begins in the file."""
        self._records.append(Record(_entry(name), nbytes, 0, self.nbytes))
        align = PAGE if nbytes >= _LARGE_NBYTES else _ALIGNMENT
        self._put(padded_header(self._records[-1], start=self.start + self.nbytes, align=align))
        at = self.start + self.nbytes
        self.nbytes += nbytes
        return at

    def close(self) -> None:
        """The directory and its end."""
        self._put(directory(self._records, self.nbytes))


def _entry(name: str) -> bytes:
    return f"archive/{name}".encode()
