"""A committed checkpoint made again, with less in it: another directory is written and takes its name.

Until then the committed one stays as it is; a crash at any step leaves one of the two under the name, or the whole one
aside, which the next sweep of the job puts back (``removal.restore_whole``).
"""

import contextlib
import os

from ckptd.shared.base.ids import JobKey, SaveId
from ckptd.shared.format.manifest import COMMITTED
from ckptd.store.posix.commit import write_records
from ckptd.store.posix.removal import remove_partial, restore_whole, whole_name
from ckptd.store.posix.scan import Place
from ckptd.system import failpoints
from ckptd.system.files import FileLayer


def begin_again(fs: FileLayer, key: JobKey, save: SaveId) -> str:
    """The directory of a new unfinished checkpoint beside the committed one, empty."""
    place = Place(key, save)
    remove_partial(fs, key, save)
    if fs.mkdir(place.partial):
        fs.fsync_dir(place.job_dir)
    return place.partial


def take_its_place(fs: FileLayer, key: JobKey, save: SaveId, writer: str) -> None:
    """The unfinished checkpoint, whose files and votes are there, gets the name of the committed one, which goes.

    Raises what commit raises; then the committed one is as it was.
    """
    place = Place(key, save)
    committed_s = fs.mtime(os.path.join(place.final, COMMITTED))
    write_records(fs, place, writer)
    fs.set_mtime(os.path.join(place.partial, COMMITTED), committed_s)  # it is what people see as its age
    aside = os.path.join(place.job_dir, whole_name(save))
    failpoints.reach("drop.before-aside")
    fs.rename(place.final, aside)
    try:
        fs.fsync_dir(place.job_dir)
        failpoints.reach("drop.after-aside")
        fs.rename(place.partial, place.final)
    except OSError:
        with contextlib.suppress(FileNotFoundError):  # a daemon's sweep has put it back
            fs.rename(aside, place.final)
        raise
    fs.fsync_dir(place.job_dir)
    failpoints.reach("drop.after-rename")
    restore_whole(fs, key, os.path.basename(aside))
