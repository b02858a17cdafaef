"""Shared mappings of slot files at addresses where the kernel can map huge pages, and the pages under them.

A page table entry per 4 KiB costs more than the copy of the 4 KiB: mapping 2 GiB again takes 0.2 s, copying it 0.1 s.
Slots are therefore made of huge pages wherever the kernel lets us (docs/decisions/0012-huge-pages-without-a-mount.md).
The client uses this module too; it needs nothing but libc.
"""

import ctypes
import mmap
import os
import weakref
from collections.abc import Callable
from typing import Final

HUGE_NBYTES: Final = 2 << 20
POPULATE_READ: Final = 22  # <linux/mman.h>; the mmap module has no names for these
POPULATE_WRITE: Final = 23
COLLAPSE: Final = 25
_MAP_FIXED: Final = 0x10
_FAILED: Final = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Mapping:
    """The first nbytes of a file, mapped shared, or with no file new memory of this process alone.

    The file may be closed; it must never be truncated below nbytes.
    view: the bytes, writable if asked for. The memory is unmapped when neither the Mapping nor any view of it (a slice,
    a tensor) is left, so no view can outlive it. Raises OSError.
    """

    def __init__(self, fd: int | None, nbytes: int, *, writable: bool = True) -> None:
        self.nbytes = nbytes
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self.address = _map(fd, nbytes, protection)
        memory = (ctypes.c_ubyte * nbytes).from_address(self.address)
        self._before_unmap: list[Callable[[], None]] = []
        finalizer = weakref.finalize(memory, _unmap, os.getpid(), self.address, nbytes, self._before_unmap)
        finalizer.atexit = False  # threads may still copy
        view = memoryview(memory).cast("B")
        self.view = view if writable else view.toreadonly()

    def advise(self, advice: int, start: int = 0, nbytes: int | None = None) -> None:
        """madvise(2) of a range that starts on a page. Blocks as long as the kernel does, without the GIL."""
        length = self.nbytes - start if nbytes is None else nbytes
        if _libc.madvise(self.address + start, length, advice):
            raise _error()

    def before_unmap(self, undo: Callable[[], None]) -> None:
        """Calls undo right before the memory is unmapped, in the thread that drops the last view; never in a fork.

        What is registered with a device is so given back while it is still mapped. undo must not raise.
        """
        self._before_unmap.append(undo)

    def close(self) -> None:
        """Lets go of the bytes; they are unmapped with the last view."""
        self.view = memoryview(b"")


def _map(fd: int | None, nbytes: int, protection: int) -> int:
    """Address of a new mapping, a multiple of a huge page."""
    anonymous = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    room = nbytes + HUGE_NBYTES
    start = _mapped(_libc.mmap(None, room, 0, anonymous, -1, 0))  # reserves addresses, no memory
    aligned = -(-start // HUGE_NBYTES) * HUGE_NBYTES
    flags = _MAP_FIXED | (anonymous if fd is None else mmap.MAP_SHARED)
    try:
        address = _mapped(_libc.mmap(aligned, nbytes, protection, flags, -1 if fd is None else fd, 0))
    except OSError:
        _libc.munmap(start, room)
        raise
    end = -(-(aligned + nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
    if aligned > start:
        _libc.munmap(start, aligned - start)
    if start + room > end:
        _libc.munmap(end, start + room - end)
    return address


def _unmap(pid: int, address: int, nbytes: int, before: list[Callable[[], None]]) -> None:
    if os.getpid() == pid:  # a forked child may have other things at a range that MADV_DONTFORK left free
        for undo in before:
            undo()
        _libc.munmap(address, nbytes)


def _mapped(address: int | None) -> int:
    if address is None or address == _FAILED:
        raise _error()
    return address


def _error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))


def fill_huge(mapping: Mapping, start: int, nbytes: int) -> bool:
    """Gives an untouched part, whole huge pages, its memory in huge pages. False where the kernel won't. Blocks.

    tmpfs gives huge pages only where root has mounted it so, but MADV_COLLAPSE (Linux 6.1) makes one of any 2 MiB
    that hold at least a page: one page of each is touched, then collapsed, which clears the rest.
    """
    try:
        for offset in range(start, start + nbytes, HUGE_NBYTES):
            mapping.advise(POPULATE_WRITE, offset, mmap.PAGESIZE)
        mapping.advise(COLLAPSE, start, nbytes)
    except OSError:
        return False
    return True


def advise_huge(address: int, nbytes: int) -> None:
    """Asks for huge pages under new memory of this process alone: touched first, it then costs a tenth of the time.

    What the kernel makes of it changes nothing but that. Only whole huge pages of the range are concerned.
    """
    start = -(-address // HUGE_NBYTES) * HUGE_NBYTES
    stop = (address + nbytes) // HUGE_NBYTES * HUGE_NBYTES
    if stop > start:
        _libc.madvise(start, stop - start, mmap.MADV_HUGEPAGE)


def fill(mapping: Mapping, start: int, nbytes: int) -> None:
    """Touches every page of a part; a file must have room for them. Blocks."""
    try:
        mapping.advise(POPULATE_WRITE, start, nbytes)
    except OSError:  # kernels before 5.14
        for offset in range(start, start + nbytes, mmap.PAGESIZE):
            mapping.view[offset] = 0
