"""The sequences that remove what a job has on the store: by a rename first, so that nothing half removed is offered.

Each is safe to repeat and harmless when two processes, on one node or two, run it at once. All block for as long as the
file system does and raise OSError or CkptdError.
"""

import contextlib
import os
import secrets
import time
from types import MappingProxyType

from ckptd.shared.base.errors import CkptdError, DamagedError
from ckptd.shared.base.ids import JobKey, SaveId, parse_dirname
from ckptd.shared.format.committed import TRASH_PREFIX
from ckptd.shared.format.manifest import COMMITTED, LATEST
from ckptd.shared.protocol.publication import Intents
from ckptd.store.numbers import forget_superseded
from ckptd.store.posix.commit import set_latest
from ckptd.store.posix.links import is_linked_to
from ckptd.store.posix.publish import publish
from ckptd.store.posix.records import PosixRecords
from ckptd.store.posix.scan import Place, committed_at, job_dir, latest_name, of_job, scan
from ckptd.store.scan import pinned
from ckptd.system import failpoints
from ckptd.system.files import FileLayer, is_temp

WHOLE_PREFIX = ".whole-"
LESS_PREFIX = ".less-"  # of a directory that is to take a checkpoint's place; no scan knows it
_LEFT_S = 24 * 3600.0  # nobody has written to it for so long: its writer was killed


def remove_checkpoint(fs: FileLayer, key: JobKey, save: SaveId, intents: Intents = MappingProxyType({})) -> bool:
    """Whether the committed checkpoint is gone: not if it is pinned, or a trainer's directory has links to its files.

    Raises CkptdError for the newest, and for one whose files cannot be published: it stays. Raises DamagedError for
    what is no valid checkpoint, and when another run's has its name.
    """
    if save.dirname in pinned(of_job(fs, key)):
        return False
    if committed_at(fs, Place(key, save)) is None:
        return True
    restore_whole(fs, key, whole_name(save))  # what a crash left of it goes too, or it would come back
    note = publish(fs, key, save, intents)  # what could not be at its commit
    if note:
        raise CkptdError(f"{note}: it stays until it is", hint="see what is in the way there")
    if is_linked_to(fs, key, save.dirname):
        return False
    entries = scan(fs, key).committed
    if save not in (entry.committed.save for entry in entries):
        if committed_at(fs, Place(key, save)) is None:
            return True
        raise DamagedError(
            f"{Place(key, save).final}: not a valid checkpoint", hint=f"see: ckptd verify {job_dir(key)}"
        )
    newest = entries[0].committed.save
    if save == newest:
        raise CkptdError(
            f"{Place(key, save).final}: is the newest committed checkpoint of job {key.job!r} and is not removed",
            hint="commit a newer one first",
        )
    # The newer one's rename must be on the disk before this one's: another node may have made it a moment ago.
    fs.fsync_dir(job_dir(key))
    note = set_latest(fs, Place(key, newest))
    if note and latest_name(fs, key) == save.dirname:
        raise CkptdError(f"{Place(key, save).final} stays: {note}", hint="free space on the store, or raise the quota")
    failpoints.reach("remove.before-rename")
    trash = _to_trash(fs, Place(key, save).final)
    if trash is not None and save.dirname in pinned(of_job(fs, key)):  # somebody pinned it since we looked
        fs.rename(trash, Place(key, save).final)
        return False
    forget_superseded(PosixRecords(fs, key), save.dirname)
    _empty(fs, trash)
    return True


def remove_partial(fs: FileLayer, key: JobKey, save: SaveId) -> None:
    """The unfinished checkpoint removed, also under a late writer, which gets ENOENT. Never a committed one."""
    discard(fs, Place(key, save).partial)


def discard(fs: FileLayer, path: str) -> None:
    """A directory removed that no reader may have found, also under its writer, which gets ENOENT."""
    _empty(fs, _to_trash(fs, path))


def whole_name(save: SaveId) -> str:
    """Of a checkpoint while another directory takes its name, or it is committed again."""
    return f"{WHOLE_PREFIX}{save.dirname}"


def restore_whole(fs: FileLayer, key: JobKey, name: str) -> None:
    """What a crash left aside gets its own name back, unless another directory has it: then it is removed."""
    aside, final = os.path.join(job_dir(key), name), os.path.join(job_dir(key), name.removeprefix(WHOLE_PREFIX))
    if COMMITTED in _names(fs, final):
        trash = _to_trash(fs, aside)
        if trash is not None and COMMITTED not in _names(fs, final):  # it went aside since we looked: this is the last
            fs.rename(trash, final)
            return
        _empty(fs, trash)
    elif parse_dirname(os.path.basename(final)) is not None:
        fs.rename(aside, final)
        fs.fsync_dir(job_dir(key))


def _names(fs: FileLayer, path: str) -> list[str]:
    try:
        return fs.listdir(path)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _to_trash(fs: FileLayer, path: str) -> str | None:
    """Where it lies now; None when there was nothing."""
    head, name = os.path.split(path)
    trash = os.path.join(head, f"{TRASH_PREFIX}{name.lstrip('.')}-{secrets.token_hex(6)}")
    try:
        fs.rename(path, trash)
    except FileNotFoundError:
        return None
    failpoints.reach("remove.after-rename")
    return trash


def _empty(fs: FileLayer, trash: str | None) -> None:
    """COMMITTED goes first, and is gone for good before anything else goes: what is half removed is no checkpoint."""
    if trash is None:
        return
    fs.fsync_dir(os.path.dirname(trash))  # else a crash could bring the old name back over half of the files
    if _is_link(fs, trash):
        fs.unlink(trash)  # and nothing of what it leads to
        return
    try:
        fs.unlink(os.path.join(trash, COMMITTED))
    except (FileNotFoundError, NotADirectoryError):
        pass  # of an unfinished one; or another process empties it too, and may not have synced that
    except IsADirectoryError:
        fs.rmtree(os.path.join(trash, COMMITTED))  # nobody takes that for one
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        fs.fsync_dir(trash)
    failpoints.reach("remove.after-committed")
    fs.rmtree(trash)


def _is_link(fs: FileLayer, path: str) -> bool:
    try:
        fs.readlink(path)
    except OSError:
        return False
    return True


def sweep_trash(fs: FileLayer, key: JobKey, *, links: bool = True) -> int:
    """Leftovers that earlier removals left in the job's directory removed; how many.

    links: and those of a crashed process, where nobody may be making one now.
    What cannot be removed (over NFS, a file that somebody reads) keeps nothing else, and is tried again the next time.
    """
    try:
        names = fs.listdir(job_dir(key))
    except FileNotFoundError:
        return 0
    swept = 0
    for name in names:
        with contextlib.suppress(OSError):
            if name.startswith(WHOLE_PREFIX):
                restore_whole(fs, key, name)
            elif name.startswith(LESS_PREFIX):
                path = os.path.join(job_dir(key), name)
                if time.time() - fs.mtime(path) < _LEFT_S:
                    continue
                discard(fs, path)
            elif name.startswith(TRASH_PREFIX):
                _empty(fs, os.path.join(job_dir(key), name))  # the rename to the trash may still be unsynced
            elif links and is_temp(name, LATEST):
                fs.rmtree(os.path.join(job_dir(key), name))
            else:
                continue
            swept += 1
    return swept
