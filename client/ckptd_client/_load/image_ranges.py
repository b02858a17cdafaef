"""Reads ranges of the images of a checkpoint without checks of digests, for results that prove nothing."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

from ckptd.shared.base.errors import DamagedError
from ckptd.shared.format.manifest import FileRecord
from ckptd.shared.format.stored_files import StoredFile, StoredFiles, read_some
from ckptd.shared.format.stored_records import StoredRecords
from ckptd_client._load.reader import Source

ReadAt = Callable[[int, int], bytes | memoryview]  # (offset in the image, bytes); raises OSError, DamagedError


@dataclass(frozen=True, slots=True)
class Images:
    """The images of a checkpoint. tables: digests of their blocks, by rank. reading: opens a rank's image for a while.

    What a ReadAt gives may be memory of the image's: it counts while the image is open.
    """

    tables: Mapping[int, bytes]
    reading: Callable[[int], AbstractContextManager[ReadAt]]


def images_in(records: StoredRecords) -> Images:
    """Those of a checkpoint on the store, by way of the page cache, which the ranks of a node have in common."""
    return Images(_Tables(records), lambda rank: _reading(records.files, records[rank]))


class _Tables(Mapping[int, bytes]):
    """Read when they are asked for."""

    def __init__(self, records: StoredRecords) -> None:
        self._records = records

    def __getitem__(self, rank: int) -> bytes:
        return self._records[rank].digests

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self._records)))

    def __len__(self) -> int:
        return len(self._records)


def images_of(sources: Mapping[int, Source]) -> Images:
    """Those in the slots of this node. The sources stay the caller's, and open."""
    return Images({rank: source.table for rank, source in sources.items()}, lambda rank: _mapped(sources[rank]))


@contextlib.contextmanager
def _reading(stored: StoredFiles, record: FileRecord) -> Iterator[ReadAt]:
    files: dict[str, StoredFile] = {}
    with contextlib.ExitStack() as stack:

        def read(offset: int, nbytes: int) -> bytes:
            parts = []
            for name, start, size in record.extents():
                first, stop = max(offset, start), min(offset + nbytes, start + size)
                if first < stop:
                    if name not in files:
                        files[name] = stored.open(name, cached=True)
                        stack.callback(files[name].close)
                    parts.append(read_some(files[name], first - start, stop - first))
            found = b"".join(parts)
            if len(found) != nbytes:
                raise DamagedError(f"{stored.where(record.name)}: ends before byte {offset + nbytes}")
            return found

        yield read


@contextlib.contextmanager
def _mapped(source: Source) -> Iterator[ReadAt]:
    def read(offset: int, nbytes: int) -> memoryview:
        if source.mapping is None:
            raise DamagedError(f"{source.where} is not in memory")
        return source.mapping.view[offset : offset + nbytes]

    yield read
