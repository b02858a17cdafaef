"""One flipped bit anywhere is found, and named with its file and block."""

import os
from pathlib import Path

import msgspec
import pytest

from ckptd.checkpoint import verify
from ckptd.checkpoint.report import Report
from ckptd.shared.base.ids import JobKey, SaveId
from ckptd.shared.format.digest import BLOCK_NBYTES
from ckptd.shared.format.manifest import COMMITTED, StockObjects, make_manifest
from ckptd.shared.format.slot import SEALS_NBYTES, Seal, SlotState, align_up
from ckptd.store.image import Flow, Image
from ckptd.store.posix.commit import commit, write_vote
from ckptd.store.posix.image_writer import make_set, write_image
from ckptd.store.posix.scan import Place
from ckptd.system.files import FileLayer
from tests.flips import flip
from tests.runs import MANIFEST, RUN, SET, VOTES, file_in, manifest_in, vote_in
from tests.slots import make_vote, reseal, some_tensors, write_slot

SAVE = SaveId(1, 2, 30, RUN)


def build(store: Path, save: SaveId = SAVE, *, nbytes: int = 5000, finish: bool = True) -> Path:
    """A checkpoint of two ranks on two nodes; its directory."""
    key = JobKey(str(store), "demo")
    fs, place = FileLayer(), Place(key, save)
    make_set(fs, place, SET)
    for rank in range(2):
        slot = write_slot(store / ".slot", key, save, some_tensors(nbytes, rank), rank=rank, world_size=2)
        padded = memoryview(slot.image.ljust(align_up(len(slot.image)), b"\0"))
        write_image(fs, place, SET, Image(slot.layout.file, len(slot.image), padded), Flow())
        write_vote(fs, key, make_vote(key, save, f"node{rank}", [slot], world_size=2))
    os.unlink(store / ".slot")
    if finish:
        commit(fs, key, save, "test")
    return Path(place.final if finish else place.partial)


def words(report: Report) -> str:
    return "\n".join(map(str, report.problems))


def test_a_sound_checkpoint_passes_however_it_is_named(tmp_path) -> None:
    final = build(tmp_path)
    told: list[int] = []
    for path in (final, final.parent, tmp_path):
        report = verify.verify_path(str(path), told.append)
        assert report.ok, words(report)
        assert (report.checked, report.files) == ([str(final)], 2)
        assert told[-1] == report.nbytes > 0
    assert verify.verify_path(str(final.parent)).ok
    assert verify.verify_path(str(final)).ok


def test_a_link_is_checked_as_what_it_points_at(tmp_path) -> None:
    final = build(tmp_path)
    latest = final.parent / "latest"
    latest.unlink(missing_ok=True)
    latest.symlink_to(final.name)
    for report in (verify.verify_path(f"{latest}/"), verify.verify_path(str(latest))):
        assert report.ok, words(report)
        assert (report.path, report.checked) == (str(final), [str(final)])


@pytest.mark.parametrize("at", [0, 9, 4096, 5000, -1])
def test_a_bit_of_a_file(tmp_path, at) -> None:
    final = build(tmp_path)
    file = final / "r00001-p00.safetensors"
    flip(file, at % file.stat().st_size, bit=3)
    report = verify.verify_path(str(final))
    assert not report.ok
    assert report.problems[0].block == 0
    assert f"{file}: block 0 (bytes 0 to " in words(report)
    assert "r00000" not in words(report)


def test_the_block_that_is_damaged_is_the_one_that_is_named(tmp_path) -> None:
    final = build(tmp_path, nbytes=2 * BLOCK_NBYTES)
    file = final / "r00000-p00.safetensors"
    flip(file, BLOCK_NBYTES + 5)
    (problem,) = verify.verify_path(str(final)).problems
    assert (problem.path, problem.block, problem.start, problem.stop) == (str(file), 1, BLOCK_NBYTES, 2 * BLOCK_NBYTES)


@pytest.mark.parametrize("name", [VOTES[1], MANIFEST, COMMITTED])
def test_any_bit_of_a_record(tmp_path, name) -> None:
    final = build(tmp_path)
    file = file_in(final, name)
    for at in range(0, file.stat().st_size, 3):
        flip(file, at, bit=at % 8)
        report = verify.verify_path(str(final))
        assert f"{file}: " in words(report), (at, words(report))
        flip(file, at, bit=at % 8)
    assert verify.verify_path(str(final)).ok


def test_files_are_still_checked_when_the_manifest_is_gone(tmp_path) -> None:
    final = build(tmp_path)
    os.unlink(manifest_in(final))
    flip(final / "r00000-p00.safetensors", 4100)
    assert "r00000-p00.safetensors: block 0" in words(verify.verify_path(str(final)))


def test_what_is_missing_short_or_strange_is_named(tmp_path) -> None:
    final = build(tmp_path)
    os.unlink(final / "r00000-p00.safetensors")
    os.truncate(final / "r00001-p00.safetensors", 4096)
    vote_in(final).with_name(f"stranger.{0:016x}.vote").write_bytes(b"x")
    (final / "extra.safetensors").write_bytes(b"x")
    (final / ".r00000-p00.safetensors.tmp-1").write_bytes(b"x")
    report = verify.verify_path(str(final))
    text = words(report)
    for part in ("r00000-p00.safetensors: missing", "r00001-p00.safetensors: 4096 bytes", "extra"):
        assert part in text
    assert any(".tmp-1" in note for note in report.notes)
    assert any("stranger" in note for note in report.notes), "no reader looks at it"


def test_what_a_short_file_lacks_is_one_problem(tmp_path) -> None:
    """Of a large one thousands of blocks are missing: a line for each would hide all else."""
    final = build(tmp_path, nbytes=2 * BLOCK_NBYTES)
    os.truncate(final / "r00000-p00.safetensors", 4096)
    of_blocks = [one for one in verify.verify_path(str(final)).problems if one.block is not None]
    assert [(one.block, one.what) for one in of_blocks] == [(0, "missing, and whatever comes after it in the file")]


def test_what_lies_beside_the_sets_is_noted(tmp_path) -> None:
    """A vote in a directory that no set has: nobody reads it."""
    final = build(tmp_path)
    place = final / "sets" / "elsewhere" / vote_in(final).name
    place.parent.mkdir()
    place.write_bytes(vote_in(final).read_bytes())
    report = verify.verify_path(str(final))
    assert report.ok
    assert report.notes == [f"{place}: no vote names it, may be deleted"]


def test_a_checkpoint_of_another_name_and_one_not_committed(tmp_path) -> None:
    final = build(tmp_path)
    moved = final.with_name("step-000000031.i0001")
    final.rename(moved)
    assert "lies in step-000000031.i0001" in words(verify.verify_path(str(moved)))
    os.unlink(moved / COMMITTED)
    assert "not committed" in words(verify.verify_path(str(moved)))


def test_records_of_another_save_are_noticed(tmp_path) -> None:
    final, other = build(tmp_path), build(tmp_path, SaveId(1, 3, 40, RUN))
    vote_in(final).write_bytes(vote_in(other).read_bytes())
    manifest_in(final).write_bytes(manifest_in(other).read_bytes())
    text = words(verify.verify_path(str(final)))
    assert f"does not match {manifest_in(final).name}: save" in text
    assert f"{manifest_in(other).name}" not in text
    assert "/sets/" in text, "its votes are missing"


def test_metadata_that_no_vote_has_is_damage(tmp_path, monkeypatch) -> None:
    def made(votes, **options):
        return msgspec.structs.replace(make_manifest(votes, **options), metadata={"loss": 0.1})

    monkeypatch.setattr("ckptd.store.posix.commit.make_manifest", made)
    final = build(tmp_path)
    (problem,) = verify.verify_path(str(final)).problems
    assert problem.path == str(manifest_in(final))
    assert "'loss': 0.1" in problem.what
    path = final / COMMITTED
    path.write_text(path.read_text().replace("0.1", "0.2"))
    assert "metadata: {'loss': 0.2} and {'loss': 0.1}" in words(verify.verify_path(str(final)))


def test_unfinished_saves_and_trash_are_notes(tmp_path) -> None:
    build(tmp_path)
    build(tmp_path, SaveId(1, 3, 40, RUN), finish=False)
    (tmp_path / "demo/.trash-x").mkdir()
    report = verify.verify_path(str(tmp_path))
    assert report.ok
    assert [note.rpartition(": ")[2] for note in report.notes] == [
        "left unfinished, unless a daemon is at work on it",
        "left by a removal, may be deleted unless a daemon is at work",
    ]


def test_a_path_that_is_nothing_says_so(tmp_path) -> None:
    assert "no checkpoint, job, store or arena" in words(verify.verify_path(str(tmp_path)))
    assert "No such file" in words(verify.verify_path(str(tmp_path / "nowhere")))
    (tmp_path / "lock").touch()
    report = verify.verify_path(str(tmp_path))
    assert (report.problems, report.notes) == ([], [f"{tmp_path}: an arena with nothing staged"])


def test_directories_that_are_none_of_ours_are_not_walked(tmp_path, monkeypatch) -> None:
    deep = tmp_path / "somebody/else"
    deep.mkdir(parents=True)
    (deep / "a.slot").write_bytes(b"x" * 100)
    build(deep)
    listed = []
    listdir = os.listdir
    monkeypatch.setattr(os, "listdir", lambda path: listed.append(str(path)) or listdir(path))
    assert "no checkpoint, job, store or arena" in words(verify.verify_path(str(tmp_path)))
    assert not any(path.startswith(str(deep)) for path in listed)


# -- slots --


@pytest.fixture
def slot(tmp_path):
    (tmp_path / "jobs").mkdir()
    key = JobKey("/store", "demo")
    tensors, objects = some_tensors(BLOCK_NBYTES + 5000), StockObjects(b"archives", {"step": (0, 8)})
    return write_slot(tmp_path / "jobs/r00000-0.slot", key, SAVE, tensors, objects=objects)


def test_a_sound_slot(tmp_path, slot) -> None:
    report = verify.verify_path(str(tmp_path))
    assert report.ok, words(report)
    assert (report.checked, report.notes, report.nbytes) == ([slot.path], [], len(slot.image))


def test_a_bit_of_a_slot(tmp_path, slot) -> None:
    parts = {
        4: "block 0 (bytes 0 to",
        BLOCK_NBYTES + 7: f"block 1 (bytes {BLOCK_NBYTES} to {len(slot.image) - 1})",
        slot.seal.table_offset: "digest table",
        slot.seal.layout_offset + 3: "layout",
        slot.seal.leaves_offset + 3: "leaves",
        slot.seal.objects_offset + 3: "objects",
    }
    for at, part in parts.items():
        flip(slot.path, at)
        assert f"{slot.path}: {part}" in words(verify.verify_path(str(tmp_path)))
        flip(slot.path, at)
    flip(slot.path, os.path.getsize(slot.path) - SEALS_NBYTES + 30)
    assert "seal page 0 is torn" in verify.verify_path(str(tmp_path)).notes[0]


def test_slots_without_digests_free_ones_and_impossible_ones(tmp_path, slot) -> None:
    write_slot(slot.path, JobKey("/store", "demo"), SAVE, state=SlotState.SEALED)
    report = verify.verify_path(str(tmp_path))
    assert report.ok
    assert "not yet digested" in report.notes[0]
    reseal(slot, Seal())
    assert verify.verify_path(str(tmp_path)).ok
    reseal(slot, Seal(state=SlotState.SEALED, save=SAVE, image_nbytes=1 << 40), sequence=3)
    assert "too few" in words(verify.verify_path(str(tmp_path)))
