"""Images to files of an unfinished checkpoint: large aligned writes past the page cache, some at once, one sync."""

import contextlib
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from ckptd.shared.base.ids import SetName
from ckptd.shared.format.slot import align_up
from ckptd.store.image import Flow, Image
from ckptd.store.interface import OpenImage
from ckptd.store.posix.scan import Place, committed_at
from ckptd.system import failpoints
from ckptd.system.files import FileLayer, is_temp, temp_name

CHUNK_NBYTES = 16 << 20  # of one write at most
_LEAST_NBYTES = 256 << 10  # where that takes long
_FIRST_NBYTES = 1 << 20  # nothing is known of the store yet
_WRITE_S = 0.25  # so long a write may take: what is written is reported after each
_FILES_AT_ONCE = 2  # one file's sync runs beside the next one's writes


def make_set(fs: FileLayer, place: Place, folder: SetName) -> None:
    """The directory of the node's set, and those above it, made if they are not there. The store itself must exist.

    The job's and the save's are synced by the process that makes them, the sets' by the commit.
    """
    directory = place.set_dir(folder)
    try:
        fs.mkdir(directory)
    except FileNotFoundError:
        if fs.mkdir(place.job_dir):
            fs.fsync_dir(place.key.store)
        if fs.mkdir(place.partial):
            fs.fsync_dir(place.job_dir)
        fs.mkdir(os.path.dirname(directory))
        fs.mkdir(directory)
    failpoints.reach("drain.partial-made")


def put_files(fs: FileLayer, place: Place, folder: SetName, files: Sequence[OpenImage], flow: Flow) -> bool:
    """Each file in the save's partial directory, its data synced. False: the save is committed already.

    Until it is whole, a file lies in the directory of the set, which has few names: those that killed writers left are
    found in it. The names are synced by the vote (of parity) and by the commit (of images).
    """
    if committed_at(fs, place) is not None:
        return False
    make_set(fs, place, folder)
    left = [name for name in fs.listdir(place.set_dir(folder)) if is_temp(name)]
    pool = ThreadPoolExecutor(max(1, min(len(files), _FILES_AT_ONCE)))

    def write(open_image: OpenImage) -> None:
        with open_image() as image:
            write_image(fs, place, folder, image, flow, left)

    try:
        for _ in pool.map(write, files):
            pass
    finally:
        pool.shutdown(cancel_futures=True)
    return True


def write_image(  # noqa: PLR0913, PLR0917 - whose bytes, and where they go
    fs: FileLayer, place: Place, folder: SetName, image: Image, flow: Flow, left: Sequence[str] = ()
) -> None:
    """The image under its final name in the partial directory (see make_set), its data synced; the name is not yet.

    left: hidden files in the set's directory, of which this image's are removed. A file of that name and size is kept:
    it got its name only after its data was synced. Raises OSError, or whatever check_source raises; then nothing has
    the final name and only a hidden file may be left, which the next try removes.
    """
    path = os.path.join(place.partial, image.name)
    hidden = os.path.join(place.set_dir(folder), os.path.basename(image.name))
    for name in left:
        if is_temp(name, os.path.basename(hidden)):
            with contextlib.suppress(FileNotFoundError):
                fs.unlink(os.path.join(place.set_dir(folder), name))
    with contextlib.suppress(FileNotFoundError):
        if fs.size(path) == image.nbytes:
            flow.wrote(image.name, image.nbytes)
            return
    temp = temp_name(hidden)
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


class _Cuts:
    """The ranges of one file's writes, in order: as large as the store takes in ``_WRITE_S``, by the last write.

    A range ends at a multiple of its size, so that large ones lie where they would without the small ones before.
    """

    def __init__(self, nbytes: int) -> None:
        self._lock = threading.Lock()
        self._nbytes, self._at = nbytes, 0
        self._size = min(_FIRST_NBYTES, CHUNK_NBYTES)

    def next(self) -> tuple[int, int] | None:
        """The range of the next write; None: there is none."""
        with self._lock:
            if (start := self._at) >= self._nbytes:
                return None
            self._at = min((start // self._size + 1) * self._size, self._nbytes)
            return start, self._at

    def took(self, nbytes: int, seconds: float) -> None:
        """A write ended well."""
        able, size = nbytes / max(seconds, 1e-9) * _WRITE_S, CHUNK_NBYTES
        while size > able and size > _LEAST_NBYTES:
            size //= 2
        with self._lock:
            self._size = size

    def stop(self) -> None:
        """A write failed: no other begins."""
        with self._lock:
            self._at = self._nbytes


def _write_all(fs: FileLayer, fd: int, image: Image, flow: Flow) -> None:
    cuts = _Cuts(align_up(image.nbytes))
    half_nbytes = image.nbytes // 2

    def write_some() -> None:
        try:
            while (cut := cuts.next()) is not None:
                write(*cut)
        except BaseException:
            cuts.stop()
            raise

    def write(start: int, stop: int) -> None:
        began_s = time.monotonic()
        flow.pace(stop - start)
        with image.window(start, stop), image.source[start:stop] as chunk:
            fs.pwrite(fd, chunk, start)
        cuts.took(stop - start, time.monotonic() - began_s)
        if flow.wrote(image.name, min(stop, image.nbytes) - start) >= half_nbytes:
            failpoints.reach("drain.half-written")

    pool = ThreadPoolExecutor(flow.writers)
    try:
        for future in [pool.submit(write_some) for _ in range(flow.writers)]:
            future.result()
    finally:
        # The writes in flight end before the descriptor and the mapping they use are given back.
        cuts.stop()
        pool.shutdown()
