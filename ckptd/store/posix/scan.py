"""Paths of what a job has in a directory that is a store."""

import os

import msgspec

from ckptd.shared.base.ids import JobKey, SaveId, SetName
from ckptd.shared.format.committed_record import Committed
from ckptd.shared.format.manifest import LATEST
from ckptd.shared.format.set_places import SETS_DIR
from ckptd.shared.stores.directory import DirectoryFiles
from ckptd.store import scan as reading
from ckptd.store.facts import Scan
from ckptd.system.files import FileLayer


class Place(msgspec.Struct, frozen=True):
    """The paths of one save on its store."""

    key: JobKey
    save: SaveId
    hidden: str = ""  # name of the hidden directory, where it is not that of a save that nodes drain

    @property
    def job_dir(self) -> str:
        """Directory of the job: all its checkpoints."""
        return job_dir(self.key)

    @property
    def final(self) -> str:
        """Directory once committed."""
        return os.path.join(self.job_dir, self.save.dirname)

    @property
    def partial(self) -> str:
        """Hidden directory until the commit's rename."""
        return os.path.join(self.job_dir, self.hidden or self.save.partial_dirname)

    def set_dir(self, folder: SetName) -> str:
        """Directory of a redundancy set, in the hidden directory."""
        return os.path.join(self.partial, SETS_DIR, folder)


def files_at(fs: FileLayer, path: str) -> DirectoryFiles:
    """The checkpoint in a directory, read and proved as the layer does."""
    return DirectoryFiles(path, fs.integrity, fs)


def job_dir(key: JobKey) -> str:
    """Directory of a job's checkpoints."""
    return os.path.join(key.store, key.job)


def latest_name(fs: FileLayer, key: JobKey) -> str:
    """What `latest` leads to, in the job's directory; empty without one, or where it cannot be read."""
    try:
        return fs.readlink(os.path.join(job_dir(key), LATEST)).rstrip("/")
    except OSError:
        return ""


def of_job(fs: FileLayer, key: JobKey) -> DirectoryFiles:
    """The directory of a job, likewise."""
    return files_at(fs, job_dir(key))


def scan(fs: FileLayer, key: JobKey) -> Scan:
    """As ckptd.store.scan."""
    return reading.scan(of_job(fs, key))


def committed_at(fs: FileLayer, place: Place) -> Committed | None:
    """As ckptd.store.scan."""
    return reading.committed_at(of_job(fs, place.key), place.save)


def save_at(fs: FileLayer, key: JobKey, dirname: str) -> SaveId | None:
    """As ckptd.store.scan."""
    return reading.save_at(of_job(fs, key), dirname)
