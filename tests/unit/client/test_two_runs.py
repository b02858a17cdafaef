"""Two runs of one job that had one incarnation number, and saved one step: what was promised of one is not the other's.

A user emptied the job's directory and started over. The checkpoints of both have one name in the store.
"""

import os

import pytest
import torch
from msgspec.structs import replace

from ckptd.shared.base.errors import SaveFailedError
from ckptd.shared.base.ids import SaveId
from ckptd.shared.format.manifest import STOCK_METADATA
from ckptd.shared.format.origin import MARKER, Origin
from ckptd_client.client import staging_of
from ckptd_client.integrations import lightning_sharded, megatron
from ckptd_client.integrations._kit.dcp_reader import reader_of
from ckptd_client.integrations._kit.drafts import (
    draft_of,
    drafts_in,
    finish,
    prepare,
    prepare_in_place,
    publish,
)
from ckptd_client.integrations._kit.staged import Content, stage
from tests.runs import OTHER_RUN, RUN

STEP = 7
pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def client(join):
    """Of the run that goes on. Its checkpoint of the step is committed."""
    client = join()
    client.save({"w": torch.arange(5.0)}, STEP, drain=True).wait("durable", 60)
    return client


@pytest.fixture
def run(tmp_path):
    """The trainer's folder."""
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def mine(client, step=STEP):
    return SaveId(client.incarnation, 1, step, bytes.fromhex(client.run))


def lost(client, step=STEP):
    """What the run before promised: all but the run's id is the same."""
    return Origin.of(staging_of(client).job, replace(mine(client, step), run=OTHER_RUN))


def announced(folder, name, origin):
    """The draft of a directory that is to appear."""
    draft = draft_of(str(folder / name), origin.save)
    prepare(draft, origin, {"meta.pt": b"of the run before"})
    return draft.path


# --- what was promised of a run that is lost never becomes the other's


def test_a_directory_of_the_lost_run_does_not_appear(client, run, caplog):
    """Its meta.pt would lie beside tensors of another run."""
    announced(run, "last.ckpt", lost(client))
    finish(client, str(run))
    assert os.listdir(run) == []
    assert "was lost" in caplog.text


def test_one_of_the_run_that_goes_on_appears(client, run):
    announced(run, "last.ckpt", Origin.of(staging_of(client).job, mine(client)))
    finish(client, str(run))
    assert {MARKER, STOCK_METADATA, "meta.pt"} <= set(os.listdir(run / "last.ckpt"))


def test_a_draft_of_the_lost_run_does_not_appear_by_anothers_commit(client, run):
    """Whichever save the rank has named to its daemon."""
    handle = client.save({"w": torch.arange(5.0)}, STEP + 1, drain=True)
    draft = draft_of(str(run / "last.ckpt"), handle.save_id)
    prepare(draft, lost(client, STEP + 1), {"meta.pt": b""})
    publish(client, handle.save_id, draft)
    handle.wait("durable", 60)
    publish(client, handle.save_id, draft)
    assert not (run / "last.ckpt").exists()


def test_a_step_of_that_number_in_memory_keeps_nothing_of_the_lost_run(client, run):
    """Nor does one of an earlier life of this run."""
    client.save({"w": torch.arange(5.0)}, STEP + 1).wait("staged", 60)
    announced(run, "a.ckpt", lost(client, STEP + 1))
    earlier = replace(mine(client, STEP + 1), incarnation=client.incarnation - 1)
    announced(run, "b.ckpt", Origin.of(staging_of(client).job, earlier))
    finish(client, str(run))
    assert os.listdir(run) == []


def test_it_is_read_from_no_checkpoint_of_another_run(client):
    theirs, own = lost(client), Origin.of(staging_of(client).job, mine(client))  # a load begins a new life
    assert reader_of(client, theirs) is None
    reader = reader_of(client, own)
    assert reader.step == STEP
    reader.close()


class Core:
    """As much of Megatron core as ``finish`` asks for."""

    def __init__(self):
        self.saved = []

    def module(self, _name):
        return self

    def check_is_distributed_checkpoint(self, _directory):
        return False

    def save_config(self, _config, directory):
        self.saved.append(directory)

    def CheckpointingConfig(self, *said):  # noqa: N802 - core's name
        return said


@pytest.fixture
def core(monkeypatch):
    core = Core()
    monkeypatch.setattr(megatron, "MEGATRON", core)
    return core


def test_megatron_finishes_no_directory_of_the_lost_run(client, run, core):
    prepare_in_place(str(run), lost(client), synced=())
    assert not megatron.finish(client, run, timeout_s=5)
    assert (os.listdir(run), core.saved) == ([MARKER], [])


def test_megatron_finishes_one_of_the_run_that_goes_on(client, run, core):
    prepare_in_place(str(run), Origin.of(staging_of(client).job, mine(client)), synced=())
    (run / "common.pt").touch()
    assert megatron.finish(client, run)
    assert STOCK_METADATA in os.listdir(run)
    assert core.saved == [str(run)]


def test_a_save_that_lands_is_there_only_where_its_checkpoint_still_is(client, run, node):
    """Somebody emptied the job's directory when it was durable, and the trainer's."""
    (run / "8").mkdir()
    staged = stage(client, lambda: Content({"w": torch.arange(5.0)}, {}), str(run / "8"))
    staged.settle()
    for name in {*os.listdir(run / "8")} - {MARKER}:
        os.unlink(run / "8" / name)
    os.rename(staged._origin.path, os.path.join(node.store, "elsewhere"))
    with pytest.raises(SaveFailedError, match="another run's"):
        staged.land()
    assert os.listdir(run / "8") == [MARKER]


# --- which is newer


@pytest.fixture
def saves(client, node):
    """Of a strategy of Lightning's, on rank 0."""
    client.close()
    saves = lightning_sharded._Saves({"job": client.job, "store": node.store, "arena": node.arena, "start": False})
    yield saves
    saves.client.close()


def aged(path, seconds):
    """As if it had been written so long ago."""
    now = os.stat(path).st_mtime
    os.utime(path, (now - seconds, now - seconds))


@pytest.mark.parametrize("first", [RUN, OTHER_RUN])
def test_of_two_runs_of_one_number_the_clock_says_which_is_newer(client, run, first):
    """Not their ids, which are random."""
    job, second = staging_of(client).job, OTHER_RUN if first == RUN else RUN
    older = [replace(mine(client), run=first, counter=counter) for counter in (3, 4)]
    newer = [replace(mine(client), run=second, counter=counter) for counter in (1, 2)]
    for save in reversed([*older, *newer]):
        hidden = announced(run, "last.ckpt", Origin.of(job, save))
        aged(hidden, 100 if save in older else 10)
    assert [found.origin.save for found in drafts_in(str(run))] == [*older, *newer]


def test_saves_of_one_run_are_ordered_by_their_number_whatever_the_clock_says(client, run):
    job = staging_of(client).job
    named = [replace(mine(client), counter=counter, step=step) for counter, step in ((1, 9), (2, 5), (3, 6))]
    named.append(replace(named[0], incarnation=client.incarnation + 1, run=RUN))
    for age, save in enumerate(named):
        aged(announced(run, "last.ckpt", Origin.of(job, save)), 10 * age)
    assert [found.origin.save for found in drafts_in(str(run))] == named


@pytest.mark.parametrize("other", [bytes(15) + b"\1", b"\xff" * 16])
def test_the_last_one_is_that_of_the_run_that_wrote_last(saves, client, run, other):
    job = staging_of(saves.client).job
    for name, save, age in (("before", replace(mine(client), run=other, counter=5), 100), ("after", mine(client), 0)):
        (run / name).mkdir()
        prepare_in_place(str(run / name), Origin.of(job, save), synced=())
        aged(run / name, age)
    assert saves.newest(str(run)) == str(run / "after")


@pytest.mark.parametrize("other", [bytes(15) + b"\1", b"\xff" * 16])
def test_what_lies_there_of_the_run_before_keeps_nothing_from_appearing(client, run, other):
    job = staging_of(client).job
    (run / "last.ckpt").mkdir()
    prepare_in_place(str(run / "last.ckpt"), Origin.of(job, replace(mine(client), run=other)), synced=())
    aged(run / "last.ckpt", 100)
    announced(run, "last.ckpt", Origin.of(job, mine(client)))
    finish(client, str(run))
    assert os.listdir(run) == ["last.ckpt"]
    assert STOCK_METADATA in os.listdir(run / "last.ckpt")


def test_what_is_there_is_loaded_where_only_another_run_has_the_step(saves, client, run):
    """Of what was to replace it nothing is left."""
    (run / "last.ckpt").mkdir()
    announced(run, "last.ckpt", lost(client))
    assert saves.source(str(run / "last.ckpt")) == str(run / "last.ckpt")
    draft = announced(run, "last.ckpt", Origin.of(staging_of(client).job, mine(client)))
    copy = saves.source(str(run / "last.ckpt"))
    assert copy not in {draft, str(run / "last.ckpt")}, "the daemon may make the place of the draft meanwhile"
    assert sorted(os.listdir(copy)) == sorted(os.listdir(draft))
