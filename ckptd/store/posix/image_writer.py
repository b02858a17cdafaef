"""Images to files of an unfinished checkpoint: large aligned writes past the page cache, some at once, one sync."""

import contextlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

from ckptd.shared.format.slot import align_up
from ckptd.store.image import Flow, Image
from ckptd.store.interface import OpenImage
from ckptd.store.posix.scan import Place, committed_at
from ckptd.system import failpoints
from ckptd.system.files import FileLayer, is_temp, temp_name

CHUNK_NBYTES = 16 << 20  # of one write
_FILES_AT_ONCE = 2  # one file's sync runs beside the next one's writes


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


def put_files(fs: FileLayer, place: Place, files: Sequence[OpenImage], flow: Flow) -> bool:
    """Each file in the save's partial directory, data and names synced. False: the save is committed already."""
    if committed_at(fs, place) is not None:
        return False
    make_partial(fs, place)
    folders: set[str] = set()

    def write(open_image: OpenImage) -> None:
        with open_image() as image:
            folder = os.path.dirname(os.path.join(place.partial, image.name))
            if folder != place.partial and fs.mkdir(folder):
                sync_partial(fs, place)
            folders.add(folder)
            write_image(fs, place, image, flow)

    pool = ThreadPoolExecutor(max(1, min(len(files), _FILES_AT_ONCE)))
    try:
        for _ in pool.map(write, files):
            pass
    finally:
        pool.shutdown(cancel_futures=True)
    for folder in folders or {place.partial}:
        fs.fsync_dir(folder)
    return True


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
