"""Which directories have symbolic links to a checkpoint's files: it stays while one of them does.

Each directory has a record of its own, whose name follows from the directory: daemons and runs that record links at the
same time change nothing of each other's.
"""

import contextlib
import hashlib
import os

import msgspec

from ckptd.shared.base.decoding import decoded
from ckptd.shared.base.errors import DamagedError
from ckptd.shared.base.ids import JobKey, StorePath
from ckptd.shared.format.manifest import LINKED, STOCK_METADATA
from ckptd.store.posix.scan import files_at, job_dir
from ckptd.store.trainer_files import read_index, sources_of
from ckptd.system.files import FileLayer, is_temp

_MAX_LINKED = 64  # directories
_MAX_NBYTES = 1 << 20  # of all records


class Linked(msgspec.Struct, frozen=True):
    """Content of a record in `LINKED`: a directory with symbolic links to the checkpoint's files. It is only read."""

    directory: StorePath


_decoder = msgspec.json.Decoder(Linked)


def is_linked_to(fs: FileLayer, key: JobKey, dirname: str) -> bool:
    """Whether a trainer finds the checkpoint's files by symbolic links, which without it would lead nowhere.

    Believes the checkpoint's own record of where they are: a user who forges it keeps that one checkpoint from removal.
    Raises OSError or DamagedError where that cannot be read, or is more than is read.
    """
    path = os.path.join(job_dir(key), dirname)
    directories = _directories(fs, os.path.join(path, LINKED))
    if not directories:
        return False
    try:
        sources = sources_of(path, read_index(files_at(fs, path)))
    except FileNotFoundError:  # of a state
        sources = {STOCK_METADATA: os.path.join(path, STOCK_METADATA)}
    except DamagedError as error:
        raise _unreadable(os.path.join(path, LINKED), error.message) from error
    for directory in directories:
        for name, source in sources.items():
            with contextlib.suppress(OSError):  # the trainer has removed it
                if fs.below(None).readlink(os.path.join(directory, name)) == source:
                    return True
    return False


def _directories(fs: FileLayer, folder: str) -> list[str]:
    found: list[str] = []
    left = _MAX_NBYTES
    for name in _records(fs, folder):
        record = os.path.join(folder, name)
        try:
            raw = fs.read_file(record, left)
        except FileNotFoundError:
            continue
        left -= len(raw)
        try:
            found.append(decoded(_decoder.decode, raw, record).directory)
        except DamagedError as error:
            raise _unreadable(folder, error.message) from error
    return found


def _records(fs: FileLayer, folder: str) -> list[str]:
    try:
        names = [name for name in fs.listdir(folder) if not is_temp(name)]
    except FileNotFoundError:
        return []
    except NotADirectoryError:
        raise _unreadable(folder, f"{folder}: is a file, of an earlier version; this program reads a folder") from None
    if len(names) > _MAX_LINKED:
        raise _unreadable(folder, f"{folder}: has {len(names)} records, this program reads {_MAX_LINKED}")
    return names


def _unreadable(folder: str, what: str) -> DamagedError:
    text = f"{what}; a trainer's directory may have links to the checkpoint, so it stays"
    return DamagedError(text, hint=f"if none has: rm -r {folder}")


def remember_links(fs: FileLayer, path: str, directory: str) -> None:
    """Before the first one is made: a checkpoint that is removed takes what they lead to with it. Raises OSError."""
    folder = os.path.join(path, LINKED)
    record = os.path.join(folder, hashlib.sha256(os.fsencode(directory)).hexdigest()[:32])
    fs.mkdir(folder)
    fs.rename(fs.write_temp(record, msgspec.json.encode(Linked(directory))), record)
    for changed in (folder, path):  # also of a process that was killed before it synced them
        fs.fsync_dir(changed)
