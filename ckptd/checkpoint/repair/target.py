"""One image or parity that is made whole: its files written under hidden names, compared, and only then renamed."""

from dataclasses import dataclass, field

from ckptd.checkpoint.repair.files import Bytes, OpenFiles, Ranges
from ckptd.shared.base.errors import DamagedError
from ckptd.shared.format.digest import DIGEST_NBYTES, blocks
from ckptd.shared.format.layout import Extent
from ckptd.store.interface import Held, Replacement


@dataclass
class Target:
    """Bytes with damage, and the replacements of those of its files that are concerned; sound files are never touched.

    tail: what follows the bytes in the file, once all blocks are there: of parity alone.
    """

    name: str
    content: Bytes
    damage: Ranges
    misfits: list[str] = field(default_factory=list)
    _replacements: dict[str, Replacement] = field(default_factory=dict)  # by name
    _changed: set[str] = field(default_factory=set)  # of these, what differs from the file as far as that is read

    @property
    def concerned(self) -> list[Extent]:
        """Files to write again."""
        hit = {extent for start, stop in self.damage for extent, _, _ in self.content.within(start, stop)}
        return [e for e in self.content.extents if e in hit or e.name in self.misfits]

    def begin(self, held: Held, files: OpenFiles, buffer: memoryview) -> None:
        """Replacements with all that is sound. Raises OSError."""
        self._changed |= set(self.misfits)
        for extent in self.concerned:
            replacement = held.replacement(extent.name, extent.nbytes)
            self._replacements[extent.name] = replacement
            for start, stop in self._sound(extent):
                for first in range(start, stop, len(buffer)):
                    part = buffer[: min(len(buffer), stop - first)]
                    files.read(extent.name, first - extent.start, part)
                    replacement.write(part, first - extent.start)
                    files.count(len(part))

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
            part = data[first - at : last - at]
            self._replacements[extent.name].write(part, first - extent.start)
            files.count(len(part))
            if extent.name not in self._changed and not _same(files, extent.name, first - extent.start, part):
                self._changed.add(extent.name)

    def check(self, files: OpenFiles, buffer: memoryview) -> bytes:
        """Reads again what was written. Its digests. Raises DamagedError when a block is not what it must be."""
        spans = [(extent.start, extent.start + extent.nbytes) for extent in self.concerned]
        table = b""
        for index, (start, stop) in enumerate(blocks(self.content.nbytes)):
            at = index * DIGEST_NBYTES
            if not any(first < stop and start < last for first, last in spans):
                table += self.content.digests[at : at + DIGEST_NBYTES]
                continue
            block = buffer[: stop - start]
            self.content.read(files, start, block, self._replacements)
            table += self.content.integrity.digest(block)
            if self.content.digests and table[at:] != self.content.digests[at : at + DIGEST_NBYTES]:
                raise DamagedError(f"{self.name}: block {index} came out damaged: something changed meanwhile")
        return table

    def publish(self, tail: bytes = b"") -> list[str]:
        """Gives the files that changed their new content; their locations."""
        done = [name for name in self._replacements if name in self._changed]
        for name in done:
            if tail:
                self._replacements[name].write(memoryview(tail), self.content.nbytes)
            self._replacements[name].publish()
        return [self.content.files.where(name) for name in done]

    def close(self) -> None:
        """Replacements that were not published are removed."""
        while self._replacements:
            self._replacements.popitem()[1].close()


def _same(files: OpenFiles, name: str, offset: int, data: memoryview) -> bool:
    there = memoryview(bytearray(len(data)))
    try:
        files.read(name, offset, there)
    except (OSError, EOFError):
        return False
    return there == data
