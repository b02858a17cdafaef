"""Shared mappings: where they lie, how long they live, and the pages below them."""

import gc
import mmap
import os
import pathlib
import tempfile
import time

import pytest

from ckptd.shared.files import mapping as under_test
from ckptd.shared.files.mapping import COLLAPSE, HUGE_NBYTES, POPULATE_WRITE, Mapping, fill, fill_huge

MAPS = pathlib.Path("/proc/self/maps")
SIZE = 2 * HUGE_NBYTES + mmap.PAGESIZE


@pytest.fixture
def shm():
    """A descriptor of a new tmpfs file of SIZE bytes, without a name."""
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        file.truncate(SIZE)
        yield file.fileno()


def mapped(address):
    """The line of /proc/self/maps that starts at the address."""
    return next((line for line in MAPS.read_text().splitlines() if line.startswith(f"{address:x}-")), "")


def addresses_nbytes():
    """Bytes of addresses this process has taken."""
    return mmap.PAGESIZE * int(pathlib.Path("/proc/self/statm").read_text().split()[0])


def test_a_mapping_starts_where_a_huge_page_may(shm):
    one, other = Mapping(shm, SIZE), Mapping(shm, mmap.PAGESIZE)
    assert one.address % HUGE_NBYTES == other.address % HUGE_NBYTES == 0
    assert (len(one.view), len(other.view)) == (SIZE, mmap.PAGESIZE)
    one.view[5:8] = b"abc"
    assert bytes(other.view[5:8]) == os.pread(shm, 3, 5) == b"abc"


def test_the_addresses_reserved_to_align_it_are_given_back(shm):
    before = addresses_nbytes()
    kept = [Mapping(shm, SIZE) for _ in range(200)]
    after = addresses_nbytes()
    assert after - before < 200 * (SIZE + HUGE_NBYTES // 2)
    assert len({one.address for one in kept}) == 200


def test_it_is_unmapped_with_the_last_view_and_not_before(shm):
    it = Mapping(shm, SIZE)
    address, part = it.address, it.view[10:20]
    it.close()
    gc.collect()
    assert mapped(address)
    part[:] = b"0123456789"
    assert os.pread(shm, 10, 10) == b"0123456789"
    del part
    assert not mapped(address)


@pytest.mark.process
def test_a_forked_child_does_not_unmap_what_lies_at_an_address_left_free(shm):
    it = Mapping(shm, SIZE)
    it.advise(mmap.MADV_DONTFORK)
    pid = os.fork()
    if pid == 0:
        other = Mapping(shm, mmap.PAGESIZE)
        under_test._libc.mmap(it.address, mmap.PAGESIZE, mmap.PROT_READ, mmap.MAP_SHARED | 0x10, shm, 0)
        address = it.address
        del it
        os._exit(0 if mapped(address) and len(other.view) else 1)
    assert os.waitpid(pid, 0)[1] == 0


def test_one_for_reading_cannot_be_written(shm):
    with pytest.raises(TypeError, match="read-only"):
        Mapping(shm, SIZE, writable=False).view[0] = 1


def test_a_bad_descriptor_is_an_error_and_leaves_no_addresses_taken():
    before = MAPS.read_text().count("---p")
    with pytest.raises(OSError, match="Bad file descriptor"):
        Mapping(1_000_000, SIZE)
    assert MAPS.read_text().count("---p") <= before


def test_untouched_memory_is_made_of_huge_pages_where_the_kernel_collapses(shm):
    it = Mapping(shm, SIZE)
    if not fill_huge(it, 0, HUGE_NBYTES):
        pytest.skip("this kernel makes no huge pages of tmpfs (MADV_COLLAPSE, Linux 6.1)")
    assert os.fstat(shm).st_blocks * 512 == HUGE_NBYTES  # all of it is there, from one page that was touched
    assert bytes(it.view[:HUGE_NBYTES]) == bytes(HUGE_NBYTES)
    smaps = pathlib.Path("/proc/self/smaps").read_text()
    lines = smaps.partition(f"{it.address:x}-")[2].partition("VmFlags")[0]
    assert f"ShmemPmdMapped:{HUGE_NBYTES // 1024:>9} kB" in lines


@pytest.mark.parametrize("refused", [{COLLAPSE}, {COLLAPSE, POPULATE_WRITE}])
def test_an_older_kernel_gets_every_page_touched(shm, monkeypatch, refused):
    real = Mapping.advise

    def old(self, advice, *where):
        if advice in refused:
            raise OSError(22, "Invalid argument")
        real(self, advice, *where)

    monkeypatch.setattr(Mapping, "advise", old)
    it = Mapping(shm, SIZE)
    assert not fill_huge(it, 0, HUGE_NBYTES)
    fill(it, 0, SIZE)
    assert os.fstat(shm).st_blocks * 512 == SIZE


def test_memory_without_a_file_is_zero_and_ones_own():
    it = Mapping(None, HUGE_NBYTES)
    start = time.monotonic()
    if not fill_huge(it, 0, HUGE_NBYTES):
        fill(it, 0, HUGE_NBYTES)
    assert time.monotonic() - start < 10
    assert it.view == bytes(HUGE_NBYTES)
