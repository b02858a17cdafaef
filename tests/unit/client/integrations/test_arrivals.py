"""Directories that appear when their saves are durable: what goes wrong with one holds up nobody."""

import json
import os
import threading

import pytest
import torch

from ckptd.shared.base.ids import JobKey, SaveId
from ckptd.shared.format.origin import MARKER, Origin
from ckptd_client.client import staging_of
from ckptd_client.integrations._kit.arrivals import Arrivals
from ckptd_client.integrations._kit.directory import origin_of, promise
from tests.runs import RUN

SAVE = SaveId(1, 1, 1, RUN)


@pytest.fixture
def arrivals(join):
    """One, its client, and a save on its way."""
    client = join()
    handle = client.save({"w": torch.arange(5.0)}, 7, drain=True)
    return Arrivals(client), client, handle


def expect(arrivals, client, handle, place, files=None):
    origin = Origin.of(staging_of(client).job, handle.save_id)
    arrivals.expect(str(place), origin, files or {"meta.pt": b"meta"}, handle)


def settled(arrivals):
    waiting = threading.Thread(target=arrivals.settle, daemon=True)
    waiting.start()
    waiting.join(20)
    return not waiting.is_alive()


def test_a_place_that_is_asked_for_twice_appears(arrivals, tmp_path):
    """As where Lightning saves to one path twice at one step."""
    found, client, handle = arrivals
    place = tmp_path / "last.ckpt"
    expect(found, client, handle, place)
    expect(found, client, handle, place)
    assert settled(found)
    assert sorted(os.listdir(tmp_path)) == ["last.ckpt"]
    assert {MARKER, ".metadata", "meta.pt"} <= set(os.listdir(place))


def test_what_names_a_checkpoint_of_another_store_gets_none_of_its_files(arrivals, tmp_path):
    """A marker in a directory that was handed over could name any: what fits would get a second name there."""
    found, _, handle = arrivals
    private = Origin.of(JobKey(str(tmp_path / "private"), "job"), SAVE)
    os.makedirs(private.path)
    for name in ("COMMITTED", ".metadata", "r00000-p00.safetensors"):
        with open(os.path.join(private.path, name), "w") as file:
            file.write("mine")
    hidden = tmp_path / "run" / ".last.ckpt.ckptd-x-0"
    hidden.mkdir(parents=True)
    promise(str(hidden), private)
    found.finish(str(tmp_path / "run"))
    assert os.listdir(tmp_path / "run") == [hidden.name]
    assert os.listdir(hidden) == [MARKER]
    handle.wait("durable", 20)


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


def test_one_that_is_half_prepared_is_taken_for_no_earlier_lifes(arrivals, tmp_path):
    """The thread sweeps the folder for what came before, while the next one is written there."""
    found, client, handle = arrivals

    class Meddling(dict):
        def items(self):
            for item in super().items():
                found.finish(str(tmp_path))
                yield item
            found.finish(str(tmp_path))

    expect(found, client, handle, tmp_path / "last.ckpt", Meddling({"meta.pt": b"meta", "more": b""}))
    assert settled(found)
    assert {MARKER, ".metadata", "meta.pt", "more"} <= set(os.listdir(tmp_path / "last.ckpt"))


def test_what_nobody_foresaw_holds_up_nobody(arrivals, tmp_path):
    found, client, handle = arrivals
    found._then(lambda: 1 // 0)
    expect(found, client, handle, tmp_path / "step7.ckpt")
    assert settled(found)
    assert (tmp_path / "step7.ckpt" / ".metadata").exists()


def test_its_thread_ends_with_it(arrivals, tmp_path):
    found, client, handle = arrivals
    expect(found, client, handle, tmp_path / "step7.ckpt")
    thread = found._thread
    found.close()
    thread.join(20)
    assert not thread.is_alive()
    assert (tmp_path / "step7.ckpt" / ".metadata").exists(), "what was asked for before is done"
