"""A trainer's own directories: which will appear, which will not, and what is done beside the training."""

import os
import threading

import pytest

from ckptd_client.integrations._kit.trainer_run import STORE, TrainerRun
from ckptd_client.integrations.hf import _place_to_resume as place_to_resume
from tests.cluster import Node, wait_for

SLOW = ("--drain-bandwidth", "2M")
HELD = ("--drain-bandwidth", "1")  # nothing is drained
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
        node.start("--drain-bandwidth", "400K")
        run = begin(node)
        places = [str(tmp_path / "out" / f"checkpoint-{step}") for step in range(3)]
        for step, place in enumerate(places):
            run.save({"a": BIG}, place, step)
            assert run.is_coming(place)
            wait_for(lambda: node.status().jobs[0].drain is not None)  # of the first, for five seconds
        run.settle()
        run.settle()
        assert [os.path.isdir(place) for place in places] == [True, False, True]
        assert [run.is_coming(place) for place in places] == [True, False, True]
        told = [record.message for record in caplog.records if "will not appear" in record.message]
        assert len(told) == 1
        assert f"{places[1]} will not appear: its save ended as 'superseded'" in told[0]


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
        assert sorted(os.listdir(tmp_path / "a run" / STORE)) == [".store-id", one.client.job]


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
        run.aside.run(lambda: (go.wait(20), done.append("first")))
        run.aside.run(lambda: done.append("second"))
        go.set()
        run.settle()
        assert done == ["first"]
        run.aside.run(lambda: done.append("third"))
        wait_for(lambda: done == ["first", "third"])


def test_without_a_daemon_training_goes_on_to_its_end(tmp_path, begin, caplog):
    """Whether or not the trainer has numbers, and what was staged may be durable or not."""
    with Node(str(tmp_path)) as node:
        node.start(*SLOW)
        run = begin(node, connect_timeout_s=1, save_timeout_s=1)
        run.save({"a": BIG}, str(tmp_path / "out" / "1"), None)
        run.find(str(tmp_path / "out" / "1")).close()
        node.kill()
        run.save({"a": BIG}, str(tmp_path / "out" / "2"), None)
        run.settle()
        assert "not known" in caplog.text
        assert "no daemon" in run.bring(str(tmp_path / "out" / "1"))


def test_what_another_process_altered_is_not_what_was_saved(tmp_path, begin):
    """A stock trainer that writes over it, or a user who removes what is not to be resumed."""
    with Node(str(tmp_path)) as node:
        node.start()
        run = begin(node)
        place = tmp_path / "out" / "checkpoint-1"
        run.save({"a": b"1", "b": b"2"}, str(place), 1)
        run.settle()
        run.newest().close()
        (place / "b").unlink()
        assert run.newest() is None
        assert run.find(str(place)) is None
        (place / "b").write_bytes(b"3")
        assert run.find(str(place)) is None


def test_of_two_saves_of_a_step_both_count(tmp_path, begin):
    with Node(str(tmp_path)) as node:
        node.start()
        run = begin(node)
        place = str(tmp_path / "out" / "checkpoint-1")
        for data in (b"1", b"2"):
            run.save({"file": data}, place, 1)
        run.settle()
        with open(f"{place}/file", "rb") as file:
            assert file.read() == b"2"


def test_the_newest_of_a_directory_counts_whatever_its_number(tmp_path, begin):
    """One that was saved twice, and so has the next step's number; then another training saves it anew."""
    with Node(str(tmp_path)) as node:
        node.start()
        place = str(tmp_path / "out" / "checkpoint-1")
        run = begin(node)
        run.save({"file": b"1"}, place, 1)
        run.save({"file": b"2"}, place, 1)
        run.settle()
        run.close()
        again = begin(node)
        again.save({"file": b"3"}, place, 1)
        with again.find(place) as files:
            assert files.read("file") == b"3"


def test_a_directory_that_is_brought_appears_whole(tmp_path, begin):
    with Node(str(tmp_path)) as node:
        node.start(*HELD)
        run = begin(node)
        place = tmp_path / "out" / "checkpoint-1"
        run.save({"a": b"1", "deep/b": b"2"}, str(place), 1)
        assert run.bring(str(place)) == ""
        assert (place / "deep" / "b").read_bytes() == b"2"
        assert "not saved" in run.bring(str(tmp_path / "out" / "checkpoint-2"))
        assert sorted(os.listdir(tmp_path / "out")) == [STORE, "checkpoint-1"]


def test_a_directory_that_a_newer_save_is_to_replace_is_resumed_from_that(tmp_path, begin):
    """As when a training went back, and was killed before its new checkpoint was drained."""
    with Node(str(tmp_path)) as node:
        node.start()
        out = str(tmp_path / "out")
        place = f"{out}/checkpoint-6"
        run = begin(node)
        run.save({"file": b"old"}, place, 6)
        run.settle()
        assert place_to_resume(run, out, place) == place
        run.close()
        node.stop()
        node.start(*HELD)
        again = begin(node)
        again.save({"file": b"new"}, place, 6)
        with open(place_to_resume(again, out, place) + "/file", "rb") as file:
            assert file.read() == b"new"
