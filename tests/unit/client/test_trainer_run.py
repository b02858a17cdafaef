"""A trainer's own directories: which will appear, which will not, and what is done beside the training."""

import os
import threading

import pytest

from ckptd_client.integrations._trainer_run import STORE, TrainerRun
from tests.cluster import Node, wait_for

SLOW = ("--drain-bandwidth", "2M")
BIG = bytes(2 << 20)


@pytest.fixture
def begin(tmp_path, monkeypatch):
    for name in ("WORLD_SIZE", "RANK", "CKPTD_STORE", "CKPTD_JOB"):
        monkeypatch.delenv(name, raising=False)
    runs = []

    def make(node, place="out", **options):
        runs.append(TrainerRun(str(tmp_path / place), {"arena": node.arena, "start": False} | options))
        return runs[-1]

    yield make
    for run in runs:
        run.close()


def test_one_that_was_superseded_will_not_appear(tmp_path, begin, caplog):
    """It is told once; the newest becomes durable."""
    with Node(str(tmp_path)) as node:
        node.start(*SLOW)
        run = begin(node)
        places = [str(tmp_path / "out" / f"checkpoint-{step}") for step in range(3)]
        for step, place in enumerate(places):
            run.save({"a": BIG}, place, step)
            assert run.is_coming(place)
        run.settle()
        run.settle()
        assert [os.path.isdir(place) for place in places] == [True, False, True]
        assert [run.is_coming(place) for place in places] == [True, False, True]
        told = [record.message for record in caplog.records if "will not appear" in record.message]
        assert len(told) == 1
        assert f"{places[1]} will not appear: it ended superseded" in told[0]


def test_one_that_must_be_drained_is_not_superseded(tmp_path, begin):
    with Node(str(tmp_path)) as node:
        node.start(*SLOW)
        run = begin(node)
        places = [str(tmp_path / "out" / f"checkpoint-{step}") for step in range(3)]
        for step, place in enumerate(places):
            run.save({"a": BIG}, place, step, drain=step == 1)
        run.settle()
        assert [os.path.isdir(place) for place in places] == [True, True, True]


def test_the_store_is_beside_the_checkpoints_and_the_job_has_their_name(tmp_path, begin):
    with Node(str(tmp_path)) as node:
        node.start()
        one, other = begin(node, "a run"), begin(node, "deeper/a run")
        one.save({"a": b"1"}, str(tmp_path / "a run" / "checkpoint-1"), 1)
        one.settle()
        assert one.client.job.startswith("a-run-")
        assert one.client.job != other.client.job
        assert os.listdir(tmp_path / "a run" / STORE) == [one.client.job]


def test_the_one_of_a_directory_is_found(tmp_path, begin):
    """Whatever was saved after it; and of two for one directory the newer."""
    with Node(str(tmp_path)) as node:
        node.start()
        run = begin(node)
        for step, (place, data) in enumerate([("a", b"1"), ("b", b"2"), ("a", b"3"), ("c", b"4")]):
            run.save({"file": data}, str(tmp_path / place), step)
            run.settle()
        found = {}
        for place in "abc":
            with run.find(str(tmp_path / place)) as files:
                found[place] = bytes(files.read("file"))
        assert found == {"a": b"3", "b": b"2", "c": b"4"}
        assert run.find(str(tmp_path / "d")) is None


def test_the_newest_of_a_directory_has_the_highest_number(tmp_path, begin):
    """Also after a load that went back; and where another process goes on."""
    with Node(str(tmp_path)) as node:
        node.start()
        run = begin(node)
        for place, data in (("a", b"1"), ("b", b"2"), ("b", b"3")):
            run.save({"file": data}, str(tmp_path / place), None)
        run.find(str(tmp_path / "a")).close()
        run.save({"file": b"4"}, str(tmp_path / "b"), None)
        run.settle()
        run.close()
        again = begin(node)
        with again.find(str(tmp_path / "b")) as files:
            assert (bytes(files.read("file")), files.step) == (b"4", 3)
        again.save({"file": b"5"}, str(tmp_path / "a"), None)
        with again.find(str(tmp_path / "a")) as files:
            assert (bytes(files.read("file")), files.step) == (b"5", 4)


def test_what_is_done_aside_is_done_once_at_a_time_and_before_the_end(tmp_path, begin):
    with Node(str(tmp_path)) as node:
        node.start()
        run = begin(node)
        go, done = threading.Event(), []
        run.aside(lambda: (go.wait(20), done.append("first")))
        run.aside(lambda: done.append("second"))
        go.set()
        run.settle()
        assert done == ["first"]
        run.aside(lambda: done.append("third"))
        wait_for(lambda: done == ["first", "third"])
