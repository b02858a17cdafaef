"""One image or parity that is made whole: its files written under hidden names, compared, and only then renamed."""

import contextlib
import os
from dataclasses import dataclass, field

from ckptd.checkpoint.repair.files import Bytes, OpenFiles, Ranges
from ckptd.shared.base.errors import DamagedError
from ckptd.shared.format.digest import DIGEST_NBYTES, blocks
from ckptd.shared.format.layout import Extent
from ckptd.system import failpoints
from ckptd.system.files import FileLayer, is_temp, temp_name


@dataclass
class _Draft:
    """A file's next content. changed: it differs from the present content, as far as that is readable."""

    path: str
    temp: str
    fd: int
    changed: bool


@dataclass
class Target:
    """Bytes with damage, and the drafts of those of its files that are concerned; sound files are never touched.

    tail: what follows the bytes in the file, once all blocks are there: of parity alone.
    """

    name: str
    content: Bytes
    damage: Ranges
    misfits: list[str] = field(default_factory=list)
    _drafts: dict[str, _Draft] = field(default_factory=dict)

    @property
    def _fs(self) -> FileLayer:
        """Nothing outside of the checkpoint's directory is written."""
        return FileLayer(self.content.directory, self.content.integrity)

    @property
    def concerned(self) -> list[Extent]:
        """Files to write again."""
        hit = {extent for start, stop in self.damage for extent, _, _ in self.content.within(start, stop)}
        return [e for e in self.content.extents if e in hit or self.content.path(e) in self.misfits]

    def begin(self, files: OpenFiles, buffer: memoryview) -> None:
        """Drafts with all that is sound. Raises OSError."""
        fs = self._fs
        for extent in self.concerned:
            path = self.content.path(extent)
            _sweep(fs, path)
            temp = temp_name(path)
            draft = _Draft(path, temp, fs.open_write(temp, direct=False), path in self.misfits)
            self._drafts[path] = draft
            fs.truncate(draft.fd, extent.nbytes)
            for start, stop in self._sound(extent):
                for first in range(start, stop, len(buffer)):
                    part = buffer[: min(len(buffer), stop - first)]
                    files.read(path, first - extent.start, part)
                    fs.pwrite(draft.fd, part, first - extent.start)

    def _sound(self, extent: Extent) -> Ranges:
        at, found = extent.start, []
        for start, stop in [*self.damage, (extent.start + extent.nbytes,) * 2]:
            first = min(max(start, extent.start), extent.start + extent.nbytes)
            if at < first:
                found.append((at, first))
            at = max(at, stop)
        return found

    def write(self, files: OpenFiles, at: int, data: memoryview) -> None:
        """Bytes that were found again. Raises OSError."""
        for extent, first, last in self.content.within(at, at + len(data)):
            draft, part = self._drafts[self.content.path(extent)], data[first - at : last - at]
            self._fs.pwrite(draft.fd, part, first - extent.start)
            draft.changed = draft.changed or not _same(files, draft.path, first - extent.start, part)

    def check(self, files: OpenFiles, buffer: memoryview) -> bytes:
        """Reads again what was written. Its digests. Raises DamagedError when a block is not what it must be."""
        temps = {draft.path: draft.temp for draft in self._drafts.values()}
        spans = [(extent.start, extent.start + extent.nbytes) for extent in self.concerned]
        table = b""
        for index, (start, stop) in enumerate(blocks(self.content.nbytes)):
            at = index * DIGEST_NBYTES
            if not any(first < stop and start < last for first, last in spans):
                table += self.content.digests[at : at + DIGEST_NBYTES]
                continue
            block = buffer[: stop - start]
            self.content.read(files, start, block, temps)
            table += self.content.integrity.digest(block)
            if self.content.digests and table[at:] != self.content.digests[at : at + DIGEST_NBYTES]:
                raise DamagedError(f"{self.name}: block {index} came out damaged: something changed meanwhile")
        return table

    def publish(self, tail: bytes = b"") -> list[str]:
        """Renames what changed into place, data and names synced; the paths."""
        fs, done = self._fs, []
        for draft in self._drafts.values():
            if not draft.changed:
                continue
            if tail:
                fs.pwrite(draft.fd, tail, self.content.nbytes)
            failpoints.reach("repair.file-unsynced")
            fs.fsync(draft.fd)
            failpoints.reach("repair.before-file-rename")
            fs.rename(draft.temp, draft.path)
            failpoints.reach("repair.after-file-rename")
            done.append(draft.path)
        for directory in {os.path.dirname(path) for path in done}:
            fs.fsync_dir(directory)
        return done

    def close(self) -> None:
        """Drafts that got no name are removed."""
        for draft in self._drafts.values():
            self._fs.close(draft.fd)
            with contextlib.suppress(OSError):
                self._fs.unlink(draft.temp)
        self._drafts.clear()


def _same(files: OpenFiles, path: str, offset: int, data: memoryview) -> bool:
    there = memoryview(bytearray(len(data)))
    try:
        files.read(path, offset, there)
    except (OSError, EOFError):
        return False
    return there == data


def _sweep(fs: FileLayer, path: str) -> None:
    """Removes what a rebuild that was cut off left beside the file."""
    head, name = os.path.split(path)
    if fs.mkdir(head):  # of parity, when all of it is gone
        fs.fsync_dir(os.path.dirname(head))
    for entry in fs.listdir(head):
        if is_temp(entry, name):
            with contextlib.suppress(FileNotFoundError):
                fs.unlink(os.path.join(head, entry))
