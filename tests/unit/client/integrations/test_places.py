"""Directories that the daemon publishes when their saves are durable, and those that go when a newer one is there."""

import json
import os
import time

import pytest
import torch

from ckptd.shared.base.errors import CkptdError
from ckptd.shared.base.ids import JobKey, SaveId
from ckptd.shared.format.origin import MARKER, Origin
from ckptd_client.client import staging_of
from ckptd_client.dcp import CkptdWriter
from ckptd_client.integrations._kit.drafts import (
    discard,
    draft_in_place,
    draft_of,
    finish,
    is_filled,
    origin_of,
    prepare,
    prepare_in_place,
    publication_of,
    publish,
)
from ckptd_client.integrations._kit.places import Places
from tests.cluster import Node, wait_for
from tests.faults.mounts import FuseStore, needs_fuse
from tests.runs import RUN

SAVE = SaveId(1, 1, 1, RUN)
SLOW = ("--drain-bandwidth", "50000")
pytestmark = [pytest.mark.timeout(240), pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]


class Training:
    """Saves a state for places in a folder, as a strategy does."""

    def __init__(self, client, folder):
        self.client, self.folder = client, folder
        self.places = Places(client)
        self.step = 0

    def save(self, *names, files=None, elements=5):
        self.step += 1
        drafts = []

        class Writer(CkptdWriter):
            def _publication(_self, handle):  # noqa: N805 - the training is self
                drafts.append(draft_of(str(self.folder / names[0]), handle.save_id))
                to = publication_of(self.client, drafts[0])
                self.places.expect(drafts[0], files or {"meta.pt": b"meta"}, handle)
                return to

        writer = Writer(self.client, wait=None, drain=True)
        torch.distributed.checkpoint.save(
            {"w": torch.arange(float(elements))}, checkpoint_id=str(self.step), storage_writer=writer, no_dist=True
        )
        for name in names[1:]:
            drafts.append(draft_of(str(self.folder / name), writer.handle.save_id))
            self.places.expect_too(drafts[-1], {"meta.pt": name.encode()}, writer.handle)
        return writer.handle

    def shown(self):
        return sorted(name for name in os.listdir(self.folder) if not name.startswith("."))


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


@pytest.fixture
def training(join, folder):
    return Training(join(), folder)


def test_a_place_appears_by_the_daemon_alone(training, folder):
    """Nobody of the training does anything about it."""
    training.save("a.ckpt")
    assert wait_for(lambda: training.shown() == ["a.ckpt"])
    assert {MARKER, ".metadata", "meta.pt"} <= set(os.listdir(folder / "a.ckpt"))
    assert wait_for(lambda: os.listdir(folder) == ["a.ckpt"])


@pytest.mark.parametrize("durable", [False, True])
def test_one_save_appears_at_two_places(training, folder, durable):
    handle = training.save("best.ckpt", "last.ckpt")
    if durable:
        handle.wait("durable", 60)
        draft = draft_of(str(folder / "late.ckpt"), handle.save_id)
        training.places.expect_too(draft, {"meta.pt": b"late.ckpt"}, handle)
        wait_for((folder / "late.ckpt").exists)
        assert (folder / "late.ckpt" / "meta.pt").read_bytes() == b"late.ckpt"
    training.places.settle()
    assert os.path.samefile(folder / "best.ckpt" / ".metadata", folder / "last.ckpt" / ".metadata")
    assert (folder / "last.ckpt" / "meta.pt").read_bytes() == b"last.ckpt"
    assert origin_of(folder / "best.ckpt").save == handle.save_id


@needs_fuse
def test_a_second_place_does_not_wait_for_a_store_that_hangs(join, folder, tmp_path):
    with FuseStore(str(tmp_path)) as fuse, Node(fuse.path) as node:
        node.log = str(tmp_path / "daemon.log")
        node.start()
        training = Training(join(on=node), folder)
        handle = training.save("best.ckpt")
        handle.wait("durable", 60)
        fuse.hang()
        began = time.monotonic()
        training.places.expect_too(draft_of(str(folder / "last.ckpt"), handle.save_id), {"meta.pt": b"last"}, handle)
        assert time.monotonic() - began < 8, "save_timeout_s is 10"
        assert training.shown() == ["best.ckpt"]
        fuse.go_on()
        wait_for((folder / "last.ckpt").exists)
        assert (folder / "last.ckpt" / "meta.pt").read_bytes() == b"last"


@needs_fuse
def test_a_place_that_does_not_appear_because_the_store_ended_is_a_note_in_the_status(join, folder, tmp_path):
    """And the next look at the store makes it."""
    with FuseStore(str(tmp_path)) as fuse, Node(fuse.path) as node:
        node.log = str(tmp_path / "daemon.log")
        node.start("--store-hang-s", "1")
        client = join(on=node)
        training = Training(client, folder)
        handle = training.save("best.ckpt")
        handle.wait("durable", 60)
        fuse.hang()
        training.places.expect_too(draft_of(str(folder / "last.ckpt"), handle.save_id), {"meta.pt": b"last"}, handle)
        text = f"{handle.save_id} is not published: {fuse.path} hangs"
        wait_for(lambda: any(text in error for error in node.job(client.job).errors))
        fuse.go_on()
        state = {"w": torch.zeros(5)}
        assert client.load(state) is not None  # a daemon looks at the store at each load
        wait_for((folder / "last.ckpt").exists)


def test_a_place_that_is_asked_for_twice_appears(training, folder):
    """As where Lightning saves to one path twice at one step."""
    training.save("last.ckpt", "last.ckpt")
    training.places.settle()
    assert os.listdir(folder) == ["last.ckpt"]
    assert (folder / "last.ckpt" / "meta.pt").read_bytes() == b"last.ckpt"


def test_what_is_removed_goes_when_the_next_is_there(join, folder, tmp_path):
    with Node(str(tmp_path)) as slow:
        slow.start(*SLOW)
        training = Training(join(on=slow), folder)
        training.save("1.ckpt").wait("durable", 60)
        training.save("2.ckpt", elements=20_000)
        training.places.remove(str(folder / "1.ckpt"))
        assert training.shown() == ["1.ckpt"]
        training.places.settle()
        assert training.shown() == ["2.ckpt"]


def test_what_was_lost_keeps_what_was_to_go_before_it(training, folder, caplog):
    training.save("1.ckpt").wait("durable", 60)
    handle = training.save("2.ckpt", elements=6)
    handle.wait("durable", 60)
    handle._record.known_end, handle._record.reason = "failed", "for a test"
    training.places.remove(str(folder / "1.ckpt"))
    training.places.settle()
    assert "1.ckpt" in training.shown()
    assert "kept, since a later checkpoint failed" in caplog.text


def test_what_a_killed_training_and_a_killed_daemon_left_appears(join, folder, tmp_path):
    """Its daemon comes back with the next one, and finds in the arena what was wanted."""
    with Node(str(tmp_path)) as slow:
        slow.start(*SLOW)
        training = Training(join(on=slow), folder)
        training.save("a.ckpt", "b.ckpt", elements=20_000).wait("staged", 60)
        slow.kill()
        training.client._link.close()
        slow.start()
        assert wait_for(lambda: training.shown() == ["a.ckpt", "b.ckpt"])


def test_what_no_daemon_knows_any_more_the_next_run_finishes(join, folder, job):
    """As after the loss of a node between the commit and the publication."""
    client = join()
    handle = client.save({"w": torch.arange(5.0)}, 1, drain=True)
    handle.wait("durable", 60)
    draft = draft_of(str(folder / "a.ckpt"), handle.save_id)
    prepare(draft, Origin.of(staging_of(client).job, handle.save_id), {"meta.pt": b"meta"})
    half = folder / ".b.ckpt.ckptd-00000001"
    half.mkdir()
    client.close()
    later = join()
    finish(later, str(folder))
    assert sorted(os.listdir(folder)) == [half.name, "a.ckpt"], "another training may be preparing it"
    os.utime(half, (0, 0))
    finish(later, str(folder))
    assert os.listdir(folder) == ["a.ckpt"]


def test_nothing_is_removed_for_a_durable_save_whose_place_cannot_appear(join, folder, tmp_path):
    with Node(str(tmp_path)) as slow:
        slow.start(*SLOW)
        training = Training(join(on=slow), folder)
        training.save("a.ckpt").wait("durable", 60)
        assert wait_for(lambda: training.shown() == ["a.ckpt"])
        handle = training.save("b.ckpt", elements=20_000)
        (draft,) = folder.glob(".b.ckpt.ckptd-*")
        (draft / MARKER).unlink()
        (draft / MARKER).mkdir()
        training.places.remove(str(folder / "a.ckpt"))
        handle.wait("durable", 60)
        training.places.remove(str(folder / "none.ckpt"))
        training.places.still()
        assert "a.ckpt" in training.shown()


def test_a_place_that_can_never_appear_keeps_its_own_checkpoint_and_no_other(join, node, folder):
    """Retention says so, and what to type; then the checkpoint goes with the next commit."""
    client = join(layout="plain")
    saves = [client.save({"w": torch.arange(5.0)}, 1, drain=True)]
    draft = draft_of(str(folder / "a.ckpt"), saves[0].save_id)
    prepare(draft, Origin.of(staging_of(client).job, saves[0].save_id), {})
    saves[0].wait("durable", 60)
    with pytest.raises(CkptdError, match=r"has no \.metadata"):
        publish(client, saves[0].save_id, draft)
    for step in range(2, 7):
        saves.append(client.save({"w": torch.arange(5.0)}, step, drain=True))
        saves[-1].wait("durable", 60)
    names = [save.save_id.dirname for save in saves]
    job = os.path.join(node.store, client.job)
    wait_for(lambda: not {*names[1:3]} & {*os.listdir(job)})
    assert {names[0], *names[3:]} <= {*os.listdir(job)}
    text = f"to give that place up: rm -r {draft.path}: it stays until it is"
    wait_for(lambda: any(text in error for error in node.job(client.job).errors))
    discard(draft.path)
    client.save({"w": torch.arange(5.0)}, 7, drain=True).wait("durable", 60)
    wait_for(lambda: names[0] not in os.listdir(job))


def test_what_names_a_checkpoint_of_another_store_gets_none_of_its_files(join, folder, tmp_path):
    """A marker in a directory that was handed over could name any: what fits would get a second name there."""
    private = Origin.of(JobKey(str(tmp_path / "private"), "job"), SAVE)
    os.makedirs(private.path)
    for name in ("COMMITTED", ".metadata", "r00000-p00.safetensors"):
        with open(os.path.join(private.path, name), "w") as file:
            file.write("mine")
    draft = draft_of(str(folder / "last.ckpt"), SAVE)
    prepare(draft, private, {})
    client = join()
    finish(client, str(folder))
    publish(client, SAVE, draft)
    assert os.listdir(folder) == [os.path.basename(draft.path)]
    assert os.listdir(draft.path) == [MARKER]


def test_what_cannot_be_published_is_an_error_that_says_why(join, folder):
    client = join()
    handle = client.save({"w": torch.arange(5.0)}, 1, drain=True)
    handle.wait("durable", 60)
    origin = Origin.of(staging_of(client).job, handle.save_id)
    os.unlink(os.path.join(origin.path, "r00000-p00.safetensors"))
    prepare_in_place(str(folder), origin, synced=())
    with pytest.raises(CkptdError, match=r"run is not published: .*r00000-p00.safetensors"):
        is_filled(client, str(folder), origin)
    with pytest.raises(CkptdError, match="no place for files"):
        publish(client, handle.save_id, draft_in_place("/"))


@pytest.mark.parametrize(
    "word",
    [
        {"checkpoint": "../../home"}, {"job": "../x"}, {"store": "relative"}, {"save_id": "x"},
        {"save_id": SaveId(1, 1, 2, RUN).text}, {"checkpoint": "step-000000001.i0002"},
    ],
)  # fmt: skip
def test_a_marker_that_leads_elsewhere_is_none(word, tmp_path):
    said = {"store": "/s", "job": "j", "checkpoint": SAVE.dirname, "save_id": SAVE.text}
    (tmp_path / MARKER).write_text(json.dumps(said))
    assert origin_of(tmp_path).save == SAVE
    (tmp_path / MARKER).write_text(json.dumps(said | word))
    assert origin_of(tmp_path) is None


def test_nothing_is_known_of_a_directory_that_nothing_was_promised_of(tmp_path):
    assert origin_of(tmp_path) is None
    assert origin_of(tmp_path / "none") is None
    (tmp_path / ".ckptd").write_text("no json")
    assert origin_of(tmp_path) is None


def test_what_something_else_was_saved_over_is_not_what_was_promised(training, folder):
    training.save("a.ckpt")
    training.places.settle()
    assert origin_of(folder / "a.ckpt") is not None
    (folder / "a.ckpt" / "new").write_text("of the trainer's own saver")
    os.rename(folder / "a.ckpt" / "new", folder / "a.ckpt" / ".metadata")
    assert origin_of(folder / "a.ckpt") is None
