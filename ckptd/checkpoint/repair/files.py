"""Images and parity of a checkpoint as files: their sound blocks, and the bytes for the solver."""

import os
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Self

from ckptd.shared.base.ids import JobKey, SaveId
from ckptd.shared.bulk import wire
from ckptd.shared.bulk.sockets import Cancel
from ckptd.shared.format.digest import BLOCK_NBYTES, DIGEST_NBYTES, blocks
from ckptd.shared.format.integrity import XXH3, Integrity
from ckptd.shared.format.layout import Extent
from ckptd.shared.format.slot import align_up
from ckptd.system.files import FileLayer

_MAX_OPEN = 64
IMAGES = "images"  # the node that stands for all images; each parity is a node called by its member's number
Ranges = list[tuple[int, int]]


class OpenFiles:
    """Reads files by path, the most recent ones kept open. A context manager."""

    def __init__(self) -> None:
        self._fds: OrderedDict[str, int] = OrderedDict()

    def read(self, path: str, offset: int, into: memoryview) -> None:
        """Fills into. Raises OSError, EOFError when the file ends before."""
        fd = self._fds.pop(path, None)
        if fd is None:
            fd = FileLayer().open_read(path)
        self._fds[path] = fd
        if len(self._fds) > _MAX_OPEN:
            os.close(self._fds.popitem(last=False)[1])
        done = 0
        while done < len(into):
            got = os.preadv(fd, [into[done:]], offset + done)
            if got == 0:
                raise EOFError(f"{path} ends at byte {offset + done}")
            done += got

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        while self._fds:
            os.close(self._fds.popitem()[1])


class Bytes:
    """A run of nbytes over several files, with zeros between them. ``digests``: of each block of it."""

    def __init__(
        self, directory: str, extents: Sequence[Extent], digests: bytes, nbytes: int, integrity: Integrity = XXH3
    ) -> None:
        self.integrity = integrity
        self.directory = directory
        self.extents = tuple(extents)
        self.digests = digests
        self.nbytes = nbytes

    def path(self, extent: Extent) -> str:
        """Of one of its files."""
        return os.path.join(self.directory, extent.name)

    def within(self, start: int, stop: int) -> Iterator[tuple[Extent, int, int]]:
        """(file, first, last) for bytes start to stop of the run."""
        for extent in self.extents:
            first, last = max(start, extent.start), min(stop, extent.start + extent.nbytes)
            if first < last:
                yield extent, first, last

    def read(self, files: OpenFiles, start: int, into: memoryview, instead: Mapping[str, str] | None = None) -> None:
        """Fills into with bytes from start. instead: other paths to read, by path. Raises OSError, EOFError."""
        at = start
        for extent, first, last in self.within(start, start + len(into)):
            into[at - start : first - start] = bytes(first - at)
            at = last
            path = self.path(extent)
            path = instead.get(path, path) if instead else path
            files.read(path, first - extent.start, into[first - start : last - start])
        into[at - start :] = bytes(start + len(into) - at)

    def sound(self, index: int, block: memoryview) -> bool:
        """Whether these are the bytes of that block."""
        return self.integrity.digest(block) == self.digests[index * DIGEST_NBYTES : (index + 1) * DIGEST_NBYTES]

    def damage(self, files: OpenFiles, buffer: memoryview, progress: Callable[[int], None]) -> Ranges:
        """Where its blocks are not what they should be, neighbours joined. Reads all of it."""
        found: Ranges = []
        for index, (start, stop) in enumerate(blocks(self.nbytes)):
            block = buffer[: stop - start]
            try:
                self.read(files, start, block)
                whole = self.sound(index, block)
            except (OSError, EOFError):
                whole = False
            progress(stop - start)
            if whole:
                continue
            joined = found.pop()[0] if found and found[-1][1] == start else start
            found.append((joined, stop))
        return found

    def misfits(self) -> list[str]:
        """Paths that are missing or have another size than they should."""
        found = []
        for extent in self.extents:
            try:
                fits = FileLayer().size(self.path(extent)) == extent.nbytes
            except OSError:
                fits = False
            if not fits:
                found.append(self.path(extent))
        return found


class FileSources:
    """What a solver pulls from, in place of nodes: images and tails by rank, parity by member."""

    def __init__(
        self, images: Mapping[int, Bytes], tails: Mapping[int, bytes], parities: Mapping[int, Bytes], files: OpenFiles
    ) -> None:
        self.cancel = Cancel()
        self.integrity = XXH3  # what is solved is compared with the manifest, not what it is solved from
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
