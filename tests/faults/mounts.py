"""File systems of our own for a test, unmounted however it ends."""

import contextlib
import importlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Self

import pytest

_may_mount = os.geteuid() == 0 and shutil.which("mount") is not None
needs_root = pytest.mark.skipif(not _may_mount, reason="mounting a file system needs root")


@contextlib.contextmanager
def mounted(where: str, *words: str) -> Iterator[str]:
    """mount(8) with these words on a directory that exists."""
    done = subprocess.run(["mount", *words, where], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"cannot mount here: {done.stderr.strip()}")
    try:
        yield where
    finally:
        unmount(where)


def unmount(where: str) -> None:
    """Takes the mount away even while it is in use or hangs."""
    subprocess.run(["umount", "-l", where], check=False, capture_output=True)
    with open("/proc/self/mounts", encoding="utf-8") as file:
        assert where not in file.read(), f"{where} is still mounted"


_PASSTHROUGH = '''
import errno, fcntl, os, sys
import mfusepy

class Passthrough(mfusepy.Operations):
    use_ns = True
    ahead_ns = 0  # of the clock that dates its files

    def __init__(self, root):
        self.root = root

    def path(self, path):
        return self.root + path

    def getattr(self, path, fh=None):
        st = os.lstat(self.path(path))
        names = ("st_mode", "st_nlink", "st_size", "st_uid", "st_gid", "st_ino", "st_dev", "st_blocks")
        times = {f"st_{one}": getattr(st, f"st_{one}_ns") + self.ahead_ns for one in ("atime", "mtime", "ctime")}
        return {name: getattr(st, name) for name in names} | times

    def readdir(self, path, fh):
        return [".", "..", *os.listdir(self.path(path))]

    def statfs(self, path):
        st = os.statvfs(self.path(path))
        return {name: getattr(st, name) for name in ("f_bavail", "f_bfree", "f_blocks", "f_bsize", "f_frsize")}

    def readlink(self, path): return os.readlink(self.path(path))
    def mkdir(self, path, mode): os.mkdir(self.path(path), mode)
    def rmdir(self, path): os.rmdir(self.path(path))
    def unlink(self, path): os.unlink(self.path(path))
    def rename(self, old, new): os.rename(self.path(old), self.path(new))
    def link(self, target, source): os.link(self.path(source), self.path(target))
    def symlink(self, target, source): os.symlink(source, self.path(target))
    def chmod(self, path, mode): os.chmod(self.path(path), mode)
    def utimens(self, path, times=None): return 0
    def create(self, path, mode, fi=None): return os.open(self.path(path), os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)
    def open(self, path, flags): return os.open(self.path(path), flags & ~os.O_DIRECT & ~os.O_CREAT)
    def read(self, path, size, offset, fh): return os.pread(fh, size, offset)
    def write(self, path, data, offset, fh): return os.pwrite(fh, data, offset)
    def truncate(self, path, length, fh=None): os.truncate(self.path(path), length)
    def fsync(self, path, datasync, fh): os.fsync(fh)
    def fsyncdir(self, path, datasync, fh): return 0
    def flush(self, path, fh): return 0
    def release(self, path, fh): os.close(fh)



class Forwarding(Passthrough):
    """Opens with the flags that it is given, O_DIRECT too, and reads and writes from memory as it comes.

    Such memory is not aligned, so that no disk takes it. sticky: nor is read what is opened later without the flag.
    """

    def __init__(self, root, sticky):
        super().__init__(root)
        self.sticky = sticky
        self.refused = set()

    def _opened(self, path, flags, mode=0o666):
        fd = os.open(self.path(path), flags, mode)
        if self.sticky and flags & os.O_DIRECT:
            self.refused.add(os.fstat(fd).st_ino)
        return fd

    def _check(self, fd, refused=()):
        direct = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT
        if direct or os.fstat(fd).st_ino in refused:
            raise OSError(errno.EINVAL, "not aligned")

    def create(self, path, mode, fi):
        fi.fh = self._opened(path, fi.flags | os.O_CREAT, mode)
        return 0

    def open(self, path, fi):
        fi.fh = self._opened(path, fi.flags & ~os.O_CREAT)
        return 0

    def read(self, path, size, offset, fi):
        self._check(fi.fh, self.refused)
        return os.pread(fi.fh, size, offset)

    def write(self, path, data, offset, fi):
        self._check(fi.fh)
        return os.pwrite(fi.fh, data, offset)

    def fsync(self, path, datasync, fi): os.fsync(fi.fh)
    def release(self, path, fi): os.close(fi.fh)

if sys.argv[3] == "ahead":
    Passthrough.ahead_ns = 5 * 10**9
if sys.argv[3] in ("answering", "ahead"):
    mfusepy.FUSE(Passthrough(sys.argv[1]), sys.argv[2], foreground=True, nothreads=True)
else:
    forwarding = Forwarding(sys.argv[1], sys.argv[3] == "sticky")
    mfusepy.FUSE(forwarding, sys.argv[2], foreground=True, nothreads=True, raw_fi=True)
'''


def _why_no_fuse() -> str:
    if os.geteuid() != 0:
        return "mounting needs root"
    if not os.path.exists("/dev/fuse"):
        return "no /dev/fuse here"
    if shutil.which("fusermount3") is None and shutil.which("fusermount") is None:
        return "no libfuse here: apt install fuse3"
    try:
        importlib.import_module("mfusepy")
    except (ImportError, OSError, AttributeError) as error:
        return f"mfusepy cannot be used: {error}"
    return ""


needs_fuse = pytest.mark.skipif(bool(_why_no_fuse()), reason=_why_no_fuse() or "-")


class FuseStore:
    """A directory behind a FUSE process that can be made to answer nothing. A context that leaves no mount.

    kind: "forwarding" opens the files behind it with O_DIRECT when it is asked to, and then fails every read and write
    with EINVAL; "sticky" goes on to fail reads when a file is opened again without it. "ahead": its clock is 5 s ahead.
    """

    def __init__(self, base: str, kind: str = "answering") -> None:
        self._kind = kind
        self.behind, self.path = os.path.join(base, "behind"), os.path.join(base, "mount")
        for path in (self.behind, self.path):
            os.mkdir(path)
        self._log = os.path.join(base, "fuse.log")
        self._process: subprocess.Popen[bytes] | None = None

    def hang(self) -> None:
        """From here on every call into the mount waits."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """The calls that wait, and all later ones, are answered."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def __enter__(self) -> Self:
        with open(self._log, "wb") as log:
            words = [sys.executable, "-c", _PASSTHROUGH, self.behind, self.path, self._kind]
            self._process = subprocess.Popen(words, stdout=log, stderr=log)
        deadline = time.monotonic() + 10
        while not os.path.ismount(self.path):
            if self._process.poll() is not None or time.monotonic() > deadline:
                self._end()
                with open(self._log, encoding="utf-8") as log_text:
                    pytest.fail(f"FUSE did not mount: {log_text.read()}")
            time.sleep(0.01)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> None:
        """The process first: calls that hang in its mount then fail, and whoever made them can end."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(60)
        unmount(self.path)
