"""A directory of the trainer's own, in which its tools find a checkpoint that lies in ckptd's store.

They find links there, one for each file: hard ones where the file system has them, so that each side's retention is its
own, and the bytes are gone when the trainer has removed its directory and ckptd its checkpoint; else symbolic ones,
which end with the checkpoint. MARKER says from the beginning which checkpoint that will be; `.metadata`, without which
nothing of torch.distributed.checkpoint reads the directory, comes last.
"""

import contextlib
import functools
import logging
import os
import uuid
from collections.abc import Callable, Iterable
from functools import partial

import msgspec

from ckptd.shared.files.regular import NO_LINKS
from ckptd.shared.format.manifest import STOCK_METADATA, STOCK_OBJECTS
from ckptd.shared.format.origin import MARKER, Origin
from ckptd_client.integrations._kit.durable import Durable

log = logging.getLogger("ckptd_client")


def promise(directory: str, origin: Origin) -> None:
    """To be called before anything is staged: from here on the directory is no other checkpoint. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(directory, STOCK_METADATA))
    put(directory, MARKER, msgspec.json.encode(origin))
    sync(directory)


def put(directory: str, name: str, content: bytes) -> None:
    """Writes a small file, whole; the directory is to be synced by the caller. Raises OSError."""
    _replace(directory, name, partial(_write, content))


def origin_of(directory: str | os.PathLike[str]) -> Origin | None:
    """What was promised of the directory, None when nothing was, or nothing that can be read, or that names no save.

    None also when something else was saved over it: what is listed there is not what the checkpoint lists.
    """
    try:
        with open(os.path.join(directory, MARKER), "rb") as file:
            origin = msgspec.json.decode(file.read(), type=Origin)
    except (OSError, msgspec.MsgspecError):
        return None
    return origin if origin.is_sound and not _is_listed_otherwise(directory, origin) else None


def _is_listed_otherwise(directory: str | os.PathLike[str], origin: Origin) -> bool:
    try:
        there = os.stat(os.path.join(directory, STOCK_METADATA))
        return not os.path.samestat(there, os.stat(os.path.join(origin.path, STOCK_METADATA)))
    except OSError:
        return False  # nothing is listed yet; or the checkpoint itself is gone, and cannot be taken for what is there


def link_images(directory: str, found: Durable, rank: int | None = None) -> None:
    """Links the images of a rank, or of all. Raises OSError."""
    prefix = "r" if rank is None else f"r{rank:05d}-"
    origin = found.origin
    _link(
        directory, origin, (n for n in os.listdir(origin.path) if n.startswith(prefix) and n.endswith(".safetensors"))
    )
    sync(directory)


def link_listing(directory: str, found: Durable, *, synced: Iterable[str] = ()) -> None:
    """Links what lists the images: from here on the directory can be read. synced: files that must be on disk before.

    Raises OSError.
    """
    origin = found.origin
    for name in synced:
        sync(os.path.join(directory, name))
    _link(directory, origin, (name for name in (STOCK_OBJECTS,) if os.path.exists(os.path.join(origin.path, name))))
    sync(directory)
    _link(directory, origin, (STOCK_METADATA,))
    sync(directory)


def sync(path: str) -> None:
    """A file, or a directory's entries, to the medium. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _link(directory: str, origin: Origin, names: Iterable[str]) -> None:
    for name in names:
        _replace(directory, name, partial(_second_name, os.path.join(origin.path, name)))


def _second_name(source: str, temp: str) -> None:
    try:
        os.link(source, temp)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        os.symlink(source, temp)
        _warn(os.path.dirname(os.path.dirname(source)))


@functools.cache
def _warn(job: str) -> None:
    log.warning("ckptd: checkpoints have links into %s, which end when ckptd's retention (keep_last) removes them", job)


def _replace(directory: str, name: str, make: Callable[[str], None]) -> None:
    temp = os.path.join(directory, f".{name}.tmp-{uuid.uuid4().hex}")
    make(temp)
    os.replace(temp, os.path.join(directory, name))
    with contextlib.suppress(FileNotFoundError):  # of two names of one file rename(2) keeps both
        os.unlink(temp)


def _write(content: bytes, path: str) -> None:
    with open(path, "xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
