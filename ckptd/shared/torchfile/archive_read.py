"""A torch.save archive of any origin: its pickle, and where its storages lie. Bytes by way of a function; pure."""

import zlib

from ckptd.shared.base.wording import shown
from ckptd.shared.torchfile import zip_read
from ckptd.shared.torchfile.pickle_read import MAX_NBYTES, Stored


class SavedArchive:
    """The archive of so many bytes. Raises ValueError, with what is wrong, for what is none."""

    def __init__(self, read: zip_read.Read, nbytes: int) -> None:
        self._read, self._nbytes = read, nbytes
        found = zip_read.entries(read, nbytes)
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

    def start_of(self, entry: zip_read.Entry) -> int:
        """First byte of its data. Raises ValueError when it does not end in the archive."""
        return zip_read.data_start(self._read, entry, self._nbytes)

    def storage_of(self, tensor: Stored) -> zip_read.Entry:
        """Raises ValueError when the archive does not have it."""
        entry = self.storages.get(tensor.key)
        if entry is None:
            raise ValueError(f"it has no {shown(f'data/{tensor.key}')}")
        return entry
