"""Which directories have symbolic links to a checkpoint's files: it stays while one of them does."""

import contextlib
import os

import msgspec

from ckptd.shared.base.decoding import MALFORMED
from ckptd.shared.base.errors import DamagedError
from ckptd.shared.base.ids import JobKey, StorePath
from ckptd.shared.base.wording import cut
from ckptd.shared.format.manifest import LINKED, STOCK_METADATA
from ckptd.store.posix.scan import files_at, job_dir
from ckptd.store.trainer_files import read_index, sources_of
from ckptd.system.files import FileLayer

_MAX_LINKED_NBYTES = 1 << 20
_MAX_LINKED = 64  # directories


class Linked(msgspec.Struct, frozen=True):
    """Content of `LINKED`: directories that have symbolic links to the checkpoint's files. They are only read."""

    directories: list[StorePath]


_linked_decoder = msgspec.json.Decoder(Linked)


def is_linked_to(fs: FileLayer, key: JobKey, dirname: str) -> bool:
    """Whether a trainer finds the checkpoint's files by symbolic links, which without it would lead nowhere.

    Believes the checkpoint's own record of where they are: a user who forges it keeps that one checkpoint from removal.
    """
    path = os.path.join(job_dir(key), dirname)
    try:
        found = _linked(fs, path)
        sources = sources_of(path, read_index(files_at(fs, path)))
    except FileNotFoundError:  # of a state
        sources = {STOCK_METADATA: os.path.join(path, STOCK_METADATA)}
    except (OSError, DamagedError):  # or a hard link, as all others are then
        return False
    for directory in found:
        for name, source in sources.items():
            with contextlib.suppress(OSError):  # the trainer has removed it
                if fs.below(None).readlink(os.path.join(directory, name)) == source:
                    return True
    return False


def _linked(fs: FileLayer, path: str) -> list[str]:
    where = os.path.join(path, LINKED)
    try:
        return _linked_decoder.decode(fs.read_file(where, _MAX_LINKED_NBYTES)).directories[:_MAX_LINKED]
    except FileNotFoundError:
        return []
    except MALFORMED as error:
        raise DamagedError(f"{where}: {cut(error)}") from error


def remember_links(fs: FileLayer, path: str, directory: str) -> None:
    """Before the first one is made: a checkpoint that is removed takes what they lead to with it."""
    known = []
    with contextlib.suppress(DamagedError):
        known = _linked(fs, path)
    if directory not in known:
        raw = msgspec.json.encode(Linked([*known, directory][-_MAX_LINKED:]))
        fs.rename(fs.write_temp(os.path.join(path, LINKED), raw), os.path.join(path, LINKED))
        fs.fsync_dir(path)
