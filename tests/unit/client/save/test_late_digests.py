"""Digests of what replicas share, read while training goes on: of the moment of the save, or the save is given up."""

import mmap
import random

import pytest
import torch

from ckptd_client._local.late_memory import late_memory
from ckptd_client._local.page_division import divide
from ckptd_client._local.page_guard import HUGE_NBYTES, NoProofError, Range, whole_units
from ckptd_client._save.late.copies import PageCopies
from ckptd_client._state.replica_digests import BLOCK_NBYTES, WholeDigest
from tests.cluster import wait_for

SIZES = (BLOCK_NBYTES * 2 + 5_000, 3 << 20, 40, 0, BLOCK_NBYTES)


def tensors_at(offset):
    """Some of one storage, of other sizes, the first so many bytes into a unit."""
    torch.manual_seed(1)
    storage = torch.randint(0, 255, (sum(SIZES) + 4 * HUGE_NBYTES,), dtype=torch.uint8)
    at = -storage.data_ptr() % HUGE_NBYTES + offset
    found = []
    for size in SIZES:
        found.append(storage[at : at + size])
        at += size
    return found


def whole(tensors):
    return WholeDigest([f"t{i}" for i in range(len(tensors))], tensors, [1] * len(tensors))


def span(tensor):
    return Range(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)


@pytest.mark.parametrize("seed", range(8))
def test_the_digest_does_not_depend_on_where_the_bytes_lie_nor_on_what_is_read_late(seed):
    rng = random.Random(seed)
    tensors = tensors_at(rng.choice([0, 8, 1 << 20, HUGE_NBYTES - 4096]))
    units = [
        one.start + i * HUGE_NBYTES
        for one in whole_units(map(span, tensors))
        for i in range((one.stop - one.start) // HUGE_NBYTES)
    ]
    armed = [Range(start, start + HUGE_NBYTES) for start in units if rng.random() < 0.7]
    digest = whole(tensors)
    digest.take(armed)
    assert sum(found.stop - found.start for _, found in digest.late) == len(armed) * HUGE_NBYTES
    digest.take_late()
    assert digest.digest() == whole([tensor.clone() for tensor in tensors]).digest()


def test_only_what_is_armed_is_read_late():
    tensors = tensors_at(1 << 20)
    armed = whole_units(map(span, tensors))
    before, after = whole(tensors), whole(tensors)
    before.take(armed)
    expected = before.digest()
    after.take(armed)
    for tensor in tensors:
        inside = [one for one in armed if one.start < span(tensor).stop and span(tensor).start < one.stop]
        tensor[: max(0, inside[0].start - tensor.data_ptr()) if inside else None] ^= 1
    assert after.digest() == expected, "what is outside was read at once"
    last = whole(tensors)
    last.take(armed)
    tensors[0][armed[0].start - tensors[0].data_ptr()] ^= 1
    late = last.digest()
    last = whole(tensors)
    last.take()
    assert late == last.digest()


# --- under the proof


@pytest.fixture
def armed():
    """A tensor in memory that is protected; where."""
    try:
        memory = late_memory()
    except NoProofError as error:
        pytest.skip(str(error))
    room = mmap.mmap(-1, 6 * HUGE_NBYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    tensor = torch.frombuffer(room, dtype=torch.uint8)[100 : 5 * HUGE_NBYTES]
    tensor.fill_(7)
    units = whole_units([span(tensor)])
    memory.lease(units).release()
    wait_for(lambda: not memory.busy)
    lease = memory.lease(units)
    if not lease.ranges:
        pytest.skip("no huge pages")
    assert lease.protect(lease.ranges)
    yield tensor, lease
    lease.release()
    memory.forget(units)


def copies_of(lease, digest):
    """A late copy of nothing but what the digest reads."""
    nothing = divide([], [0], [], armed=lease.ranges, own=lease.ranges, shared=[], watched=[])
    return PageCopies(late_memory(), lease, nothing, slot=0, names=["t0"], keep=[], digests=[digest])


def read(tensor, lease, while_it_reads=lambda: None):
    """A digest of it, and the names that were written to meanwhile."""
    digest = whole([tensor])
    digest.take(lease.ranges)
    take_late = digest.take_late

    def slowly():
        take_late()
        while_it_reads()

    digest.take_late = slowly
    copies = copies_of(lease, digest)
    copies.copy(lambda: False, lambda: False)
    return digest, copies.written()


def test_what_none_wrote_to_is_the_digest_of_the_save(armed):
    tensor, lease = armed
    digest, written = read(tensor, lease)
    assert written == []
    assert digest.digest() == whole([tensor.clone()]).digest()


def test_a_write_while_the_digest_is_taken_gives_the_save_up(armed):
    tensor, lease = armed

    def write():
        tensor[HUGE_NBYTES + 5] = 7

    assert read(tensor, lease, write)[1] == ["t0"]


def test_a_digest_that_is_not_taken_to_its_end_proves_nothing(armed):
    tensor, lease = armed
    digest = whole([tensor])
    digest.take(lease.ranges)
    copies = copies_of(lease, digest)
    copies.copy(lambda: True, lambda: False)
    assert copies.written() == ["t0"]
