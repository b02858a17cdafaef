"""The digest table of bytes that come about in parts: each block digested while its bytes are still in the cache."""

from ckptd.shared.format.digest import BLOCK_NBYTES, blocks
from ckptd.shared.format.integrity import XXH3, Hasher, Integrity


class Table:
    """Digests of the blocks of nbytes, as far as the bytes of each come in order; what is beyond is passed over.

    Threads may take turns in a block, and have different ones at once.
    """

    def __init__(self, nbytes: int, integrity: Integrity = XXH3) -> None:
        self._integrity = integrity
        self._nbytes = nbytes
        self._blocks = tuple(blocks(nbytes))
        self._running: dict[int, tuple[int, Hasher]] = {}  # where each block that was begun continues
        self._done: dict[int, bytes] = {}  # by number of the block

    def take(self, offset: int, part: memoryview) -> None:
        """Bytes as they will stay. Those that do not continue where their block's last ended are left for later."""
        part = part[: max(0, self._nbytes - offset)]
        while len(part):
            index = offset // BLOCK_NBYTES
            start, stop = self._blocks[index]
            nbytes = min(len(part), stop - offset)
            if offset == start:
                self._running[index] = offset, self._integrity.hasher()
            at, running = self._running.get(index, (-1, None))
            if at == offset and running is not None:
                running.update(part[:nbytes])
                self._running[index] = offset + nbytes, running
                if offset + nbytes == stop:
                    self._done[index] = running.value()
            offset, part = offset + nbytes, part[nbytes:]

    def all(self, view: memoryview) -> bytes:
        """The whole table; what was left is digested now, from view."""
        return b"".join(self.one(index, view) for index in range(len(self._blocks)))

    def one(self, index: int, view: memoryview) -> bytes:
        """The block's digest."""
        start, stop = self._blocks[index]
        return self._done.get(index) or self._integrity.digest(view[start:stop])
