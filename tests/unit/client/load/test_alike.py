"""Which tensors of several images are alike: what digests say, what is read, and what stays open."""

import contextlib
import random
from types import SimpleNamespace

import pytest

from ckptd.shared.base.errors import DamagedError
from ckptd.shared.format.digest import digest
from ckptd.shared.format.integrity import XXH3
from ckptd.shared.format.layout import TensorEntry
from ckptd.shared.stores.kinds import open_files
from ckptd_client._load import alike
from ckptd_client._load.alike import compare, questions_of
from ckptd_client._load.image_ranges import Images, images_in
from ckptd_client._state.reshard import Saved
from tests.stored import Listed

BLOCK = 64


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(alike, "BLOCK_NBYTES", BLOCK)
    monkeypatch.setattr(alike, "_CHUNK_NBYTES", 24)


class Read:
    """Images in memory, and what is read of them: (rank, byte)."""

    def __init__(self, images, lost=()):
        self.images, self.lost, self.bytes = images, lost, set()
        size = alike.BLOCK_NBYTES
        tables = {
            rank: b"".join(digest(data[at : at + size]) for at in range(0, len(data), size))
            for rank, data in enumerate(images)
        }
        self.as_images = Images(tables, self.reading)

    @contextlib.contextmanager
    def reading(self, rank):
        if rank in self.lost:
            raise OSError

        def read(offset, nbytes):
            self.bytes |= {(rank, at) for at in range(offset, offset + nbytes)}
            return self.images[rank][offset : offset + nbytes]

        yield read


def saved(rank, start, nbytes):
    return Saved(rank, TensorEntry("t", "U8", (nbytes,), (0,), (nbytes,), start, nbytes))


def answers(images, tensors, lost=()):
    """alike of each tensor: (start in each image, bytes)."""
    read = Read(images, lost)
    names = {i: [saved(rank, at, nbytes) for rank, at in enumerate(starts)] for i, (starts, nbytes) in tensors.items()}
    questions = questions_of(names, read.as_images.tables)
    compare(questions.values(), read.as_images)
    return {i: question.alike for i, question in questions.items()}, read


@pytest.mark.parametrize("seed", range(60))
def test_it_is_as_if_all_was_compared(seed):
    rng = random.Random(seed)
    ranks, shifted = rng.randint(2, 5), rng.random() < 0.4
    shift = [rng.choice([0, 8, BLOCK]) if shifted else 0 for _ in range(ranks)]
    sizes = [rng.choice([0, 1, 8, 30, BLOCK, 2 * BLOCK, 300]) for _ in range(12)]
    common, at, tensors = b"", rng.choice([0, 5, BLOCK]), {}
    common = rng.randbytes(at)
    for i, size in enumerate(sizes):
        tensors[i] = [at + by for by in shift], size
        common += rng.randbytes(size)
        at += size
    images = [bytearray(rng.randbytes(by) + common) for by in shift]
    for _ in range(rng.choice([0, 1, 1, 2])):
        one = rng.choice(images)
        one[rng.randrange(len(one))] ^= 1 << rng.randrange(8)
    found, read = answers(images, tensors)
    truth = {
        i: len({bytes(data[start : start + size]) for data, start in zip(images, starts, strict=True)}) == 1
        for i, (starts, size) in tensors.items()
    }
    assert found == truth
    if not shifted:
        blocks = {byte // BLOCK for _, byte in read.bytes}
        assert all(len({bytes(data[b * BLOCK : (b + 1) * BLOCK]) for data in images}) > 1 for b in blocks), "no need"


def test_of_large_tensors_no_more_than_their_ends_is_read():
    data = bytearray(random.Random(1).randbytes(100 * BLOCK))
    images = [bytearray(data) for _ in range(4)]
    for rank, image in enumerate(images):
        image[3] = image[60 * BLOCK + 7] = rank  # before the first one; in the second one
    found, read = answers(images, {"a": ([10] * 4, 50 * BLOCK), "b": ([55 * BLOCK] * 4, 40 * BLOCK)})
    assert found == {"a": True, "b": False}
    assert {byte for _, byte in read.bytes} == {*range(10, BLOCK)}


def test_what_differs_at_the_ends_needs_no_other_image(monkeypatch):
    monkeypatch.setattr(alike, "MAX_NBYTES", 2 * 40 + 6 * 4)
    images = [bytes([rank]) * 40 + b"abcd" for rank in range(6)]
    found, read = answers(images, {"own": ([0] * 6, 40), "alike": ([40] * 6, 4)})
    assert found == {"own": False, "alike": True}
    assert {rank for rank, byte in read.bytes if byte < 40} == {0, 5}


def test_beyond_the_bounds_the_smallest_are_compared_and_others_stay_open(monkeypatch):
    images = [b"x" * 200 + bytes([rank]) for rank in range(3)]
    tensors = {"large": ([0] * 3, 40), "small": ([40] * 3, 10), "other": ([50] * 3, 3), "own": ([200] * 3, 1)}
    monkeypatch.setattr(alike, "BLOCK_NBYTES", 1 << 20)
    monkeypatch.setattr(alike, "MAX_NBYTES", 3 * (10 + 3 + 1))
    found, read = answers(images, tensors)
    assert found == {"large": None, "small": True, "other": True, "own": False}
    assert len(read.bytes) <= 3 * 14
    monkeypatch.setattr(alike, "MAX_NBYTES", 1 << 20)
    monkeypatch.setattr(alike, "MAX_READS", 5)
    assert answers(images, tensors)[0] == {"large": None, "small": None, "other": True, "own": False}


def test_an_image_that_cannot_be_read_leaves_open_what_the_others_do_not_decide():
    images = [b"alike" + bytes([rank]) for rank in range(4)]
    tensors = {"alike": ([0] * 4, 5), "own": ([5] * 4, 1)}
    for lost in range(4):
        assert answers(images, tensors, {lost})[0] == {"alike": None, "own": False}
    assert answers(images, tensors, {0, 1, 2})[0] == {"alike": None, "own": None}


def test_an_image_of_several_files(tmp_path):
    (tmp_path / "a").write_bytes(b"0123456789")
    (tmp_path / "b").write_bytes(b"abcdefghij")
    extents = [("a", 0, 10), ("b", 10, 12)]  # the second one is shorter than it should be
    records = Listed([SimpleNamespace(rank=0, name="a", digests=b"d", extents=lambda: extents)])
    records.files = open_files(str(tmp_path), XXH3)
    images = images_in(records)
    assert dict(images.tables) == {0: b"d"}
    with images.reading(0) as read:
        assert [read(0, 3), read(8, 4), read(10, 10)] == [b"012", b"89ab", b"abcdefghij"]
        with pytest.raises(DamagedError, match="ends before byte 22"):
            read(18, 4)
