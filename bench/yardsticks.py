"""The speed of the machine without checkpoints: copies, large writes to the disk, large reads."""

import contextlib
import mmap
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

from bench.measure import Sample, Series, seconds, timed

_PAGE = 4096
_ALIGN = 64
_PADDING_NBYTES = 1 << 20
_WRITE_NBYTES = 16 << 20
_DEPTHS = (1, 4)  # writes or reads in flight


class ShmFile:
    """A mapped file on tmpfs; close removes it. Its pages do not exist before they are touched."""

    def __init__(self, path: Path, nbytes: int) -> None:
        self._path = path
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.ftruncate(descriptor, nbytes)
            self.map = mmap.mmap(descriptor, nbytes)
        finally:
            os.close(descriptor)
        self.tensor = torch.frombuffer(self.map, dtype=torch.uint8)

    def close(self) -> None:
        """Unlinks the file and unmaps it; an open view keeps the pages."""
        self._path.unlink()
        del self.tensor
        with contextlib.suppress(BufferError):
            self.map.close()


class Yardsticks:
    """Copies of nbytes between memory, and writes and reads between memory and a directory's disk.

    Owns nbytes of heap, as much tmpfs in shm_dir (populated; at least spare_nbytes, the most that tensor_copies takes
    of another state) and one file in disk_dir.
    """

    def __init__(self, nbytes: int, shm_dir: Path, disk_dir: Path, spare_nbytes: int = 0) -> None:
        self.nbytes = -(-nbytes // _PAGE) * _PAGE
        self._shm_dir = shm_dir
        self._path = disk_dir / f"yardstick-{os.getpid()}"
        self._source = torch.full((self.nbytes,), 7, dtype=torch.uint8)
        self._warm = ShmFile(shm_dir / "warm", max(self.nbytes, spare_nbytes) + _PADDING_NBYTES)
        self._warm.tensor.fill_(1)
        self._pool = ThreadPoolExecutor(max(_DEPTHS))
        self.write_depth = self.read_depth = _DEPTHS[0]

    def close(self) -> None:
        """Releases memory, threads and the file."""
        self._pool.shutdown()
        self._warm.close()
        self._path.unlink(missing_ok=True)

    def warm_copy(self) -> Sample:
        """One plain copy_ into memory that has been touched."""
        target = self._warm.tensor[: self.nbytes]
        return timed(lambda: target.copy_(self._source))

    def fresh_copy(self) -> Sample:
        """One plain copy_ into a newly mapped tmpfs file, the mapping included."""
        fresh: list[ShmFile] = []

        def copy() -> None:
            fresh.append(ShmFile(self._shm_dir / "fresh", self.nbytes))
            fresh[0].tensor.copy_(self._source)

        sample = timed(copy)
        fresh[0].close()
        return sample

    def tensor_copies(self, sources: Sequence[torch.Tensor]) -> Callable[[], Sample]:
        """A loop of plain copy_ calls, tensor by tensor, into warm memory, views made beforehand."""
        targets, offset = [], 0
        for source in sources:
            offset = -(-offset // _ALIGN) * _ALIGN
            flat = self._warm.tensor[offset : offset + source.nbytes]
            targets.append(flat.view(source.dtype).view(source.shape))
            offset += source.nbytes
        pairs = list(zip(targets, sources, strict=True))

        def loop() -> None:
            for target, source in pairs:
                target.copy_(source)

        return lambda: timed(loop)

    def direct_write(self, depth: int | None = None) -> Sample:
        """O_DIRECT writes of 16 MiB from mapped tmpfs into a new file, depth in flight, and fsync."""
        depth = depth or self.write_depth
        self._path.unlink(missing_ok=True)

        def write() -> None:
            with _opened(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT) as descriptor:
                if depth > 1:
                    os.posix_fallocate(descriptor, 0, self.nbytes)  # writes that extend a file wait for each other
                self._blocks(lambda view, offset: os.pwrite(descriptor, view, offset), depth)
                os.fsync(descriptor)

        return timed(write)

    def direct_read(self, depth: int | None = None, path: Path | None = None) -> Sample:
        """O_DIRECT reads of 16 MiB of a file of at least nbytes, or of our own, into warm tmpfs, depth in flight."""
        depth = depth or self.read_depth
        if path is None and not self._path.exists():
            self.direct_write()

        def read() -> None:
            with _opened(path or self._path, os.O_RDONLY | os.O_DIRECT) as descriptor:
                self._blocks(lambda view, offset: os.preadv(descriptor, [view], offset), depth)

        return timed(read)

    def survey(self, repeat: int, sources: Sequence[torch.Tensor]) -> dict[str, Series]:
        """Every yardstick, repeat times; sets write_depth and read_depth to the faster ones."""
        loop = self.tensor_copies(sources)
        calls: dict[str, Callable[[], Sample]] = {
            "copy into warm memory": self.warm_copy,
            "copy into fresh memory": self.fresh_copy,
            "per-tensor copies into warm memory": loop,
        }
        for depth in _DEPTHS:
            calls[_name("writes + fsync", depth)] = partial(self.direct_write, depth)
        for depth in _DEPTHS:
            calls[_name("reads", depth)] = partial(self.direct_read, depth)
        self.warm_copy()
        rounds = [{name: call() for name, call in calls.items()} for _ in range(repeat)]
        found = {name: seconds([one[name] for one in rounds]) for name in calls}
        self.write_depth = min(_DEPTHS, key=lambda depth: found[_name("writes + fsync", depth)].median)
        self.read_depth = min(_DEPTHS, key=lambda depth: found[_name("reads", depth)].median)
        return found

    @property
    def write_name(self) -> str:
        """The write yardstick in use."""
        return _name("writes + fsync", self.write_depth)

    @property
    def read_name(self) -> str:
        """The read yardstick in use."""
        return _name("reads", self.read_depth)

    def _blocks(self, transfer: Callable[[memoryview, int], int], depth: int) -> None:
        def block(offset: int) -> None:
            view = whole[offset : min(offset + _WRITE_NBYTES, self.nbytes)]
            moved = transfer(view, offset)
            if moved != len(view):
                raise OSError(f"{moved} of {len(view)} bytes moved at {offset}")

        with memoryview(self._warm.map) as whole:
            offsets = range(0, self.nbytes, _WRITE_NBYTES)
            if depth == 1:
                for offset in offsets:
                    block(offset)
            else:
                deque(self._pool.map(block, offsets), maxlen=0)  # the pool has as many threads as the largest depth


def _name(what: str, depth: int) -> str:
    return f"O_DIRECT {what}, {depth} in flight"


@contextlib.contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    descriptor = os.open(path, flags, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
