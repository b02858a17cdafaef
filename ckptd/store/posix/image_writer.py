"""Images to files of an unfinished checkpoint: large aligned writes past the page cache, some at once, one sync."""

import contextlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

from ckptd.shared.base.ids import SetName
from ckptd.shared.format.slot import align_up
from ckptd.store.image import Flow, Image
from ckptd.store.interface import OpenImage
from ckptd.store.posix.scan import Place, committed_at
from ckptd.system import failpoints
from ckptd.system.files import FileLayer, is_temp, temp_name

CHUNK_NBYTES = 16 << 20  # of one write
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
