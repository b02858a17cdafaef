"""Images and parity of a checkpoint as files: their sound blocks, and the bytes for the solver."""

import mmap
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Self

from ckptd.checkpoint.report import ignore
from ckptd.shared.base.ids import JobKey, SaveId
from ckptd.shared.bulk import wire
from ckptd.shared.bulk.sockets import Cancel
from ckptd.shared.format.digest import BLOCK_NBYTES, DIGEST_NBYTES, blocks
from ckptd.shared.format.integrity import XXH3
from ckptd.shared.format.layout import Extent
from ckptd.shared.format.slot import PAGE, align_up
from ckptd.shared.format.stored_files import StoredFile, StoredFiles, read_exactly
from ckptd.store.interface import Replacement

_MAX_OPEN = 64
IMAGES = "images"  # the node that stands for all images; each parity is a node called by its member's number
Ranges = list[tuple[int, int]]


class OpenFiles:
    """Reads files of a checkpoint by name, the most recent ones kept open, and counts. A context manager.

    cached: by way of the page cache; else from the medium, where its file system lets us. progress: gets the bytes read
    from the store and written to it so far, as they are.
    """

    def __init__(self, files: StoredFiles, *, cached: bool, progress: Callable[[int], None] = ignore) -> None:
        self.files = files
        self.moved = 0
        self._cached, self._progress = cached, progress
        self._pages = memoryview(mmap.mmap(-1, BLOCK_NBYTES + PAGE)) if not cached else memoryview(b"")
        self._open: OrderedDict[str, StoredFile] = OrderedDict()

    def count(self, nbytes: int) -> None:
        """So many more bytes are read or written."""
        self.moved += nbytes
        self._progress(self.moved)

    def read(self, name: str, offset: int, into: memoryview) -> None:
        """Fills into. Raises OSError, EOFError when the file ends before."""
        self.count(len(into))
        file = self._open.pop(name, None) or self.files.open(name, cached=self._cached)
        self._open[name] = file
        if len(self._open) > _MAX_OPEN:
            self._open.popitem(last=False)[1].close()
        if self._cached:
            read_exactly(file, offset, into)
            return
        for first in range(0, len(into), BLOCK_NBYTES):
            self._read_pages(file, offset + first, into[first : first + BLOCK_NBYTES])

    def _read_pages(self, file: StoredFile, offset: int, into: memoryview) -> None:
        """At most a block."""
        skip = offset % PAGE
        wanted = skip + len(into)
        found = file.read(self._pages[: align_up(wanted)], offset - skip, wanted)
        if found < wanted:
            raise EOFError(f"ends at byte {offset - skip + found}")
        into[:] = self._pages[skip:wanted]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        while self._open:
            self._open.popitem()[1].close()


class Bytes:
    """A run of nbytes over several files, with zeros between them. ``digests``: of each block of it."""

    def __init__(self, files: StoredFiles, extents: Sequence[Extent], digests: bytes, nbytes: int) -> None:
        self.files = files
        self.integrity = files.integrity
        self.extents = tuple(extents)
        self.digests = digests
        self.nbytes = nbytes

    def path(self, extent: Extent) -> str:
        """Location of one of its files."""
        return self.files.where(extent.name)

    def within(self, start: int, stop: int) -> Iterator[tuple[Extent, int, int]]:
        """(file, first, last) for bytes start to stop of the run."""
        for extent in self.extents:
            first, last = max(start, extent.start), min(stop, extent.start + extent.nbytes)
            if first < last:
                yield extent, first, last

    def read(
        self, files: OpenFiles, start: int, into: memoryview, instead: Mapping[str, Replacement] = MappingProxyType({})
    ) -> None:
        """Fills into with bytes from start. instead: replacements to read, by name. Raises OSError, EOFError."""
        at = start
        for extent, first, last in self.within(start, start + len(into)):
            into[at - start : first - start] = bytes(first - at)
            at = last
            part = into[first - start : last - start]
            replacement = instead.get(extent.name)
            if replacement is None:
                files.read(extent.name, first - extent.start, part)
            else:
                files.count(len(part))
                replacement.read(part, first - extent.start)
        into[at - start :] = bytes(start + len(into) - at)

    def sound(self, index: int, block: memoryview) -> bool:
        """Whether these are the bytes of that block."""
        return self.integrity.digest(block) == self.digests[index * DIGEST_NBYTES : (index + 1) * DIGEST_NBYTES]

    def damage(self, files: OpenFiles, buffer: memoryview) -> Ranges:
        """Where its blocks are not what they should be, neighbours joined. Reads all of it."""
        found: Ranges = []
        for index, (start, stop) in enumerate(blocks(self.nbytes)):
            block = buffer[: stop - start]
            try:
                self.read(files, start, block)
                whole = self.sound(index, block)
            except (OSError, EOFError):
                whole = False
            if whole:
                continue
            joined = found.pop()[0] if found and found[-1][1] == start else start
            found.append((joined, stop))
        return found

    def misfits(self) -> list[str]:
        """Names of files that are missing or have another size than they should."""
        found = []
        for extent in self.extents:
            try:
                fits = self.files.size(extent.name) == extent.nbytes
            except OSError:
                fits = False
            if not fits:
                found.append(extent.name)
        return found


class FileSources:
    """What a solver pulls from, in place of nodes: images and tails by rank, parity by member."""

    def __init__(
        self, images: Mapping[int, Bytes], tails: Mapping[int, bytes], parities: Mapping[int, Bytes], files: OpenFiles
    ) -> None:
        self.cancel = Cancel()
        self.integrity = XXH3  # what is solved is compared with the votes, not what it is solved from
        self._images, self._tails, self._parities, self._files = images, tails, parities, files

    def open(self, node: str) -> "_FileSource":
        """Of one node."""
        return _FileSource(node, self)

    def fill(self, node: str, rank: int, offset: int, into: memoryview) -> None:
        """Bytes of a segment, or of parity."""
        if rank == wire.PARITY:
            self._parities[int(node)].read(self._files, offset, into)
            return
        image = self._images[rank]
        inside = max(0, min(len(into), image.nbytes - offset))
        if inside:
            image.read(self._files, offset, into[:inside])
        if inside < len(into):
            at = offset + inside - align_up(image.nbytes)
            into[inside:] = self._tails[rank][at : at + len(into) - inside]


class _FileSource:
    def __init__(self, node: str, sources: FileSources) -> None:
        self.node = node
        self._sources = sources
        self._pending: deque[wire.Range] = deque()
        self._done = 0  # bytes of the first

    def ask(self, job: JobKey, save: SaveId, epoch: int, ranges: Sequence[wire.Range]) -> None:
        """Asks ahead. There is but one save."""
        del job, save, epoch
        self._pending.extend(ranges)

    def receive(self, into: memoryview) -> None:
        """The bytes of the next range, or part of it."""
        asked = self._pending[0]
        at = self._done
        self._done += len(into)
        if self._done == asked.nbytes:
            self._pending.popleft()
            self._done = 0
        self._sources.fill(self.node, asked.rank, asked.offset + at, into)

    def close(self) -> None:
        """Nothing is held."""


def block_buffer() -> memoryview:
    """Room for a block."""
    return memoryview(bytearray(BLOCK_NBYTES))
