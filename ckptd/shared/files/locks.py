"""POSIX record locks: their holders, and taking one. They end with their process and are not inherited by fork.

A process loses its lock when it closes *any* descriptor of the file: never open a file again that this process locks.
"""

import errno
import fcntl
import os
import struct

_FLOCK = struct.Struct("hhqqi4x")  # l_type, l_whence, l_start, l_len, l_pid on 64-bit Linux


def holder(path: str) -> int | None:
    """Pid that holds a record lock on path, 0 when it is outside our pid namespace, None when nobody does."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        answer = fcntl.fcntl(fd, fcntl.F_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
    finally:
        os.close(fd)
    kind, _, _, _, pid = _FLOCK.unpack(answer)
    return None if kind == fcntl.F_UNLCK else max(pid, 0)


def take(path: str) -> int | None:
    """Descriptor that holds the exclusive lock on path (made if missing, mode 0600), None when another has it."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(fd, path):
                return fd
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                os.close(fd)
                raise
            os.close(fd)
            return None
        os.close(fd)  # its holder removed the file before it closed it


def _is_at(fd: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False
