"""A job's records as files of its directory."""

import os

from ckptd.shared.base.ids import JobKey
from ckptd.shared.format.stored_files import StoredFiles
from ckptd.store.posix.scan import job_dir, of_job
from ckptd.system.files import FileLayer


class PosixRecords:
    """Makes the job's directory if it is missing, the store's never."""

    def __init__(self, fs: FileLayer, key: JobKey) -> None:
        self._fs, self._key = fs, key
        self.files: StoredFiles = of_job(fs, key)

    def put(self, name: str, data: bytes, *, new: bool = False) -> bool:
        """As JobRecords."""
        fs, path = self._fs, self.files.where(name)
        folder = os.path.dirname(path)
        fs.mkdir(job_dir(self._key))
        fs.mkdir(folder)
        temp = fs.write_temp(path, data)
        done = fs.publish_once(temp, path) if new else True
        if not new:
            fs.rename(temp, path)
        for directory in (folder, job_dir(self._key), self._key.store):  # also of a record whose maker died before this
            fs.fsync_dir(directory)
        return done

    def drop(self, name: str) -> bool:
        """As JobRecords."""
        path = self.files.where(name)
        try:
            self._fs.unlink(path)
        except FileNotFoundError:
            return False
        self._fs.fsync_dir(os.path.dirname(path))
        return True
