"""A checkpoint that loses its optimizer while others work on it: mends, pins, another drop, a daemon, Ctrl-C."""

import errno
import json
import os
import re
import shutil
import time
from pathlib import Path

import pytest
import torch

from ckptd.checkpoint import reduce
from ckptd.checkpoint.reduce import Whole
from ckptd.checkpoint.repair.copies import mend_from_copies
from ckptd.checkpoint.repair.run import rebuild
from ckptd.checkpoint.verify import verify_path
from ckptd.shared.base.errors import CkptdError, DamagedError, UsageError
from ckptd.shared.base.ids import SaveId
from ckptd.shared.format.integrity import XXH3
from ckptd.shared.format.manifest import LINKED, UNPUBLISHED
from ckptd.store.opening import open_store
from ckptd.store.posix.removal import LESS_PREFIX
from ckptd.system.files import FileLayer
from tests.checkpoints import write_checkpoint
from tests.runs import RUN
from tests.unit.verbs import in_process

SAVES = [SaveId(1, counter, 10 * counter, RUN) for counter in (1, 2, 3)]
IMAGE = "r00001-p00.safetensors"
PRUNE = ("prune", "--keep-last", "3", "--keep-whole", "2")


def state_of(rank):
    generator = torch.Generator().manual_seed(rank)
    model, moments = torch.randn(300, 7, generator=generator), torch.randn(9 << 10, generator=generator)
    return {"model": {"w": model}, "optimizer": {"m": moments}, "scheduler": {"s": torch.ones(5)}}


@pytest.fixture
def paths(tmp_path):
    states = [state_of(rank) for rank in range(2)]
    return [Path(write_checkpoint(tmp_path / "store", states, job="job", save=save)) for save in SAVES]


@pytest.fixture
def old(paths):
    return paths[0]


@pytest.fixture
def ckptd(capsys, monkeypatch, tmp_path):
    return in_process(capsys, monkeypatch, tmp_path)


def drop(old, *keys):
    return Whole(open_store(str(old.parent.parent), XXH3), "job", SAVES[0]).drop(keys or ["optimizer"], "test")


def dropped(old):
    return json.loads((old / "COMMITTED").read_text()).get("dropped", [])


def hidden(old):
    return [name for name in os.listdir(old.parent) if re.match(r"\.(trash|whole|less|step)", name)]


def at_call(monkeypatch, owner, name, number, work):
    """Work is done right before a call of that number."""
    calls, original = [], getattr(owner, name)

    def called(*args, **options):
        calls.append(args)
        if len(calls) == number:
            work()
        return original(*args, **options)

    monkeypatch.setattr(owner, name, called)
    return calls


def at_rename(monkeypatch, suffix, work):
    """Work is done right before the rename of something whose new name ends so."""
    original, done = FileLayer.rename, []

    def rename(self, src, dst):
        if dst.endswith(suffix) and "trash" not in dst and not done:
            done.append(dst)
            work()
        return original(self, src, dst)

    monkeypatch.setattr(FileLayer, "rename", rename)
    return done


def from_copies(old, progress):
    """An image is written again from a slot."""
    copy = old.parent.parent / "slot1"
    shutil.copy(old / IMAGE, copy)
    with open(old / IMAGE, "r+b") as file:
        file.seek(5000)
        file.write(b"XXXX")
    done = mend_from_copies(str(old), {0: str(copy), 1: str(copy)}, progress, XXH3)
    assert (done.written, done.sound, done.problems) == ({1}, {0}, {})


def by_rebuild(old, progress):
    """A file of the wrong size whose blocks are all there needs no parity."""
    with open(old / IMAGE, "ab") as file:
        file.write(b"tail")
    assert rebuild(str(old), progress).rebuilt == [str(old / IMAGE)]


@pytest.mark.parametrize("mend", [from_copies, by_rebuild])
@pytest.mark.parametrize("moment", [1, 2, "rename"])
def test_a_mend_under_way_writes_nothing_into_what_takes_the_place(tmp_path, old, monkeypatch, mend, moment):
    shutil.copytree(tmp_path / "store", tmp_path / "other")
    made, aside, seen = tmp_path / "other/job" / old.name, old.with_name("aside"), []
    drop(made)

    def swap():
        old.rename(aside)
        made.rename(old)

    def progress(_nbytes):
        seen.append(1)
        if len(seen) == moment:
            swap()

    if moment == "rename":
        at_rename(monkeypatch, f"/{IMAGE}", swap)
    mend(old, progress)
    assert dropped(old) == ["optimizer"]
    for path in (old, aside):
        assert verify_path(str(path)).problems == []


def test_what_was_written_is_read_back_before_the_whole_one_goes(old, monkeypatch):
    original = FileLayer.fsync

    def fsync(self, fd):
        path = os.readlink(f"/proc/self/fd/{fd}")
        if f".{IMAGE}" in path:
            os.pwrite(fd, b"XXXX", 200)
        original(self, fd)

    monkeypatch.setattr(FileLayer, "fsync", fsync)
    with pytest.raises(DamagedError, match=rf"{IMAGE}.* block 0 .*digest does not match"):
        drop(old)
    assert verify_path(str(old)).problems == []
    assert (dropped(old), hidden(old)) == ([], [])


def test_more_keys_than_committed_takes_are_refused_before_anything_is_written(tmp_path, monkeypatch, ckptd):
    keys = [f"{number:02d}" + "語" * 400 for number in range(64)]
    state = {"model": torch.randn(10), **{key: torch.zeros(1) for key in keys}}
    old = Path(write_checkpoint(tmp_path / "store", [state], job="job", save=SAVES[0]))
    monkeypatch.setattr("ckptd.system.files.FileLayer.mkdir", None)
    with pytest.raises(UsageError, match=r"keys that were dropped have 77,.* bytes, at most 8,192"):
        drop(old, *keys)
    flags = [flag for key in keys for flag in ("--drop", key)]
    assert ckptd(*PRUNE, *flags, old.parent)[0] == 2


def pinned(old):
    return lambda: open_store(str(old.parent.parent), XXH3).pin("job", old.name)


def linked(old):
    return (old / LINKED).mkdir


def unpublished(old):
    return (old / UNPUBLISHED).touch


@pytest.mark.parametrize("mark", [pinned, linked, unpublished])
def test_what_is_pinned_or_published_while_a_drop_runs_stays_whole(old, monkeypatch, mark):
    at_call(monkeypatch, reduce, "_copy", 2, mark(old))
    with pytest.raises(CkptdError, match="stays whole"):
        drop(old)
    assert (dropped(old), hidden(old)) == ([], [])


@pytest.mark.parametrize("mark", [linked, unpublished])
def test_what_is_published_right_before_the_rename_stays_whole(old, monkeypatch, mark):
    assert at_rename(monkeypatch, f"/.whole-{old.name}", mark(old)) == []
    with pytest.raises(CkptdError, match="stays whole"):
        drop(old)
    assert (dropped(old), hidden(old)) == ([], [])


def test_a_pin_right_before_the_rename_holds(old, monkeypatch):
    at_rename(monkeypatch, f"/.whole-{old.name}", pinned(old))
    with pytest.raises(CkptdError, match="was pinned"):
        drop(old)
    assert (dropped(old), hidden(old)) == ([], [])


def test_a_pin_that_comes_between_says_that_the_checkpoint_is_another_one(old, monkeypatch):
    store = open_store(str(old.parent.parent), XXH3)
    at_call(monkeypatch, type(store.records("job")), "put", 1, lambda: drop(old))
    with pytest.raises(UsageError, match="was written again meanwhile"):
        store.pin("job", old.name)
    assert not store.standings("job")[0][old.name].pinned
    assert dropped(old) == ["optimizer"]


@pytest.mark.parametrize("suffix", ["/COMMITTED", f"/.whole-{SAVES[0].dirname}"])
def test_of_two_drops_the_later_one_takes_nothing_back(old, monkeypatch, suffix):
    at_rename(monkeypatch, suffix, lambda: drop(old, "scheduler"))
    with pytest.raises(CkptdError, match="made again meanwhile"):
        drop(old)
    assert dropped(old) == ["scheduler"]
    assert hidden(old) == []
    assert verify_path(str(old)).problems == []
    drop(old)
    assert dropped(old) == ["optimizer", "scheduler"]


def test_a_daemons_look_sees_nothing_unfinished_while_a_drop_runs(old, monkeypatch):
    store, found = open_store(str(old.parent.parent), XXH3), []

    def look():
        found.extend(store.scan("job").partials)
        store.discard("job", SAVES[0])
        store.sweep("job")

    at_call(monkeypatch, reduce, "_copy", 2, look)
    drop(old)
    assert (found, dropped(old), hidden(old)) == ([], ["optimizer"], [])


def test_what_a_killed_drop_left_goes_after_a_day(old, monkeypatch):
    store = open_store(str(old.parent.parent), XXH3)
    (left := old.with_name(f"{LESS_PREFIX}{old.name}-0123456789ab")).mkdir()
    (left / "COMMITTED").touch()
    store.sweep("job", all_of_it=False)
    assert left.exists()
    os.utime(left, (time.time() - 90_000,) * 2)
    store.sweep("job", all_of_it=False)
    assert hidden(old) == []


def test_a_whole_one_that_cannot_be_removed_is_a_note(old, monkeypatch, ckptd):
    original = FileLayer.rmtree

    def rmtree(self, path):
        if "whole" in path:
            raise OSError(errno.ENOTEMPTY, "Directory not empty", path)
        return original(self, path)

    monkeypatch.setattr(FileLayer, "rmtree", rmtree)
    found = json.loads(ckptd(*PRUNE, "--drop", "optimizer", old.parent, "--json")[1])
    assert [(one["dropped"], one["why"]) for one in found["reduced"]] == [(True, "")]
    assert "has lost the part; of the whole one something is left: [Errno 39] Directory not empty" in "\n".join(
        found["problems"]
    )
    assert dropped(old) == ["optimizer"]
    monkeypatch.undo()
    assert ckptd("prune", "--keep-last", "3", old.parent)[0] == 0
    assert hidden(old) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(errno.EIO, "Input/output error")])
def test_what_ends_a_drop_between_its_renames_leaves_the_name(old, monkeypatch, error):
    def interrupt():
        raise error

    at_rename(monkeypatch, f"/{old.name}", interrupt)
    with pytest.raises((KeyboardInterrupt, OSError)):
        drop(old)
    monkeypatch.undo()
    assert (dropped(old), hidden(old)) == ([], [])
    assert verify_path(str(old)).problems == []


def test_a_drop_without_room_writes_nothing(old, monkeypatch):
    store = type(open_store(str(old.parent.parent), XXH3))
    stays = sum((old / name).stat().st_size for name in os.listdir(old) if name.endswith(".safetensors"))
    monkeypatch.setattr(store, "space", lambda _self: (stays, 1 << 40))
    monkeypatch.setattr(FileLayer, "mkdir", None)
    with pytest.raises(CkptdError, match=r"needs .*, the store has .* free") as refused:
        drop(old)
    assert "free space" in refused.value.hint


def test_a_sweep_keeps_the_whole_one_where_the_other_went_meanwhile(old, monkeypatch):
    """The only copy of a checkpoint is not removed on the word of an earlier look."""
    store, whole = open_store(str(old.parent.parent), XXH3), old.with_name(f".whole-{old.name}")
    shutil.copytree(old, whole)
    original = FileLayer.rename

    def rename(self, src, dst):
        if src == str(whole) and old.exists():
            shutil.rmtree(old)
        return original(self, src, dst)

    monkeypatch.setattr(FileLayer, "rename", rename)
    store.sweep("job")
    assert verify_path(str(old)).problems == []
