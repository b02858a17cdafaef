"""A latch that this process holds: any process of the user can wait until it is opened, or until its holder ends."""

import fcntl
import os
import threading


class Latch:
    """Closed until open. What waits for it needs two numbers only, so they go into a fork and through a pickle.

    It is a record lock on a file without a name: the kernel lets it go with its process, so no process waits for a dead
    one, and nothing is left behind.
    """

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._file = os.memfd_create("ckptd-latch", os.MFD_CLOEXEC)
        fcntl.lockf(self._file, fcntl.LOCK_EX)

    @property
    def place(self) -> tuple[int, int]:
        """What await_latch takes."""
        return os.getpid(), self._file

    def open(self) -> None:
        """Lets go those that wait. The descriptor stays: its number must not come to mean another file. Idempotent."""
        with self._turn:
            if self._file >= 0:  # else it was closed meanwhile, and no process waits
                fcntl.lockf(self._file, fcntl.LOCK_UN)

    def close(self) -> None:
        """For when no process can be waiting any more. Idempotent."""
        with self._turn:
            file, self._file = self._file, -1
            if file >= 0:
                os.close(file)


def await_latch(holder: int, file: int) -> None:
    """Blocks until the latch of process holder is open; not at all in the holder, whose own lock it is."""
    if holder == os.getpid():
        return
    try:
        found = os.open(f"/proc/{holder}/fd/{file}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return  # the holder has ended, or no process needs to wait any more
    try:
        fcntl.lockf(found, fcntl.LOCK_SH)
    finally:
        os.close(found)
