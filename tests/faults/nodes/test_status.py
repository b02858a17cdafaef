"""The whole job through any daemon: four real ones, a drain that takes a while, one that does not answer."""

import contextlib
import json
import subprocess
import sys
import time

import pytest

from ckptd.arena.ask import Daemon
from ckptd.shared.protocol.status import JobStatus
from tests import pythons
from tests.cluster import Node, wait_for
from tests.faults.nodes.capture import in_readme, shape_of, taken
from tests.faults.nodes.clusters import MB, Cluster, a_cluster, within
from tests.signals import resume, stop

NAMES = "abcd"
SHARD_NBYTES = 4 * MB
SLOW = {"CKPTD_DRAIN_BANDWIDTH": str(SHARD_NBYTES // 4)}  # eight seconds for the two ranks of a node


@pytest.fixture(name="cluster", scope="module")
def fixture_cluster(zygote):
    # One that is stopped for a while must not count as lost: it is the survey that is to notice.
    with a_cluster(zygote, NAMES, CKPTD_PEER_TIMEOUT_S="20", CKPTD_SET_SIZE="2", **SLOW) as cluster:
        yield cluster


def whole(node: Node, job: str) -> JobStatus:
    with Daemon(node.arena) as daemon:
        (found,) = [one for one in daemon.status(nodes=True).jobs if one.job == job]
    return found


def draining(cluster: Cluster, name: str, job: str) -> JobStatus:
    """Once every rank of every node has written something, and none all."""
    for _ in within(30, 0.1):
        found = whole(cluster.nodes[name], job)
        ranks = [rank for node in found.nodes if node.report is not None for rank in node.report.ranks]
        if len(ranks) == 2 * len(NAMES) and all(node.drain_nbytes_done for node in found.nodes):
            return found
    raise AssertionError("no drain")


def test_any_daemon_reports_all_nodes_and_ranks_of_a_drain_that_runs(cluster):
    ranks = cluster.ranks(NAMES * 2, sizes=[SHARD_NBYTES])
    ranks.connect()
    ranks.call("save", 1)
    for name in "ac":  # a coordinates; c is of the other set
        found = draining(cluster, name, "job")
        assert (found.coordinator, found.silent) == ("a", [])
        assert [node.node for node in found.nodes] == list(NAMES)
        assert found.drain is not None
        assert 0 < found.drain.nbytes_done < found.drain.nbytes
        assert [c.phase for c in found.checkpoints] == ["draining"]
        for number, node in enumerate(found.nodes):
            assert node.ranks == [number, number + len(NAMES)]
            assert [rank.rank for rank in node.report.ranks] == node.ranks
            assert node.drain_nbytes == sum(rank.drain_nbytes for rank in node.report.ranks) > 2 * SHARD_NBYTES
            assert 0 < node.drain_nbytes_done <= node.drain_nbytes
            assert node.report.used_nbytes > 2 * SHARD_NBYTES
        assert [rank.rank for rank in found.ranks] == found.nodes[NAMES.index(name)].ranks, "of its own node"
    shown = command(cluster.nodes["c"], "--nodes")
    assert "drain" in shown
    assert [line.split()[0] for line in shown.splitlines() if line[:3] in [f"  {name}" for name in NAMES]]
    assert max(map(len, shown.splitlines())) <= 80
    ranks.call("wait", 1, "durable")
    cluster.end(ranks)


def command(node: Node, *flags: str) -> str:
    return node.complete(sys.executable, "-m", "ckptd", "status", *flags, timeout_s=30)


@contextlib.contextmanager
def stopped(node: Node):
    """Its daemon is there, and says nothing."""
    stop(node.daemon.pid)
    try:
        yield
    finally:
        resume(node.daemon.pid)


def test_a_daemon_that_does_not_answer_is_named_and_costs_less_than_a_second(cluster):
    ranks = cluster.ranks(NAMES, "quiet", sizes=[64 << 10])
    ranks.connect()
    wait_for(lambda: whole(cluster.nodes["b"], "quiet").silent == [])  # links come up one by one
    with stopped(cluster.nodes["d"]):
        began = time.monotonic()
        found = whole(cluster.nodes["b"], "quiet")
        assert time.monotonic() - began < 2.9, "0.7 s where nothing else runs, 3 s without that limit"
        assert found.silent == ["d"]
        assert [node.node for node in found.nodes if node.report is None] == ["d"]
        text = command(cluster.nodes["b"], "--nodes")
        assert "did not answer: d" in " ".join(text.split())
        raw = json.loads(command(cluster.nodes["b"], "--nodes", "--json"))
        assert raw["jobs"][0]["silent"] == ["d"]
    wait_for(lambda: whole(cluster.nodes["b"], "quiet").silent == [])
    cluster.end(ranks)


def test_without_its_coordinator_a_node_reports_what_it_knows(cluster):
    ranks = cluster.ranks(NAMES, "headless", sizes=[64 << 10])
    ranks.connect()
    wait_for(lambda: [len(s.nodes) for s in [whole(cluster.nodes["c"], "headless")] if not s.silent] == [len(NAMES)])
    with stopped(cluster.nodes["a"]):
        found = whole(cluster.nodes["c"], "headless")
    assert (found.coordinator, found.silent) == ("a", ["a"])
    assert [node.node for node in found.nodes] == list(NAMES)
    assert [node.node for node in found.nodes if node.report is not None] == list(NAMES[1:])
    cluster.end(ranks)


def test_who_asks_twice_at_once_is_answered_twice(cluster):
    """Two terminals, and the metrics between them: all wait for the same daemon, which does not answer."""
    ranks = cluster.ranks(NAMES, "twice", sizes=[64 << 10])
    ranks.connect()
    with stopped(cluster.nodes["d"]):
        asking = [
            pythons.Popen(
                [sys.executable, "-m", "ckptd", "status", "--nodes", "--json"],
                env=cluster.nodes["a"].environ(), stdout=subprocess.PIPE, text=True,
            )
            for _ in range(3)
        ]  # fmt: skip
        shown = [one.communicate(timeout=120)[0] for one in asking]
    assert [one.returncode for one in asking] == [0, 0, 0]
    assert [json.loads(text)["jobs"][0]["silent"] for text in shown] == [["d"]] * 3
    cluster.end(ranks)


def test_the_readme_shows_what_is_shown_today(zygote):
    """Line by line, but for times, sizes and shares. To take it anew: python -m tests.faults.nodes.capture."""
    shown = taken(zygote, 2 * SHARD_NBYTES)
    assert shape_of(in_readme()) == shape_of(shown)


def test_a_store_that_hangs_for_another_node_is_reported_with_its_name(cluster):
    """Its worker is stopped in the middle of the drain: what the daemon itself sees of a hung mount."""
    ranks = cluster.ranks(NAMES, "hung", sizes=[SHARD_NBYTES])
    ranks.connect()
    ranks.call("save", 1)
    wait_for(lambda: (job := cluster.job("d", "hung")) and job.ranks[0].drain_nbytes)
    (worker,) = wait_for(lambda: [one.pid for one in cluster.nodes["d"].status().workers if one.busy and one.pid])
    stop(worker)
    try:
        wait_for(lambda: "gives no answer" in " ".join(problems_of(cluster, "c", "d")), 60, every_s=1)
        text = command(cluster.nodes["c"], "--nodes")
        assert f"d: {cluster.store} gives no answer" in " ".join(text.split())
    finally:
        resume(worker)
    ranks.call("wait", 1, "durable")
    cluster.end(ranks)


def problems_of(cluster: Cluster, asked: str, name: str) -> list[str]:
    (node,) = [one for one in whole(cluster.nodes[asked], "hung").nodes if one.node == name]
    return node.report.problems if node.report is not None else []
