"""Which directories have symbolic links to a checkpoint's files: it stays while one of them does.

Each directory has a record of its own, whose name follows from the directory: daemons and runs that record links at the
same time change nothing of each other's.
"""

import contextlib
import hashlib
import os
from collections.abc import Iterator

import msgspec

from ckptd.shared.base.decoding import MALFORMED
from ckptd.shared.base.errors import DamagedError
from ckptd.shared.base.ids import JobKey, StorePath
from ckptd.shared.format.manifest import LINKED, STOCK_METADATA
from ckptd.store.posix.scan import files_at, job_dir
from ckptd.store.trainer_files import read_index, sources_of
from ckptd.system.files import FileLayer, is_temp

_MAX_NBYTES = 1 << 16


class Linked(msgspec.Struct, frozen=True):
    """Content of a record in `LINKED`: a directory with symbolic links to the checkpoint's files. It is only read."""

    directory: StorePath


_decoder = msgspec.json.Decoder(Linked)


def is_linked_to(fs: FileLayer, key: JobKey, dirname: str) -> bool:
    """Whether a trainer finds the checkpoint's files by symbolic links, which without it would lead nowhere.

    Believes the checkpoint's own record of where they are: a user who forges it keeps that one checkpoint from removal.
    Raises OSError where that cannot be read.
    """
    path = os.path.join(job_dir(key), dirname)
    directories = list(_directories(fs, path))
    if not directories:
        return False
    try:
        sources = sources_of(path, read_index(files_at(fs, path)))
    except FileNotFoundError:  # of a state
        sources = {STOCK_METADATA: os.path.join(path, STOCK_METADATA)}
    except DamagedError:  # no daemon publishes it
        return False
    for directory in directories:
        for name, source in sources.items():
            with contextlib.suppress(OSError):  # the trainer has removed it
                if fs.below(None).readlink(os.path.join(directory, name)) == source:
                    return True
    return False


def _directories(fs: FileLayer, path: str) -> Iterator[str]:
    folder = os.path.join(path, LINKED)
    try:
        names = fs.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return
    for name in names:
        if not is_temp(name):
            with contextlib.suppress(FileNotFoundError, *MALFORMED):
                yield _decoder.decode(fs.read_file(os.path.join(folder, name), _MAX_NBYTES)).directory


def remember_links(fs: FileLayer, path: str, directory: str) -> None:
    """Before the first one is made: a checkpoint that is removed takes what they lead to with it. Raises OSError."""
    folder = os.path.join(path, LINKED)
    record = os.path.join(folder, hashlib.sha256(os.fsencode(directory)).hexdigest()[:32])
    fs.mkdir(folder)
    fs.rename(fs.write_temp(record, msgspec.json.encode(Linked(directory))), record)
    for changed in (folder, path):  # also of a process that was killed before it synced them
        fs.fsync_dir(changed)
