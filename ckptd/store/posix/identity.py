"""The id of a store: an empty directory in its place (a missing mount, another disk) is not taken for it.

The id is made with the store's directory, in the file `.store-id`, and never changes. Arenas, settings and manifests
remember it. Without hard links the first maker is the one whose rename to the directory `.store-id.made` succeeds.
All functions block for as long as the file system does and raise OSError or CkptdError.
"""

import contextlib
import errno
import os
import secrets
from typing import Final

import msgspec

from ckptd.shared.base.decoding import MALFORMED
from ckptd.shared.base.errors import CkptdError, DamagedError
from ckptd.shared.base.ids import StoreId, is_job_name
from ckptd.shared.base.wording import cut
from ckptd.shared.files.mounts import Mount, mount_of, parse_mountinfo
from ckptd.shared.format.committed import identify
from ckptd.store.posix.scan import files_at
from ckptd.store.scan import names_of
from ckptd.system.files import FileLayer, temp_name

STORE_FILE: Final = ".store-id"
MADE_DIR: Final = ".store-id.made"
_MAX_NBYTES = 4096
_NOT_EMPTY = frozenset({errno.ENOTEMPTY, errno.EEXIST})
_VOLATILE = frozenset({"tmpfs", "ramfs"})


class StoreRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Content of `.store-id`."""

    format: int
    store_id: StoreId


_decoder = msgspec.json.Decoder(StoreRecord)


def store_id_at(fs: FileLayer, store: str) -> StoreId | None:
    """The store's id, None when it has none. Raises DamagedError for a record that is none."""
    path = os.path.join(store, STORE_FILE)
    try:
        return _decoder.decode(fs.read_file(path, _MAX_NBYTES)).store_id
    except FileNotFoundError:
        return None
    except MALFORMED as error:
        raise DamagedError(
            f"{path}: {cut(error)}", hint="restore the file: the manifests of its jobs have the id"
        ) from error


def make_store(fs: FileLayer, store: str, store_id: StoreId | None) -> tuple[StoreId, list[str]]:
    """The id that is on the disk when this returns; store_id: known already, though its record may be lost.

    Makes the store's directory when only that is missing: a parent that is missing too is more likely not mounted.
    """
    there = store_id_at(fs, store) if store_id is not None else None
    if there is not None:
        return there, []
    if fs.mkdir(store):
        fs.fsync_dir(os.path.dirname(store))
    record = StoreRecord(format=1, store_id=store_id or secrets.token_hex(16))
    path = os.path.join(store, STORE_FILE)
    data = msgspec.json.encode(record) + b"\n"
    temp = fs.write_temp(path, data)
    if fs.try_link(temp, path) is None:
        fs.unlink(temp)
        data = data if store_id is not None else _first_made(fs, store, data)
        if store_id_at(fs, store) is None:
            fs.rename(fs.write_temp(path, data), path)
    fs.fsync_dir(store)
    lost = (
        f"{path} was lost: it is written again, with the store id that the checkpoints there have" if store_id else ""
    )
    warning = lost or (_volatile(store) if store_id is None else "")
    return store_id_at(fs, store) or record.store_id, [warning] if warning else []


def _first_made(fs: FileLayer, store: str, data: bytes) -> bytes:
    """The record of the process that was first to make one, durable: this one, or another one, killed or not."""
    made = os.path.join(store, MADE_DIR)
    temp = temp_name(made)
    fs.mkdir(temp)
    path = os.path.join(temp, STORE_FILE)
    fs.rename(fs.write_temp(path, data), path)
    fs.fsync_dir(temp)
    try:
        fs.rename(temp, made)
    except OSError as error:
        if error.errno not in _NOT_EMPTY:
            raise
        fs.rmtree(temp)
    fs.fsync_dir(store)
    return fs.read_file(os.path.join(made, STORE_FILE), _MAX_NBYTES)


def id_on_store(fs: FileLayer, store: str, job: str) -> StoreId | None:
    """The id that checkpoints have: those of the job, else of the first other job that has one that can be read."""
    if (found := _id_in_manifests(fs, store, job)) is not None:
        return found
    try:
        names = fs.listdir(store)
    except FileNotFoundError:
        return None
    for name in names:
        with contextlib.suppress(OSError):  # not a job's, or not this user's
            if name != job and is_job_name(name) and (found := _id_in_manifests(fs, store, name)) is not None:
                return found
    return None


def _id_in_manifests(fs: FileLayer, store: str, job: str) -> StoreId | None:
    """The id in the newest checkpoint of the job that can be read."""
    directory = os.path.join(store, job)
    for name in names_of(files_at(fs, directory)):
        try:
            return identify(files_at(fs, os.path.join(directory, name)), job=job).store_id
        except (OSError, CkptdError):
            continue
    return None


def _volatile(store: str) -> str:
    """What is to be said of a new store that may be no parallel file system at all, empty for any other."""
    mount = _mount(store)
    if mount is None or not (mount.point == "/" or mount.fs_type in _VOLATILE):
        return ""
    in_memory = mount.fs_type in _VOLATILE
    lies, lost = ("in this node's memory", "a reboot") if in_memory else ("on this node's own disk", "the node")
    return (
        f"warning: the new store {store} lies {lies}, {where(store)}: what is durable there is lost with {lost}; "
        "is the parallel file system mounted?"
    )


def _mount(store: str) -> Mount | None:
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
            mounts = parse_mountinfo(file.read())
    except OSError:
        return None
    return mount_of(os.path.realpath(store), mounts)


def where(store: str) -> str:
    """The mount that the path lies on, for people."""
    mount = _mount(store)
    return f"{mount.source} ({mount.fs_type}, mounted at {mount.point})" if mount is not None else "no known mount"
