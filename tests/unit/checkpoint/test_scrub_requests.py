"""What a store worker does for a scrub: pieces, blocks, and images written again from slots or from parity."""

import errno
import os
import tempfile
import time
from collections import Counter
from pathlib import Path

import pytest

from ckptd.checkpoint.requests import carry_out
from ckptd.checkpoint.verify import verify_path
from ckptd.shared.base.errors import DamagedError
from ckptd.shared.format.committed import identify
from ckptd.shared.format.digest import BLOCK_NBYTES, digest
from ckptd.shared.format.integrity import XXH3
from ckptd.shared.protocol.scrubbing import BEGIN
from ckptd.shared.stores.directory import DirectoryFiles, OpenedFile
from ckptd.shared.stores.kinds import open_files
from ckptd.store.opening import open_store
from ckptd.store.scrub_messages import BlockRead, MendCheckpoint, Mended, PieceRead, ReadBlock, ScrubCheckpoint
from ckptd.system.files import FileLayer
from tests.flips import flip
from tests.parity_store import Made
from tests.runs import STORE_ID

SIZES = [[BLOCK_NBYTES + 50_000], [80_001], [33_333]]
IMAGE = "r00000-p00.safetensors"


@pytest.fixture(name="arenas")
def fixture_arenas():
    with tempfile.TemporaryDirectory(prefix="ckptd-test-", dir="/dev/shm") as directory:
        yield directory


@pytest.fixture(name="final")
def fixture_final(tmp_path, arenas) -> Path:
    return Made(tmp_path, arenas, SIZES).commit()


def asked(final: Path, kind, *, alive=None, **words):
    """The answer. alive: counts the words of it meanwhile."""
    store = open_store(str(final.parent.parent), XXH3)
    alive = alive or [0]
    save = identify(open_files(str(final), XXH3)).save
    request = kind(id=1, store_id=STORE_ID, job=final.parent.name, save=save, **words)

    def speak():
        alive[0] += 1

    return carry_out(store, request, speak)


def test_a_piece_names_the_rank_of_what_is_damaged(final):
    flip(final / IMAGE, BLOCK_NBYTES + 9)
    found, at = [], BEGIN
    while at is not None:
        piece = asked(final, ScrubCheckpoint, place=at, nbytes=BLOCK_NBYTES)
        assert isinstance(piece, PieceRead)
        found += piece.harms
        at = piece.next
    (harm,) = found
    assert (harm.path, harm.rank) == (str(final / IMAGE), 0)
    assert harm.what.startswith("block 1 ")


def test_a_block_is_proved(final):
    image = (final / IMAGE).read_bytes()
    for block, part in enumerate((image[:BLOCK_NBYTES], image[BLOCK_NBYTES:])):
        read = asked(final, ReadBlock, rank=0, block=block)
        assert isinstance(read, BlockRead)
        assert digest(read.data) == digest(part)
    flip(final / IMAGE, 9)
    with pytest.raises(DamagedError, match="block 0 of rank 0 is damaged there, too"):
        asked(final, ReadBlock, rank=0, block=0)
    os.truncate(final / IMAGE, 100)
    with pytest.raises(DamagedError):
        asked(final, ReadBlock, rank=0, block=1)


@pytest.mark.parametrize("how", ["a bit", "two bits", "cut", "gone"])
def test_an_image_is_written_again_from_a_copy(final, tmp_path, how):
    whole = (final / IMAGE).read_bytes()
    copy = tmp_path / "slot"
    copy.write_bytes(whole + b"what follows in a slot")
    others = {path: path.stat().st_ino for path in final.rglob("*") if path.is_file() and path.name != IMAGE}
    if how == "gone":
        (final / IMAGE).unlink()
    elif how == "cut":
        os.truncate(final / IMAGE, BLOCK_NBYTES - 5)
    else:
        flip(final / IMAGE, 77)
    if how == "two bits":
        flip(final / IMAGE, BLOCK_NBYTES + 77)
    assert asked(final, MendCheckpoint, ranks=[0], slots=[(0, str(copy))]) == Mended(memory=[0])
    assert (final / IMAGE).read_bytes() == whole
    assert verify_path(str(final)).ok
    assert all(path.stat().st_ino == inode for path, inode in others.items())


@pytest.mark.parametrize("copied", ["damaged", "another's", "missing", "none"])
def test_where_the_copy_is_no_good_parity_is_taken(final, tmp_path, copied):
    whole = (final / IMAGE).read_bytes()
    copy = tmp_path / "slot"
    if copied != "missing":
        copy.write_bytes(whole)
    if copied == "damaged":
        flip(copy, 77)
    elif copied == "another's":
        copy.write_bytes(b"7" * len(whole))
    flip(final / IMAGE, 77)
    slots = [] if copied == "none" else [(0, str(copy))]
    found = asked(final, MendCheckpoint, ranks=[0], slots=slots)
    assert (found.memory, found.parity, found.lost) == ([], [0], [])
    assert bool(found.problem) is (copied != "none"), "why it was not the copy"
    assert (final / IMAGE).read_bytes() == whole


def test_what_nothing_has_is_lost_and_why(tmp_path, arenas):
    final = Made(tmp_path, arenas, SIZES).commit()
    for path in final.glob("sets/*/*.parity"):
        flip(path, 77)
    flip(final / IMAGE, 77)
    mended = asked(final, MendCheckpoint, ranks=[0])
    assert mended.lost == [0]
    assert IMAGE in mended.problem


@pytest.mark.parametrize("how", ["sound", "sound by then", "its vote is gone"])
def test_what_was_not_written_is_not_said_to_be(final, tmp_path, how):
    copy = tmp_path / "slot"
    copy.write_bytes((final / IMAGE).read_bytes())
    slots = [(0, str(copy))] if how == "sound" else []
    if how == "its vote is gone":
        for path in final.rglob("*.vote"):
            flip(path, 77)
    found = asked(final, MendCheckpoint, ranks=[0], slots=slots)
    assert (found.memory, found.parity) == ([], [])
    assert found.lost == ([0] if how == "its vote is gone" else [])


def test_why_nothing_was_written_is_said(final, tmp_path, monkeypatch):
    """As where the store is full: neither the copy nor parity helps."""
    copy = tmp_path / "slot"
    copy.write_bytes((final / IMAGE).read_bytes())
    flip(final / IMAGE, 77)

    def full(_layer, _fd, _nbytes):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(FileLayer, "truncate", full)
    found = asked(final, MendCheckpoint, ranks=[0], slots=[(0, str(copy))])
    assert (found.memory, found.parity, found.lost) == ([], [], [0])
    assert found.problem.startswith(f"from memory: [Errno {errno.ENOSPC}] No space left on device; ")


@pytest.mark.parametrize("source", ["memory", "parity"])
def test_there_is_word_of_each_block_that_is_read_or_written(final, tmp_path, monkeypatch, source):
    """A mend of which there is none is given up: with a large image, each time."""
    copy = tmp_path / "slot"
    copy.write_bytes((final / IMAGE).read_bytes())
    flip(final / IMAGE, BLOCK_NBYTES + 77)
    slots, alive, moved = [(0, str(copy))] if source == "memory" else [], [0], Counter()
    plain_read, plain_write = OpenedFile.read, FileLayer.pwrite

    def read(file, into, offset, nbytes):
        moved[alive[0]] += nbytes
        return plain_read(file, into, offset, nbytes)

    def write(layer, fd, data, offset):
        moved[alive[0]] += len(data)
        plain_write(layer, fd, data, offset)

    monkeypatch.setattr(OpenedFile, "read", read)
    monkeypatch.setattr(FileLayer, "pwrite", write)
    asked(final, MendCheckpoint, alive=alive, ranks=[0], slots=slots)
    assert moved.total() > 4 * BLOCK_NBYTES
    assert max(moved.values()) <= 2 * BLOCK_NBYTES


@pytest.mark.parametrize("source", ["memory", "parity"])
def test_the_rate_is_kept_when_images_are_written_again(final, tmp_path, source):
    """Read to be looked at, written, and read again: 48 MiB, and from parity as much again of the others."""
    copy = tmp_path / "slot"
    copy.write_bytes((final / IMAGE).read_bytes())
    flip(final / IMAGE, 77)
    slots = [(0, str(copy))] if source == "memory" else []
    began = time.monotonic()
    asked(final, MendCheckpoint, ranks=[0], slots=slots, bytes_per_s=32 << 20)
    assert time.monotonic() - began >= 1.4


@pytest.mark.parametrize("source", ["memory", "parity"])
def test_the_page_cache_is_passed_by(final, tmp_path, monkeypatch, source):
    copy = tmp_path / "slot"
    copy.write_bytes((final / IMAGE).read_bytes())
    slots, opened, plain = [(0, str(copy))] if source == "memory" else [], set(), DirectoryFiles.open

    def noted(files, name, *, cached=False):
        opened.add((name.rpartition(".")[2], cached))
        return plain(files, name, cached=cached)

    monkeypatch.setattr(DirectoryFiles, "open", noted)
    at = BEGIN
    while at is not None:
        at = asked(final, ScrubCheckpoint, place=at, nbytes=BLOCK_NBYTES).next
    flip(final / IMAGE, 77)
    asked(final, MendCheckpoint, ranks=[0], slots=slots)
    asked(final, ReadBlock, rank=0, block=1)
    assert opened == {("safetensors", False), ("parity", False)}
