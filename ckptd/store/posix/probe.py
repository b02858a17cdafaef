"""What ckptd does to a directory that is a store, tried with real files: syncs, a rename, O_DIRECT, a sample."""

import contextlib
import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from ckptd.shared.files.mounts import mount_of, parse_mountinfo
from ckptd.shared.files.regular import open_direct, read_pages
from ckptd.shared.format.integrity import XXH3
from ckptd.system.files import FileLayer

_SYNCS = 5  # odd: the one in the middle is the median
_CHUNK_NBYTES = 16 << 20
SAMPLE_NBYTES = 64 << 20
_SAMPLE_MAX_S = 5.0
_TICK_S = 0.02  # a file may bear the time of the last tick of the kernel's clock
_PREFIX = ".ckptd-doctor-"


def probe(path: str) -> Iterator[dict[str, object]]:
    """As Store.probe. Leaves no file behind, unless it is killed: then its hidden directory names itself."""
    yield {"doing": "opening the directory"}
    missing = _missing(path)
    yield {"missing": missing}
    if missing == path:  # ckptd makes the store itself, so what counts is the directory above it
        path = os.path.dirname(path)
    try:
        scratch = tempfile.mkdtemp(prefix=_PREFIX, dir=path)
    except OSError as error:
        yield {"error": error.strerror or str(error)}
        return
    try:
        yield {"doing": "reading free space"}
        yield _kind(path) | {"free_nbytes": _free_nbytes(path)}
        yield {"doing": f"syncing a small file in {scratch}"}
        yield {"fsync_s": _median_sync_s(scratch)}
        yield {"ahead_s": _ahead_s(scratch)}
        yield {"doing": f"renaming in {scratch}"}
        yield {"rename_error": _outcome(_rename, scratch)}
        yield {"doing": f"writing with O_DIRECT in {scratch}"}
        direct_error = _outcome(_write_directly, scratch)
        yield {"direct_error": direct_error}
        yield {"doing": f"reading back in {scratch}"}
        yield {"read_error": _outcome(_read_back, scratch)}
        yield {"doing": f"writing a sample in {scratch}"}
        nbytes, seconds = _write_sample(scratch, direct=not direct_error)
        yield {"sample_nbytes": nbytes, "sample_s": seconds}
    except OSError as error:
        yield {"error": error.strerror or str(error)}
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    yield {"finished": True}


def _missing(path: str) -> str:
    """The topmost directory of path that is not there, "" if path is."""
    missing = ""
    while not os.path.lexists(path):
        missing, path = path, os.path.dirname(path)
    return missing


def _kind(path: str) -> dict[str, object]:
    with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as file:
        mount = mount_of(os.path.realpath(path), parse_mountinfo(file.read()))
    return {"fs_type": mount.fs_type.removeprefix("fuse."), "on_root": mount.point == "/"} if mount else {}


def _free_nbytes(path: str) -> int:
    stat = os.statvfs(path)
    return stat.f_bavail * stat.f_frsize


def _outcome(attempt: Any, scratch: str) -> str:
    """What the attempt ran into, "" when it went well."""
    try:
        attempt(scratch)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _median_sync_s(scratch: str) -> float:
    seconds = []
    with _opened(os.path.join(scratch, "sync"), 0) as fd:
        for _ in range(_SYNCS):
            os.pwrite(fd, os.urandom(512), 0)
            start = time.monotonic()
            os.fsync(fd)
            seconds.append(time.monotonic() - start)
    return sorted(seconds)[_SYNCS // 2]


def _ahead_s(scratch: str) -> float:
    """How far the clock that dates files is ahead of this node's: what the time of the write cannot explain."""
    path = os.path.join(scratch, "dated")
    before = time.time() - _TICK_S
    with _opened(path, 0) as fd:
        os.pwrite(fd, b"x", 0)
        os.fsync(fd)
    dated, after = os.stat(path).st_mtime, time.time()
    return round(max(0.0, dated - after) + min(0.0, dated - before), 3)


def _rename(scratch: str) -> None:
    """A directory renamed and made durable, as a commit does it."""
    before, after = os.path.join(scratch, "partial"), os.path.join(scratch, "final")
    os.mkdir(before)
    os.rename(before, after)
    fd = os.open(scratch, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _write_directly(scratch: str) -> None:
    """One aligned page past the page cache, read back: some file systems take the flag and fail the write."""
    with _opened(os.path.join(scratch, "direct"), os.O_DIRECT) as fd, mmap.mmap(-1, mmap.PAGESIZE) as page:
        page[:] = b"\xa5" * mmap.PAGESIZE
        if os.pwrite(fd, page, 0) != mmap.PAGESIZE:
            raise OSError("short write")
        page[:] = bytes(mmap.PAGESIZE)
        if os.preadv(fd, [page], 0) != mmap.PAGESIZE or page[:] != b"\xa5" * mmap.PAGESIZE:
            raise OSError("read back something else")


def _read_back(scratch: str) -> None:
    """A file that ends inside a page, written as a drain does it and read as a restore does."""
    fs, path, nbytes = FileLayer(integrity=XXH3), os.path.join(scratch, "back"), 2 * mmap.PAGESIZE + 17
    pages = mmap.mmap(-1, 3 * mmap.PAGESIZE)  # closed by nobody: an error keeps views of it
    pages[:nbytes] = data = os.urandom(nbytes)
    fd = fs.open_write(path, direct=True)
    try:
        fs.pwrite(fd, memoryview(pages), 0)
        fs.truncate(fd, nbytes)
        fs.fsync(fd)
    finally:
        fs.close(fd)
    pages[:] = bytes(len(pages))
    fd = open_direct(path)
    try:
        found = read_pages(fd, memoryview(pages), 0, nbytes)
    finally:
        os.close(fd)
    if found != nbytes or pages[:nbytes] != data:
        raise OSError("something else is read than was written")


def _write_sample(scratch: str, *, direct: bool) -> tuple[int, float]:
    """(bytes, seconds) of large writes and their sync; stops early where the store is slow."""
    flags = os.O_DIRECT if direct else 0
    with _opened(os.path.join(scratch, "sample"), flags) as fd, mmap.mmap(-1, _CHUNK_NBYTES) as chunk:
        chunk[:] = os.urandom(1 << 20) * (_CHUNK_NBYTES >> 20)
        start = time.monotonic()
        nbytes = 0
        while nbytes < SAMPLE_NBYTES and time.monotonic() - start < _SAMPLE_MAX_S:
            nbytes += os.pwrite(fd, chunk, nbytes)
        os.fsync(fd)
        return nbytes, time.monotonic() - start


@contextlib.contextmanager
def _opened(path: str, flags: int) -> Iterator[int]:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | flags, 0o600)
    try:
        yield fd
    finally:
        os.close(fd)
