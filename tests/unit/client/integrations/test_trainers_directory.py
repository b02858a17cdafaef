"""The parts under integrations: a latch that other processes wait for, and links in a trainer's own directory."""

import multiprocessing
import os
import signal
import time

import pytest
import torch
from msgspec.structs import replace

from ckptd.shared.base.errors import DamagedError, IntegrityError, UsageError
from ckptd.shared.base.ids import JobKey, SaveId
from ckptd.shared.format.integrity import XXH3, Keyed
from ckptd.shared.format.origin import Origin
from ckptd_client.integrations._kit.directory import link_images, link_listing, origin_of, promise
from ckptd_client.integrations._kit.durable import Durable
from ckptd_client.integrations._kit.latch import Latch, await_latch
from tests.checkpoints import write_checkpoint
from tests.runs import OTHER_RUN, RUN

SAVE = SaveId(3, 1, 100, RUN)
IMAGES = ["r00000-p00.safetensors", "r00001-p00.safetensors", "r00001-p01.safetensors"]
LISTED = [".metadata", "objects.pt"]


def _hold(pipe):
    latch = Latch()
    pipe.send(latch.place)
    time.sleep(60)


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_who_waits_for_a_latch_is_let_go_when_it_opens(method):
    latch = Latch()
    waiting = multiprocessing.get_context(method).Process(target=await_latch, args=latch.place)
    waiting.start()
    waiting.join(3)
    assert waiting.is_alive()
    latch.open()
    waiting.join(20)
    assert waiting.exitcode == 0
    latch.close()


def test_who_waits_for_a_latch_is_let_go_when_its_holder_is_killed():
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    holder = context.Process(target=_hold, args=(theirs,))
    holder.start()
    waiting = context.Process(target=await_latch, args=mine.recv())
    waiting.start()
    waiting.join(3)
    assert waiting.is_alive()
    os.kill(holder.pid, signal.SIGKILL)
    waiting.join(20)
    assert waiting.exitcode == 0
    holder.join()


def test_nobody_waits_for_a_latch_of_its_own_or_of_one_who_is_gone():
    latch = Latch()
    await_latch(*latch.place)
    place = latch.place
    latch.close()
    latch.close()
    await_latch(2**22 - 1, place[1])
    latch.open()  # as a thread may, which waited for the end of a save, when that is landed already


def test_what_something_else_was_saved_over_is_not_what_was_promised(committed, tmp_path):
    folder = str(tmp_path / "iter_100")
    os.mkdir(folder)
    promise(folder, committed.origin)
    link_images(folder, committed)
    link_listing(folder, committed)
    assert origin_of(folder) == committed.origin
    with open(f"{folder}/.metadata.tmp", "w") as file:
        file.write("of the trainer's own saver")
    os.rename(f"{folder}/.metadata.tmp", f"{folder}/.metadata")
    assert origin_of(folder) is None


@pytest.fixture
def committed(tmp_path):
    """A checkpoint of two ranks, as far as links go."""
    store = tmp_path / "store"
    path = write_checkpoint(store, [{"w": torch.arange(5.0), "lr": 0.1}] * 2, job="job", save=SAVE)
    (path / IMAGES[-1]).write_text("a part")
    assert {*IMAGES, *LISTED} <= set(os.listdir(path))
    return Durable.find(Origin.of(JobKey(str(store), "job"), SAVE), XXH3)


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_directory_gets_links_and_its_listing_last(committed, tmp_path, elsewhere, caplog):
    """elsewhere: on another file system, where there can be no hard links."""
    folder = f"/dev/shm/ckptd-test-links-{os.getpid()}" if elsewhere else str(tmp_path / "iter_100")
    os.mkdir(folder)
    try:
        with open(os.path.join(folder, ".metadata"), "w") as file:
            file.write("of an older checkpoint")
        promise(folder, committed.origin)
        assert sorted(os.listdir(folder)) == [".ckptd"]
        assert origin_of(folder) == committed.origin
        assert origin_of(folder).save == SAVE
        link_images(folder, committed, 1)
        assert sorted(os.listdir(folder)) == [".ckptd", *IMAGES[1:]]
        link_images(folder, committed)
        link_images(folder, committed)  # as often as one likes
        assert sorted(os.listdir(folder)) == [".ckptd", *IMAGES]
        link_listing(folder, committed, synced=[IMAGES[0]])
        assert sorted(os.listdir(folder)) == [".ckptd", ".metadata", "objects.pt", *IMAGES]
        for name in [*LISTED, *IMAGES]:
            path = os.path.join(folder, name)
            assert os.path.islink(path) == elsewhere
            assert os.path.samefile(path, os.path.join(committed.origin.path, name))
        assert caplog.text.count("when ckptd's retention") == elsewhere  # and is told once
    finally:
        for name in os.listdir(folder):
            os.unlink(os.path.join(folder, name))
        os.rmdir(folder)


def test_no_links_are_made_but_of_the_very_save_that_was_promised(committed, tmp_path):
    """Its name in the store is that of other runs' saves too, and of a step that was saved again."""
    origin = committed.origin
    for save in (replace(SAVE, run=OTHER_RUN), replace(SAVE, counter=SAVE.counter + 1)):
        other = Origin.of(JobKey(origin.store, origin.job), save)
        assert other.path == origin.path
        assert Durable.find(other, XXH3) is None
        with pytest.raises(UsageError, match=f"holds {SAVE.text}, not {save.text}"):
            Durable(other, committed.committed)
    os.rename(origin.path, f"{origin.path}.old")
    assert Durable.find(origin, XXH3) is None


def test_what_says_that_it_is_committed_must_be_proved(committed):
    """As the client that asks has it."""
    with pytest.raises(IntegrityError, match="is not keyed"):
        Durable.find(committed.origin, Keyed(b"k" * 32))
    with open(f"{committed.origin.path}/COMMITTED", "w") as file:
        file.write("{}")
    with pytest.raises(DamagedError, match="COMMITTED"):
        Durable.find(committed.origin, XXH3)


def test_nothing_is_known_of_a_directory_that_nothing_was_promised_of(tmp_path):
    assert origin_of(tmp_path) is None
    assert origin_of(tmp_path / "none") is None
    (tmp_path / ".ckptd").write_text("no json")
    assert origin_of(tmp_path) is None
