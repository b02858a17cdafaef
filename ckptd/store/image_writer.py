"""A slot's image to a file on the store: large aligned writes past the page cache, several in flight, then one sync."""

import contextlib
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass

from ckptd.shared.format.slot import align_up
from ckptd.store.files import FileLayer, is_temp, temp_name
from ckptd.store.scan import Place
from ckptd.system import failpoints

CHUNK_NBYTES = 16 << 20  # of one write
Report = Callable[[Mapping[str, int]], None]  # told the bytes written so far of each file; keeps nothing of it
WRITERS = 3  # writes in flight; measured: 1 reaches 0.85 of the disk, 2 to 4 all of it


def _nothing() -> None:
    return None


def _no_report(_done: Mapping[str, int]) -> None:
    return None


def _no_window(_start: int, _stop: int) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


@dataclass(frozen=True)
class Image:
    """What to write.

    source: the mapped slot, page-aligned and readable to nbytes rounded up to 4096; stays the caller's.
    check_source: raises if source is no longer the save's; called when all is written and synced, before the file gets
    its name.
    window: entered while bytes start to stop of source are written, to map and unmap them: beside other writes, where
    it costs nothing. A direct write that takes page faults takes them under the file's lock, one after the other.
    """

    name: str
    nbytes: int
    source: memoryview
    check_source: Callable[[], None] = _nothing
    window: Callable[[int, int], contextlib.AbstractContextManager[None]] = _no_window


class Flow:
    """How fast to write, and whom to tell. Shared by the images of one drain, whatever thread writes them."""

    def __init__(self, *, bytes_per_s: int = 0, writers: int = WRITERS, report: Report = _no_report) -> None:
        self.writers = writers
        self._bytes_per_s = bytes_per_s  # 0: no cap
        self._report = report
        self._lock = threading.Lock()
        self._free_at_s = 0.0
        self._done: Counter[str] = Counter()

    def pace(self, nbytes: int) -> None:
        """Blocks until nbytes more may be written under the cap: before each write as long as it may take.

        Not after it: many drains of one write each would keep to no cap at all.
        """
        if not self._bytes_per_s:
            return
        with self._lock:
            due_s = max(self._free_at_s, time.monotonic()) + nbytes / self._bytes_per_s
            self._free_at_s = due_s
        time.sleep(max(0.0, due_s - time.monotonic()))

    def wrote(self, name: str, nbytes: int) -> None:
        """Counts nbytes of the file as written, and reports."""
        with self._lock:
            self._done[name] += nbytes
            self._report(self._done)


def make_partial(fs: FileLayer, place: Place) -> None:
    """The job's and the save's hidden directory, made and synced if they are not there. The store itself must exist."""
    if fs.mkdir(place.job_dir):
        fs.fsync_dir(place.key.store)
    if fs.mkdir(place.partial):
        fs.fsync_dir(place.job_dir)
    failpoints.reach("drain.partial-made")


def sync_partial(fs: FileLayer, place: Place) -> None:
    """Returns when the names of all files written so far are on the disk."""
    fs.fsync_dir(place.partial)


def write_image(fs: FileLayer, place: Place, image: Image, flow: Flow) -> None:
    """The image under its final name in the partial directory (see make_partial), its data synced; the name is not yet.

    A file of that name and size is kept: it got its name only after its data was synced. Raises OSError, or whatever
    check_source raises; then nothing has the final name and only a hidden file may be left, which the next try removes.
    """
    path = os.path.join(place.partial, image.name)
    if _written_before(fs, path, image.nbytes):
        flow.wrote(image.name, image.nbytes)
        return
    temp = temp_name(path)
    fd = fs.open_write(temp, direct=True)
    try:
        _write_all(fs, fd, image, flow)
        failpoints.reach("drain.before-truncate")
        fs.truncate(fd, image.nbytes)
        failpoints.reach("drain.before-file-sync")
        fs.fsync(fd)
    finally:
        fs.close(fd)
    image.check_source()
    failpoints.reach("drain.before-file-rename")
    fs.rename(temp, path)
    failpoints.reach("drain.after-file-rename")


def _written_before(fs: FileLayer, path: str, nbytes: int) -> bool:
    head, name = os.path.split(path)
    for entry in fs.listdir(head):
        if is_temp(entry, name):
            with contextlib.suppress(FileNotFoundError):
                fs.unlink(os.path.join(head, entry))
    try:
        return fs.size(path) == nbytes
    except FileNotFoundError:
        return False


def _write_all(fs: FileLayer, fd: int, image: Image, flow: Flow) -> None:
    end = align_up(image.nbytes)
    half_nbytes = image.nbytes // 2

    def write(start: int) -> int:
        stop = min(start + CHUNK_NBYTES, end)
        flow.pace(stop - start)
        with image.window(start, stop), image.source[start:stop] as chunk:
            fs.pwrite(fd, chunk, start)
        return min(stop, image.nbytes) - start

    pool = ThreadPoolExecutor(flow.writers)
    try:
        done = 0
        for future in as_completed([pool.submit(write, start) for start in range(0, end, CHUNK_NBYTES)]):
            done += future.result()
            flow.wrote(image.name, future.result())
            if done >= half_nbytes:
                failpoints.reach("drain.half-written")
    finally:
        # The writes in flight end before the descriptor and the mapping they use are given back.
        pool.shutdown(cancel_futures=True)
