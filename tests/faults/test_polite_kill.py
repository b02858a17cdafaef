"""SIGTERM to a daemon that a client started: the newest staged checkpoint is durable when it ends, due or not."""

import os
import signal
import time
from pathlib import Path

import pytest

from ckptd.checkpoint.verify import verify_path
from tests.cluster import Node, wait_for
from tests.faults.nodes.clusters import Cluster, Zygote, a_cluster
from tests.faults.ranks import MB, Ranks, told

pytestmark = [pytest.mark.faults, pytest.mark.timeout(240)]

CLIENTS_OWN = "--exit-when-empty"  # as a client starts it
LONG = os.environ.get("FAULTS") == "long"
SELDOM = 1_000_000  # steps: only the first save is due by itself
SLOW = ("--drain-bandwidth", "16M")  # of three chunks of 16 MiB the last is written after three seconds


@pytest.fixture(name="node")
def fixture_node(tmp_path: Path):
    with told(str(tmp_path)) as node:
        yield node


@pytest.fixture(name="zygote")
def fixture_zygote():
    zygote = Zygote()
    yield zygote
    zygote.close()


def durable(store: str) -> list[int]:
    """Steps that lie on the store under their final names."""
    directory = os.path.join(store, "job")
    names = os.listdir(directory) if os.path.isdir(directory) else []
    return sorted(int(name[5:14]) for name in names if name.startswith("step-"))


def begin(node: Node, ranks: Ranks, *flags: str) -> None:
    """The ranks are in: a daemon that leaves when it is empty is started once they live."""
    ranks.call("logs")
    node.start(*flags)
    ranks.call("connect", drain_every=SELDOM)


def staged(node: Node, ranks: Ranks, *flags: str) -> None:
    """The first save is durable, the second one is staged and not due."""
    begin(node, ranks, *flags)
    for step in (1, 2):
        ranks.call("save", step)
        ranks.call("wait", step, "durable" if step == 1 else "staged")


def test_what_was_not_due_is_drained_while_the_ranks_live(node: Node):
    with Ranks(node, 2) as ranks:
        staged(node, ranks, CLIENTS_OWN)
        assert node.stop(15) == 0
        assert durable(node.store) == [1, 2]
    assert verify_path(node.store).problems == []


def test_also_where_it_gets_the_signal_together_with_ranks_that_die_of_it(node: Node):
    with Ranks(node, 2) as ranks:
        staged(node, ranks, CLIENTS_OWN)
        for rank in ranks.all:
            rank.kill(signal.SIGTERM)
        assert node.stop(15) == 0
        assert durable(node.store) == [1, 2]


def test_an_older_drain_that_runs_is_finished_first(node: Node):
    with Ranks(node, nbytes=48 * MB) as ranks:
        begin(node, ranks, CLIENTS_OWN, *SLOW)
        ranks.call("save", 1)
        wait_for(lambda: (job := node.job("job")) and job.drain and job.drain.nbytes_done)
        ranks.call("save", 2)
        ranks.call("wait", 2, "staged")
        assert node.stop(30) == 0
        assert durable(node.store) == [1, 2]


def test_a_rank_that_goes_on_saving_does_not_hold_it_up(node: Node):
    with Ranks(node, nbytes=48 * MB) as ranks:
        begin(node, ranks, CLIENTS_OWN, *SLOW)
        ranks.call("save", 1)
        ranks.call("wait", 1, "staged")
        node.daemon.send_signal(signal.SIGTERM)
        for step in range(2, 9):
            ranks.call("save", step)
            time.sleep(0.3)
        assert node.daemon.wait(15) == 0
        assert durable(node.store)[0] == 1


def test_what_cannot_be_drained_in_time_is_named_and_the_newest_durable_stays(node: Node):
    with Ranks(node, nbytes=16 * MB) as ranks:
        staged(node, ranks, CLIENTS_OWN, *SLOW, "--stop-drain-s", "1")
        ranks.call("resize", 48 * MB)
        ranks.call("save", 3)
        ranks.call("wait", 3, "staged")
        began = time.monotonic()
        assert node.stop(15) == 0
        assert 1.0 <= time.monotonic() - began < 10
        assert durable(node.store) == [1]
    said = [line for line in node.log_text().splitlines() if "not durable" in line]
    assert len(said) == 1
    assert "step=3" in said[0]
    assert "durable=1" in said[0]
    assert "stop_drain_s" in said[0]


def test_a_store_that_is_away_does_not_hold_it_beyond_its_time(node: Node):
    with Ranks(node) as ranks:
        staged(node, ranks, CLIENTS_OWN, "--stop-drain-s", "2")
        os.rename(f"{node.store}/job", f"{node.store}/elsewhere")
        Path(f"{node.store}/job").write_text("no directory")
        began = time.monotonic()
        assert node.stop(15) == 0
        assert time.monotonic() - began < 10
    assert any("not durable" in line and "step=2" in line for line in node.log_text().splitlines())


def test_a_daemon_that_another_process_starts_again_leaves_it_in_memory(node: Node):
    """A unit is stopped for an upgrade too: what is staged outlives it, and the next one has it."""
    with Ranks(node) as ranks:
        staged(node, ranks)
        assert node.stop(15) == 0
        assert durable(node.store) == [1]
        assert len(node.slots()) > 0


@pytest.mark.parametrize("whom", ["ab", "b", *(["a"] if LONG else [])])
def test_daemons_of_several_nodes_stay_until_all_of_it_is_there(zygote: Zygote, whom: str):
    """A follower that left at once would take its part of the newest checkpoint with it."""
    with a_cluster(zygote, "ab", CKPTD_DRAIN_BANDWIDTH="2M") as cluster:
        ranks = cluster.ranks("aabb", sizes=(2 * MB,))
        ranks.connect(drain_every=SELDOM)
        for name in "ab":  # now that they would not be empty
            cluster.restart(name, CKPTD_EXIT_WHEN_EMPTY="true")
        ranks.save(1, "durable")
        ranks.save(2, "staged")
        _stop(cluster, whom)
        assert durable(cluster.store) == [1, 2], cluster.log()
        ranks.kill()


def _stop(cluster: Cluster, whom: str) -> None:
    for name in whom:
        cluster.nodes[name].daemon.send_signal(signal.SIGTERM)
    for name in whom:
        assert cluster.nodes[name].daemon.wait(25) == 0
