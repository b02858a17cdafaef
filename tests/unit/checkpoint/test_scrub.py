"""A checkpoint read again in pieces: all of it once, from any place on, and only what is damaged is said to be."""

import shutil
from pathlib import Path

import pytest
import torch

from ckptd.checkpoint.scrub import scrub_piece
from ckptd.checkpoint.verify import verify_path
from ckptd.shared.format.digest import BLOCK_NBYTES
from ckptd.shared.format.integrity import XXH3
from ckptd.shared.protocol.scrubbing import BEGIN
from tests.checkpoints import write_checkpoint

WORDS = torch.arange((2 * BLOCK_NBYTES + 5000) // 4, dtype=torch.int32)


@pytest.fixture(name="folder", scope="module")
def fixture_folder(tmp_path_factory) -> Path:
    """Of two ranks: three blocks, and one."""
    return write_checkpoint(tmp_path_factory.mktemp("store"), [{"w": WORDS}, {"w": torch.zeros(3)}])


def pieces(folder: Path, nbytes: int):
    """All of them."""
    at = BEGIN
    found = []
    while at is not None:
        found.append(scrub_piece(str(folder), at, nbytes, XXH3))
        at = found[-1].next
    return found


@pytest.mark.parametrize("blocks", [1, 2, 100])
def test_the_pieces_are_all_of_it(folder, blocks):
    found = pieces(folder, blocks * BLOCK_NBYTES)
    assert [problem for piece in found for problem in piece.problems] == []
    assert sum(piece.nbytes for piece in found) == verify_path(str(folder)).nbytes
    assert all(piece.nbytes <= (blocks + 1) * BLOCK_NBYTES for piece in found)
    assert len(found) > 1 or blocks == 100


@pytest.mark.parametrize("blocks", [1, 100])
@pytest.mark.parametrize("name", ["r00000-p00.safetensors", "r00001-p00.safetensors", "*.vote", "ckptd.*.manifest"])
def test_what_verify_finds_is_found_once(folder, tmp_path, name, blocks):
    copy = tmp_path / folder.parent.name / folder.name
    shutil.copytree(folder.parent, copy.parent)
    path = min(copy.rglob(name))
    with path.open("r+b") as file:
        at = file.seek(-100, 2)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 4]))
    said = [str(problem) for problem in verify_path(str(copy)).problems]
    assert said
    found = [str(problem) for piece in pieces(copy, blocks * BLOCK_NBYTES) for problem in piece.problems]
    assert {one for one in found if str(path) in one} == {one for one in said if str(path) in one}
    assert len(found) == len(set(found))


def test_a_checkpoint_that_is_removed_meanwhile_is_no_finding(folder, tmp_path):
    copy = tmp_path / folder.parent.name / folder.name
    shutil.copytree(folder.parent, copy.parent)
    first = scrub_piece(str(copy), BEGIN, BLOCK_NBYTES, XXH3)
    assert first.next is not None
    copy.rename(copy.parent / f".trash-{copy.name}")
    assert scrub_piece(str(copy), first.next, BLOCK_NBYTES, XXH3) == (None, 0, [], True)
    assert scrub_piece(str(copy), BEGIN, BLOCK_NBYTES, XXH3).gone


def test_a_file_that_is_gone_alone_is_one(folder, tmp_path):
    copy = tmp_path / folder.parent.name / folder.name
    shutil.copytree(folder.parent, copy.parent)
    (copy / "COMMITTED").unlink()
    assert [problem.what for piece in pieces(copy, BLOCK_NBYTES) for problem in piece.problems][:1] == [
        "missing: the checkpoint is not committed"
    ]


@pytest.mark.parametrize("moment", range(1, 5))
@pytest.mark.parametrize("back", [False, True])
def test_a_checkpoint_in_whose_place_another_one_is_put_is_no_finding(folder, tmp_path, back, moment):
    """As a part of it is dropped: each reads sound, and files of both together do not."""
    copy = tmp_path / folder.parent.name / folder.name
    shutil.copytree(folder.parent, copy.parent)
    other = write_checkpoint(tmp_path / "other", [{"w": WORDS + 1}, {"w": torch.ones(3)}])
    aside, read = copy.with_name("aside"), []

    def swap(nbytes: int) -> None:
        read.append(nbytes)
        if len(read) == moment:
            copy.rename(aside)
            if back:
                shutil.copytree(other, copy)

    found = scrub_piece(str(copy), BEGIN, 100 * BLOCK_NBYTES, XXH3, swap)
    assert found.problems == []
    assert len(read) >= moment
    assert found.gone or back
    assert not back or pieces(copy, 100 * BLOCK_NBYTES)[0].problems == []
