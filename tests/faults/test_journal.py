"""The journal of a real job: it tells what happened, and a store or a daemon that fails costs records, never a save."""

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptd.shared.base.ids import JobKey
from ckptd.shared.format.integrity import XXH3
from ckptd.shared.protocol import journal as log
from ckptd.shared.stores.kinds import open_files
from ckptd.store.journal import read_journal
from ckptd.store.posix.scan import scan
from ckptd.system.files import FileLayer
from tests.cluster import Node, wait_for
from tests.faults.mounts import FuseStore, mounted, needs_fuse, needs_root
from tests.faults.ranks import JOB, MB, Ranks, told

pytestmark = [pytest.mark.faults, pytest.mark.timeout(240)]

STORE_NBYTES = 64 * MB


@pytest.fixture(name="node")
def fixture_node(tmp_path: Path) -> Iterator[Node]:
    with told(str(tmp_path)) as node:
        node.start()
        yield node


def entries(store: str) -> list[log.Entry]:
    found = read_journal(open_files(f"{store}/{JOB}", XXH3))
    assert found.damaged == 0
    return found.entries


def kinds(store: str) -> list[str]:
    return [type(entry).__name__ for entry in entries(store)]


def ends(store: str) -> list[str]:
    """Of runs."""
    return [entry.how for entry in entries(store) if isinstance(entry, log.RunEnded)]


def ended(store: str) -> list[log.Entry]:
    """All that is on record once the run's end is."""
    wait_for(lambda: "RunEnded" in kinds(store))
    return entries(store)


def save(ranks: Ranks, *steps: int) -> float:
    """Each becomes durable. Returns the longest stall of the last one."""
    for step in steps:
        stall_s = max(ranks.call("save", step))
        assert ranks.call("wait", step) == [("durable", "durable")] * len(ranks.all)
    return stall_s


def durable(found: list[log.Entry]) -> list[int]:
    """Counters, each once."""
    counters = [entry.counter for entry in found if isinstance(entry, log.Durable)]
    assert len(set(counters)) == len(counters)
    return counters


def durable_places(found: list[log.Entry]) -> set[tuple[int, int]]:
    """Incarnation and counter of each save that is durable on record."""
    places, incarnation = set[tuple[int, int]](), 0
    for entry in found:
        if isinstance(entry, log.RunBegan):
            incarnation = entry.incarnation
        elif isinstance(entry, log.Durable):
            places.add((entry.incarnation or incarnation, entry.counter))
    return places


def nothing_left(node: Node) -> None:
    """Of the job, in the arena."""
    jobs = os.path.join(node.arena, "jobs")
    wait_for(lambda: not os.path.isdir(jobs) or os.listdir(jobs) == [])


def test_the_journal_of_a_job_is_there_when_its_daemon_is_not(node: Node):
    with Ranks(node, 2) as ranks:
        ranks.call("connect")
        stall_s = save(ranks, 10, 20)
        ranks.call("close")
        found = ended(node.store)
    began, *_ = found
    assert (began.world_size, began.nodes, began.again, began.drain_every) == (2, 1, False, "1")
    staged = [entry for entry in found if isinstance(entry, log.Staged)]
    assert [entry.step for entry in staged] == [10, 20]
    assert 0 < staged[1].mean_stall_s <= staged[1].stall_s <= stall_s, "the end of a save is not known at hand-over"
    assert durable(found) == [1, 2]
    assert all(0 < e.drain_s <= e.seconds and e.nbytes > 2 * MB for e in found if isinstance(e, log.Durable))
    assert [entry.at for entry in found] == sorted(entry.at for entry in found)
    assert found[-1].how == "closed" if isinstance(found[-1], log.RunEnded) else durable(found[-1:])
    nothing_left(node)
    node.stop()
    assert ended(node.store) == found


def test_a_load_is_on_record_with_where_its_ranks_read(node: Node):
    for start in range(2):
        with Ranks(node, 2) as ranks:
            ranks.call("connect")
            ranks.call("load")
            save(ranks, 10 * (start + 1))
            if start == 0:
                ranks.kill()
            else:
                ranks.call("close")
    wait_for(lambda: ends(node.store) == ["lost", "closed"])
    found = entries(node.store)
    (restored,) = (entry for entry in found if isinstance(entry, log.Restored))
    assert (restored.step, restored.newest, restored.tiers) == (10, 10, {"arena": 2})
    assert restored.seconds > 0
    assert sum(entry.ranks for entry in found if isinstance(entry, log.Lost)) == 2


def test_a_killed_daemon_costs_no_record_that_its_arena_has(node: Node):
    with Ranks(node, 2) as ranks:
        ranks.call("connect")
        save(ranks, 10)
        node.kill()
        node.start()
        save(ranks, 20)
        ranks.call("close")
        wait_for(lambda: durable(entries(node.store)) == [1, 2] and "RunEnded" in kinds(node.store))
    found = entries(node.store)
    assert [entry.again for entry in found if isinstance(entry, log.RunBegan)] == [False, True]
    assert [entry.step for entry in found if isinstance(entry, log.Staged)] == [10, 20]
    nothing_left(node)


def test_a_killed_worker_costs_nothing(node: Node):
    with Ranks(node) as ranks:
        ranks.call("connect")
        save(ranks, 10)
        worker = node.status().workers[0].pid
        os.kill(worker, signal.SIGSTOP)
        ranks.kill()
        wait_for(lambda: node.status().workers[0].busy)
        os.kill(worker, signal.SIGKILL)
        found = ended(node.store)
    assert durable(found) == [1]
    assert "journal is not on the store yet" in node.log_text()


def lost_meanwhile(ranks: Ranks, *steps: int) -> None:
    """The store does not work: saves go on, and when their ranks end there is something to put."""
    for step in steps:
        assert ranks.call("save", step)[0] < 2
        assert ranks.call("wait", step, "staged") == [("staged", None)]
    ranks.kill()


def tells_both_runs(store: str, *steps: int) -> None:
    """The run that lost its ranks and the one that went on from memory."""
    wait_for(lambda: ends(store)[-1:] == ["closed"])
    found = entries(store)
    assert [entry.step for entry in found if isinstance(entry, log.Staged)] == list(steps)
    assert [how for how in ends(store) if how != "loaded"] == ["lost", "closed"], "a drain may end before the load"
    assert [entry.step for entry in found if isinstance(entry, log.Restored)] == [steps[-2]]
    saves = [one.committed.save for one in scan(FileLayer(), JobKey(store, JOB)).committed]
    assert durable_places(found) <= {(save.incarnation, save.counter) for save in saves}, "nothing was removed"


def go_on(node: Node, last: int) -> None:
    """Another start of the job."""
    with Ranks(node) as ranks:
        ranks.call("connect")
        assert ranks.call("load")[0]["tier"] == "arena"
        save(ranks, last)
        ranks.call("close")


@needs_fuse
def test_a_store_that_hangs_costs_no_save_and_gets_the_journal_when_it_answers(tmp_path: Path):
    with FuseStore(str(tmp_path)) as fuse, told(fuse.path, logs=str(tmp_path)) as node:
        node.start("--store-timeout-s", "1.5", "--keep-last", "4")
        with Ranks(node) as ranks:
            ranks.call("connect")
            save(ranks, 10)
            fuse.hang()
            lost_meanwhile(ranks, 20, 30)
            wait_for(lambda: node.status().workers[0].busy >= 2)
            fuse.go_on()
        go_on(node, 40)
        tells_both_runs(fuse.behind, 10, 20, 30, 40)


@needs_root
@pytest.mark.parametrize("fault", ["full", "read-only"])
def test_a_store_that_refuses_to_be_written_costs_no_save(tmp_path: Path, fault: str):
    store = tmp_path / "store"
    store.mkdir()
    with (
        mounted(str(store), "-t", "tmpfs", "-o", f"size={STORE_NBYTES}", "tmpfs"),
        told(str(store), logs=str(tmp_path)) as node,
    ):
        node.start("--keep-last", "4")
        hog = store / "hog"
        with Ranks(node) as ranks:
            ranks.call("connect")
            save(ranks, 10)
            if fault == "full":
                subprocess.run(["dd", "if=/dev/zero", f"of={hog}", "bs=1M"], check=False, capture_output=True)
            else:
                subprocess.run(["mount", "-o", "remount,ro", str(store)], check=True)
            lost_meanwhile(ranks, 20, 30)
            wait_for(lambda: "journal is not on the store yet" in node.log_text())
            if fault == "full":
                hog.unlink()
            else:
                subprocess.run(["mount", "-o", "remount,rw", str(store)], check=True)
        go_on(node, 40)
        tells_both_runs(str(store), 10, 20, 30, 40)
