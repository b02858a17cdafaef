"""What a daemon tells of all runs of a real job: the steps of its ranks, and counts that no restart begins again."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptd.cli import journals
from ckptd.history.goodput import totals
from ckptd.shared.protocol import journal as log
from ckptd.shared.protocol.status import JobStatus
from tests.cluster import Node, wait_for
from tests.faults.ranks import JOB, MB, Ranks, told
from tests.faults.test_journal import ends, entries, save

pytestmark = [pytest.mark.faults, pytest.mark.timeout(240)]


@pytest.fixture(name="node")
def fixture_node(tmp_path: Path) -> Iterator[Node]:
    with told(str(tmp_path)) as node:
        node.start()
        yield node


def job(node: Node) -> JobStatus:
    """What the daemon tells of it, once it has read the journal."""
    wait_for(lambda: node.status().jobs[0].totals is not None)
    (found,) = node.status().jobs
    return found


def counted(found: JobStatus, what: str, tier: str = "") -> int:
    (one,) = (one for one in found.histograms if (one.what, one.tier) == (what, tier))
    return sum(one.counts)


def steps(node: Node) -> list[int]:
    return [entry.step for entry in entries(node.store) if isinstance(entry, log.Steps)]


def test_counts_and_times_go_on_when_another_daemon_takes_over(node: Node):
    with Ranks(node, 2) as ranks:
        ranks.call("connect")
        wait_for(lambda: node.status().jobs[0].totals is not None)
        assert counted(job(node), "staged") == 0, "it is known before the first save"
        save(ranks, 10, 20)
        before = job(node)
        assert (before.ends, counted(before, "staged"), counted(before, "durable")) == ({"durable": 2}, 2, 2)
        node.kill()
        node.start()
        after = job(node)
        assert after.histograms == before.histograms
        assert (after.ends, after.totals) == (before.ends, before.totals)
        assert after.goodput is not None
        assert before.goodput is not None
        assert after.goodput.total_s >= before.goodput.total_s
        save(ranks, 30)
        wait_for(lambda: counted(job(node), "durable") == 3)
        assert (job(node).ends, counted(job(node), "stall")) == ({"durable": 3}, 3)
        assert job(node).totals.drained_nbytes > 6 * MB
        ranks.kill()
        wait_for(lambda: ends(node.store) == ["lost"])
    node.stop()
    node.start()
    with Ranks(node, 2) as ranks:
        ranks.call("connect")
        ranks.call("load")
        wait_for(lambda: counted(job(node), "restore", "arena") == 1)
        last = job(node)
        assert (last.ends, last.totals.runs, last.totals.losses.keys()) == ({"durable": 3}, 2, {"ranks"})
        assert last.goodput.failures == 1
        assert last.goodput.total_s > after.goodput.total_s


def test_the_figures_are_those_that_history_reads_from_the_store(node: Node):
    with Ranks(node, 1) as ranks:
        ranks.call("connect")
        for step in (10, 20, 30):
            save(ranks, step)
        ranks.kill()
        wait_for(lambda: ends(node.store) == ["lost"])
        told_s = job(node)
    history = journals.read(JOB, node.store)
    read = totals(history.spans, history.runs)
    assert told_s.goodput is not None
    for name in ("total_s", "training_s", "stall_s", "repeated_s", "start_s", "ettr"):
        assert getattr(told_s.goodput, name) == pytest.approx(getattr(read, name), abs=0.01), name
    assert read.failures == told_s.goodput.failures == 1


def test_steps_are_on_record_as_far_as_the_ranks_came_when_they_were_killed(node: Node):
    with Ranks(node, 2) as ranks:
        ranks.call("connect")
        save(ranks, 10)
        ranks.call("train", 11, 14)
        assert steps(node) == [], "nothing travels for a step"
        ranks.kill()
        wait_for(lambda: ends(node.store) == ["lost"])
        assert steps(node) == [14]
    with Ranks(node, 2) as ranks:
        ranks.call("connect")
        assert ranks.call("load")[0]["step"] == 10
        ranks.call("train", 11, 12)
        ranks.call("close")
        wait_for(lambda: ends(node.store) == ["lost", "closed"])
    assert steps(node) == [14, 12]
    (restored,) = (entry for entry in entries(node.store) if isinstance(entry, log.Restored))
    assert restored.newest == 14, "four steps were lost that no save knew of"
    assert job(node).totals.lost_steps == 4 if node.status().jobs else True


def test_a_step_costs_less_than_20_us(node: Node):
    with Ranks(node, 1) as ranks:
        ranks.call("connect")
        (seconds,) = ranks.call("train", 1, 10_000, pause_s=0.0)
    assert seconds / 10_000 < 20e-6
