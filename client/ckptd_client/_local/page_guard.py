"""Detects by the memory management unit which pages of this process were written since they were protected.

userfaultfd(2) in its asynchronous write-protect mode (Linux 6.7): a protected page loses its protection at the first
write by any thread of this process, or by the kernel on its behalf; the writer is not stopped. PAGEMAP_SCAN
(ioctl_pagemap_scan) lists the pages that are still protected. It needs no privilege (UFFD_USER_MODE_ONLY). Ranges
consist of huge pages: it takes 0.4 ms to protect a GiB of them; for small pages it takes as long as a copy.

It cannot detect writes of another process that maps the same memory (private memory has none), and of devices that
pinned the pages before.
"""

import ctypes
import errno
import mmap
import os
import platform
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

HUGE_NBYTES = 2 << 20  # of a huge page, on machines with small pages of 4 KiB
PAGE_NBYTES = 4096
_SYS_USERFAULTFD = {"x86_64": 323, "aarch64": 282}
_USER_MODE_ONLY = 1
_API, _WP, _ASYNC, _FLAG_WP, _UNPOPULATED = 0xAA, 1 << 1, 1 << 15, 1 << 0, 1 << 13
_MADV_COLLAPSE = 25
_WPALLOWED, _WRITTEN, _FILE, _PRESENT, _SWAPPED, _HUGE = (1 << bit for bit in (0, 1, 2, 3, 4, 6))
_CHECK_WPASYNC = 1 << 1
_IOV_MAX = 512
CALL_NBYTES = 32 << 20  # of one call: a copy may stop between calls


def _request(number: int, kind: int, nbytes: int, *, read: bool = True) -> int:
    return ((3 if read else 2) << 30) | (nbytes << 16) | (kind << 8) | number


_UFFDIO_API = _request(0x3F, _API, 24)
_UFFDIO_REGISTER = _request(0x00, _API, 32)
_UFFDIO_UNREGISTER = _request(0x01, _API, 16, read=False)
_UFFDIO_WRITEPROTECT = _request(0x06, _API, 24)
_PAGEMAP_SCAN = _request(16, ord("f"), 96)

_Words3, _Words4, _Words2, _Words12 = (ctypes.c_uint64 * n for n in (3, 4, 2, 12))
_REGIONS = 64
_Regions = ctypes.c_uint64 * (3 * _REGIONS)


class NoProofError(Exception):
    """The kernel cannot detect writes; the message has the reason."""


Pieces = npt.NDArray[np.uint64]  # rows of (destination address, source address, bytes)


class Range(NamedTuple):
    """Addresses of this process: from start to before stop."""

    start: int
    stop: int


_libc = ctypes.CDLL(None, use_errno=True)
_libc.process_vm_readv.restype = ctypes.c_ssize_t
_libc.syscall.restype = ctypes.c_long


class PageGuard:
    """The guard of this process, not of a forked child: see close. Any thread may use it. Raises NoProofError."""

    def __init__(self) -> None:
        number = _SYS_USERFAULTFD.get(platform.machine())
        if number is None:
            raise NoProofError(f"no userfaultfd on {platform.machine()}")
        if mmap.PAGESIZE != PAGE_NBYTES:
            raise NoProofError(f"pages of {mmap.PAGESIZE} bytes")
        self._fd = _libc.syscall(number, os.O_CLOEXEC | os.O_NONBLOCK | _USER_MODE_ONLY)
        if self._fd < 0:
            raise NoProofError(f"userfaultfd: {os.strerror(ctypes.get_errno())}")
        self._pagemap = -1
        try:
            self._pagemap = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
            _ioctl(self._fd, _UFFDIO_API, _Words3(_API, _ASYNC | _FLAG_WP | _UNPOPULATED, 0))
            self._try()
        except OSError as error:
            self.close()
            raise NoProofError(f"write-protect by userfaultfd: {error.strerror}; it takes Linux 6.7") from error

    def _try(self) -> None:
        """Tries all calls once. Raises OSError if the kernel lacks one."""
        with mmap.mmap(-1, 2 * mmap.PAGESIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
            held = ctypes.c_char.from_buffer(memory)
            start = ctypes.addressof(held)
            del held
            memory[0] = memory[mmap.PAGESIZE] = 1
            found = Range(start, start + 2 * mmap.PAGESIZE)
            self.register(found)
            self.protect(found)
            half = Range(start, start + mmap.PAGESIZE)
            if not self.unwritten(found):
                raise OSError(errno.EOPNOTSUPP, "PAGEMAP_SCAN does not show what is protected")
            memory[mmap.PAGESIZE] = 2
            if self.unwritten(found) or not self.unwritten(half):
                raise OSError(errno.EOPNOTSUPP, "PAGEMAP_SCAN does not show what was written")
            copied = ctypes.create_string_buffer(8)
            copy(pieces([(ctypes.addressof(copied), start, 8)]))

    def close(self) -> None:
        """Ends the protection of all pages. In a forked child: closes the descriptors of its parent."""
        for fd in (self._fd, self._pagemap):
            if fd >= 0:
                os.close(fd)
        self._fd = self._pagemap = -1

    def collapse(self, found: Range) -> None:
        """Collapses small pages into huge ones. Blocks: 3 s per GiB. Raises OSError; some pages may be huge then."""
        if _libc.madvise(ctypes.c_void_p(found.start), ctypes.c_size_t(found.stop - found.start), _MADV_COLLAPSE):
            raise _error("madvise")

    def register(self, found: Range) -> None:
        """Allows to protect the range. Not twice. Raises OSError if it is not anonymous, or not free."""
        _ioctl(self._fd, _UFFDIO_REGISTER, _Words4(found.start, found.stop - found.start, _WP, 0))

    def unregister(self, found: Range) -> None:
        """Undoes register and protect. Raises OSError if the range is not mapped any more."""
        _ioctl(self._fd, _UFFDIO_UNREGISTER, _Words2(found.start, found.stop - found.start))

    def protect(self, found: Range) -> None:
        """Detects writes to the range from now on. Raises OSError if some of it is not registered any more."""
        _ioctl(self._fd, _UFFDIO_WRITEPROTECT, _Words3(found.start, found.stop - found.start, 1))

    def unprotect(self, found: Range) -> None:
        """Ends the detection of writes. Raises OSError as protect does."""
        _ioctl(self._fd, _UFFDIO_WRITEPROTECT, _Words3(found.start, found.stop - found.start, 0))

    def is_huge(self, found: Range) -> bool:
        """Whether the range consists of present, private, anonymous huge pages. Never raises."""
        return self._covered(found, flags=0, every=_PRESENT | _HUGE, none=_FILE, some=0)

    def unwritten(self, found: Range) -> bool:
        """Whether every page of the range exists, is protected, and was not written since protect. Never raises.

        False for a hole, for another mapping, and if the kernel gives no answer.
        """
        return self._covered(found, flags=_CHECK_WPASYNC, every=0, none=_WRITTEN | _FILE, some=_PRESENT | _SWAPPED)

    def _covered(self, found: Range, *, flags: int, every: int, none: int, some: int) -> bool:
        """Whether every page from start to stop has all, none and some of these flags."""
        at, regions = found.start, _Regions()
        while at < found.stop:
            ask = _Words12(
                96, flags, at, found.stop, 0, ctypes.addressof(regions), _REGIONS, 0, none, every | none, some, 0
            )
            try:
                count = _ioctl(self._pagemap, _PAGEMAP_SCAN, ask)
            except OSError:
                return False
            for i in range(count):
                first, stop = regions[3 * i], regions[3 * i + 1]
                if first != at:
                    return False
                at = stop
            if ask[4] != at:  # the scan went beyond the last page that matches
                return False
        return True


def pieces(rows: Iterable[tuple[int, int, int]] = ()) -> Pieces:
    """An array of rows (destination address, source address, bytes)."""
    return np.array(list(rows), np.uint64).reshape(-1, 3)


def copy(found: Pieces) -> None:
    """Copies bytes within this process, without the GIL. Blocks. Raises OSError, not a signal, for unmapped memory.

    found: at most 512 rows, as from batches.
    """
    to, source = np.ascontiguousarray(found[:, [0, 2]]), np.ascontiguousarray(found[:, [1, 2]])  # of struct iovec
    whole, count = int(found[:, 2].sum()), ctypes.c_ulong(len(found))
    done = _libc.process_vm_readv(
        os.getpid(), ctypes.c_void_p(to.ctypes.data), count, ctypes.c_void_p(source.ctypes.data), count,
        ctypes.c_ulong(0),
    )  # fmt: skip
    if done < 0:
        raise _error("process_vm_readv")
    if done != whole:
        raise OSError(errno.EFAULT, f"{whole - done} of {whole} bytes are mapped no more")


def batches(found: Pieces) -> Iterator[Pieces]:
    """Divides rows into calls of at most 32 MiB and 512 rows. Pure."""
    parts = -(-found[:, 2].astype(np.int64) // CALL_NBYTES)
    rows = np.repeat(found, parts, axis=0)
    first = np.repeat(np.cumsum(parts) - parts, parts)
    done = ((np.arange(len(rows)) - first) * CALL_NBYTES).astype(np.uint64)
    rows[:, :2] += done[:, None]
    rows[:, 2] = np.minimum(rows[:, 2] - done, CALL_NBYTES)
    ends, start = np.cumsum(rows[:, 2].astype(np.int64)), 0
    while start < len(rows):
        before = ends[start - 1] if start else 0
        stop = int(np.searchsorted(ends, before + CALL_NBYTES, "right"))
        stop = max(start + 1, min(stop, start + _IOV_MAX))
        yield rows[start:stop]
        start = stop


def whole_units(ranges: Iterable[Range], gap: int = 0) -> list[Range]:
    """The 2 MiB units that are completely inside these ranges, adjacent ones as one range, in order. Pure.

    gap: so many other bytes between two ranges count as part of them.
    """
    found: list[Range] = []
    for one in _united(ranges, gap):
        start, stop = -(-one.start // HUGE_NBYTES) * HUGE_NBYTES, one.stop // HUGE_NBYTES * HUGE_NBYTES
        if start < stop:
            found.append(Range(start, stop))
    return found


def _united(ranges: Iterable[Range], gap: int) -> list[Range]:
    """The ranges in order, without overlaps; adjacent ones are joined."""
    found: list[Range] = []
    for one in sorted(ranges):
        if found and one.start <= found[-1].stop + gap:
            found[-1] = Range(found[-1].start, max(found[-1].stop, one.stop))
        else:
            found.append(one)
    return found


def common(some: Iterable[Range], others: Iterable[Range]) -> list[Range]:
    """The intersection. Each list: in order, without overlaps. Pure."""
    found: list[Range] = []
    left, right = list(some), list(others)
    i = k = 0
    while i < len(left) and k < len(right):
        start, stop = max(left[i].start, right[k].start), min(left[i].stop, right[k].stop)
        if start < stop:
            found.append(Range(start, stop))
        if left[i].stop <= right[k].stop:
            i += 1
        else:
            k += 1
    return found


def without(some: Iterable[Range], others: Sequence[Range]) -> list[Range]:
    """The difference: in some, not in others. Each list: in order, without overlaps. Pure."""
    found, at = [], 0
    for one in some:
        start = one.start
        while at < len(others) and others[at].start < one.stop:
            if start < others[at].start:
                found.append(Range(start, others[at].start))
            start = max(start, others[at].stop)
            if start >= one.stop:  # it may reach into the next
                break
            at += 1
        if start < one.stop:
            found.append(Range(start, one.stop))
    return found


def _ioctl(fd: int, request: int, words: "ctypes.Array[ctypes.c_uint64]") -> int:
    done: int = _libc.ioctl(fd, ctypes.c_ulong(request), ctypes.byref(words))
    if done < 0:
        raise _error("ioctl")
    return done


def _error(call: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{os.strerror(number)} ({call})")
