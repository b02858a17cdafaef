"""A checkpoint that loses its optimizer while others work on it: mends, pins, another drop, a daemon, Ctrl-C."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from ckptd.checkpoint.reduce import Whole
from ckptd.checkpoint.repair.copies import mend_from_copies
from ckptd.checkpoint.repair.run import rebuild
from ckptd.checkpoint.verify import verify_path
from ckptd.shared.base.ids import SaveId
from ckptd.shared.format.integrity import XXH3
from ckptd.store.opening import open_store
from ckptd.system.files import FileLayer
from tests.checkpoints import write_checkpoint
from tests.runs import RUN

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


def drop(old, *keys):
    return Whole(open_store(str(old.parent.parent), XXH3), "job", SAVES[0]).drop(keys or ["optimizer"], "test")


def dropped(old):
    return json.loads((old / "COMMITTED").read_text()).get("dropped", [])


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
    assert mend_from_copies(str(old), {0: str(copy), 1: str(copy)}, progress, XXH3) == {0, 1}


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
