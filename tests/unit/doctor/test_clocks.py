"""Clocks that are apart: a store whose files are dated ahead, and a daemon whose node is behind."""

import time

import pytest

from ckptd.daemon.status_query import ahead_s
from ckptd.doctor.clocks import judge_clocks
from ckptd.doctor.probe_store import probe_store
from tests.cluster import Node
from tests.faults.mounts import FuseStore, needs_fuse
from tests.unit.doctor.test_doctor_here import a_job_on, doctor

CLOCK = "import time\n_time = time.time\ntime.time = lambda: _time() + {}\n"


@pytest.mark.parametrize(
    ("clock", "ahead"),
    [(0.0, None), (101.0, 0.0), (100.0, 0.0), (99.6, 0.0), (104.5, 2.5), (95.0, -4.5)],
    ids=["not said", "between", "at once", "an answer made before", "ahead", "behind"],
)
def test_what_the_time_of_the_answer_cannot_explain(clock, ahead):
    assert ahead_s(clock, asked=100.0, answered=102.0) == ahead


def test_a_second_is_no_finding_and_nothing_is_said_where_nothing_is_known():
    assert list(judge_clocks(None, None)) == []
    (found,) = judge_clocks(0.9, None)
    assert (found.verdict, found.detail) == ("ok", "within 1 s of this node's: the store")
    (found,) = judge_clocks(-1.5, None)
    assert (found.verdict, found.detail) == ("warn", "the clock of the store is 1.5s behind this node's")


@pytest.mark.process
def test_the_clock_of_this_nodes_disk_is_its_own(tmp_path):
    assert probe_store(str(tmp_path)).ahead_s == 0.0


@pytest.mark.process
@needs_fuse
def test_a_store_whose_files_are_dated_ahead(tmp_path):
    with FuseStore(str(tmp_path), "ahead") as fuse:
        (found,) = judge_clocks(probe_store(fuse.path).ahead_s, None)
    assert (found.verdict, found.detail) == ("warn", "the clock of the store is 5s ahead of this node's")
    assert "the server of the store" in found.fix


@pytest.mark.process
def test_a_peer_whose_clock_is_behind(tmp_path):
    store, late = tmp_path / "store", tmp_path / "late"
    store.mkdir()
    late.mkdir()
    (late / "sitecustomize.py").write_text(CLOCK.format(-30))
    with Node(str(store)) as one, Node(str(store)) as two:
        one.start(CKPTD_NODE="n1")
        two.start(CKPTD_NODE="n2", PYTHONPATH=f"{late}:{one.environ()['PYTHONPATH']}")
        ranks = a_job_on((one, two), one.store)
        try:
            began = time.monotonic()
            _, found = doctor(CKPTD_ARENA=one.arena)
            assert found["clocks"]["verdict"] == "warn", found
            seconds = float(found["clocks"]["detail"].split(" is ")[1].split("s behind")[0])
            assert 29 - (time.monotonic() - began) <= seconds <= 30
            assert found["clocks"]["detail"].startswith("the clock of n2 is ")
            assert "n2 and here" in found["clocks"]["fix"]
        finally:
            for rank in ranks:
                rank.close()
