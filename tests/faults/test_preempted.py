"""``client.preempted``: whoever hears that the job is about to end, all ranks save at one step, and it is durable."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from ckptd.checkpoint.verify import verify_path
from tests.cluster import Node, wait_for
from tests.faults.nodes.clusters import Zygote, a_cluster
from tests.faults.ranks import Ranks, told
from tests.faults.test_polite_kill import CLIENTS_OWN, SELDOM, SLOW, begin, durable
from tests.signals import resume, stop

pytestmark = [pytest.mark.faults, pytest.mark.timeout(240)]

LONG = os.environ.get("FAULTS") == "long"
MANY = 1_000_000  # steps, of which none is reached


@pytest.fixture(name="node")
def fixture_node(tmp_path: Path):
    with told(str(tmp_path)) as node:
        yield node


@pytest.fixture(name="zygote")
def fixture_zygote():
    zygote = Zygote()
    yield zygote
    zygote.close()


def in_steps(ranks: Ranks) -> None:
    """They train, and ask in each step."""
    ranks.start("train_until_preempted", MANY)
    time.sleep(0.2)


def same_step(ranks: Ranks, store: str) -> int:
    """All ranks left after one step, and it is the newest on the store."""
    steps = {found["step"] for found in ranks.results(40)}
    assert len(steps) == 1, steps
    (step,) = steps
    assert durable(store)[-1] == step
    assert verify_path(store).problems == []
    return step


SIGNALLED = [((0,), signal.SIGTERM), ((2,), signal.SIGUSR1), ((0, 1, 2), signal.SIGTERM)]
if LONG:
    SIGNALLED += [((0,), signal.SIGUSR1), ((2,), signal.SIGTERM), ((0, 1, 2), signal.SIGUSR1)]


@pytest.mark.parametrize(("whom", "number"), SIGNALLED)
def test_a_signal_to_any_rank_has_all_save_at_one_step(node: Node, number: int, whom: tuple[int, ...]):
    node.start()
    with Ranks(node, 3) as ranks:
        ranks.call("connect", drain_every=SELDOM)
        in_steps(ranks)
        for rank in whom:
            os.kill(ranks[rank].pid, number)
        same_step(ranks, node.store)
        job = node.job("job")
        assert any("all ranks save at step" in text for text in job.errors), job.errors


def test_a_rank_without_a_board_that_is_signalled_saves_with_all_others(node: Node):
    node.start()
    with Ranks(node, 2) as ranks:
        ranks.call("connect", drain_every=SELDOM)
        (rank_file,) = Path(node.arena).glob("jobs/*/r00001*.rank")
        no_board = rank_file.with_suffix(".steps")
        no_board.mkdir()
        in_steps(ranks)
        os.kill(ranks[1].pid, signal.SIGTERM)
        same_step(ranks, node.store)
        no_board.rmdir()


def test_ckptd_drain_has_them_save_too(node: Node):
    node.start()
    with Ranks(node, 2) as ranks:
        ranks.call("connect", drain_every=SELDOM)
        in_steps(ranks)
        node.complete(sys.executable, "-m", "ckptd", "drain", timeout_s=20)
        same_step(ranks, node.store)


@pytest.mark.parametrize("before", [False, True] if LONG else [False])
def test_ckptd_drain_with_wait_returns_when_what_they_save_is_durable(node: Node, before: bool):
    """What calls it is about to end the ranks, and the daemon too."""
    node.start(*SLOW)
    with Ranks(node, 2, nbytes=24 << 20) as ranks:
        ranks.call("connect", drain_every=SELDOM)
        if before:
            ranks.call("save", 1)
            ranks.call("wait", 1, "durable")
        in_steps(ranks)
        said = node.complete(sys.executable, "-m", "ckptd", "drain", "--wait", timeout_s=40)
        newest = durable(node.store)[-1]
        assert f"step {newest} is durable" in said
        assert {found["step"] for found in ranks.results(40)} == {newest}


def test_ckptd_drain_may_leave_them_alone(node: Node):
    node.start()
    with Ranks(node, 2) as ranks:
        ranks.call("connect", drain_every=SELDOM)
        ranks.call("save", 1)
        ranks.call("wait", 1, "durable")
        ranks.start("train_until_preempted", 300)
        node.complete(sys.executable, "-m", "ckptd", "drain", "--no-preempt", timeout_s=20)
        assert [found["step"] for found in ranks.results(40)] == [None, None]


def test_sigterm_to_a_daemon_that_a_client_started_has_them_save_before_it_ends(node: Node):
    with Ranks(node, 2) as ranks:
        begin(node, ranks, CLIENTS_OWN)
        in_steps(ranks)
        node.daemon.send_signal(signal.SIGTERM)
        same_step(ranks, node.store)
        ranks.call("close")
        assert node.daemon.wait(20) == 0


def test_also_without_drain_true_what_is_saved_then_is_due(node: Node):
    node.start()
    with Ranks(node, 2) as ranks:
        ranks.call("connect", drain_every=SELDOM)
        ranks.call("save", 1)
        ranks.call("wait", 1, "durable")
        ranks.start("train_until_preempted", MANY, drain=False)
        time.sleep(0.3)
        os.kill(ranks[1].pid, signal.SIGTERM)
        same_step(ranks, node.store)


def test_a_daemon_that_is_killed_in_between_is_notified_again(node: Node):
    node.start()
    with Ranks(node, 2) as ranks:
        ranks.call("connect", drain_every=SELDOM, start=False)
        in_steps(ranks)
        node.kill()
        os.kill(ranks[1].pid, signal.SIGTERM)
        time.sleep(4.0)  # longer than a request waits for its answer
        node.start()
        same_step(ranks, node.store)


def test_a_daemon_to_which_no_rank_has_come_back_yet_notifies_them_all_the_same(node: Node):
    """It was started again since their last save; the ranks only look at their boards."""
    node.start()
    with Ranks(node, 2) as ranks:
        ranks.call("connect", drain_every=SELDOM, start=False)
        in_steps(ranks)
        node.kill()
        node.start()
        node.complete(sys.executable, "-m", "ckptd", "drain", timeout_s=20)
        same_step(ranks, node.store)


def test_what_was_asked_for_when_no_rank_lived_does_not_end_the_next_run(node: Node):
    node.start()
    with Ranks(node) as ranks:
        ranks.call("connect", drain_every=SELDOM)
        ranks.call("save", 1)
        ranks.call("wait", 1, "durable")
    node.complete(sys.executable, "-m", "ckptd", "drain", timeout_s=20)
    with Ranks(node) as ranks:
        ranks.call("connect", drain_every=SELDOM)
        ranks.call("load")
        ranks.start("train_until_preempted", 50)
        assert [found["step"] for found in ranks.results(40)] == [None]


def test_a_rank_that_never_asks_learns_of_nothing_and_holds_up_none(node: Node):
    with Ranks(node, 2) as ranks:
        begin(node, ranks, CLIENTS_OWN)
        ranks.call("save", 1)
        ranks.call("wait", 1, "staged")
        began = time.monotonic()
        assert node.stop(15) == 0
        assert time.monotonic() - began < 5
        assert durable(node.store) == [1]


@pytest.mark.parametrize("rank", [0, 3] if LONG else [0])
def test_on_several_nodes_all_save_at_one_step(zygote: Zygote, rank: int):
    with a_cluster(zygote, "ab") as cluster:
        ranks = cluster.ranks("aabb", sizes=(1 << 20,))
        ranks.connect(drain_every=SELDOM)
        ranks.start("train_until_preempted", MANY)
        time.sleep(0.5)
        os.kill(ranks[rank].pid, signal.SIGTERM)
        steps = {found["step"] for found in ranks.results(40)}
        assert len(steps) == 1, (steps, cluster.log())
        assert durable(cluster.store)[-1] in steps
        ranks.kill()


def test_a_rank_without_a_board_away_from_the_coordinator_saves_with_all_others(zygote: Zygote):
    with a_cluster(zygote, "ab") as cluster:
        ranks = cluster.ranks("ab", sizes=(1 << 20,))
        ranks.connect(drain_every=SELDOM)
        (rank_file,) = Path(cluster.nodes["b"].arena).glob("jobs/*/r00001*.rank")
        no_board = rank_file.with_suffix(".steps")
        no_board.mkdir()
        ranks.start("train_until_preempted", MANY)
        time.sleep(0.5)
        os.kill(ranks[1].pid, signal.SIGTERM)
        found = ranks.results(40)
        assert len({one["step"] for one in found}) == 1, (found, cluster.log())
        assert not [text for text in found[1]["logs"] if "did not learn" in text]
        no_board.rmdir()
        ranks.kill()


def test_on_several_nodes_the_coordinators_waits_for_what_they_save_and_another_names_it(zygote: Zygote):
    with a_cluster(zygote, "ab") as cluster:
        ranks = cluster.ranks("ab", sizes=(1 << 20,))
        ranks.connect(drain_every=SELDOM)
        ranks.start("train_until_preempted", MANY)
        time.sleep(0.5)
        drain = (sys.executable, "-m", "ckptd", "drain", "--wait")
        with pytest.raises(AssertionError, match=r"node a was asked to drain: .* type there: ckptd drain --wait"):
            cluster.nodes["b"].complete(*drain, timeout_s=40)  # its exit code is 4
        said = cluster.nodes["a"].complete(*drain, timeout_s=40)
        newest = durable(cluster.store)
        assert newest[-1:] == list({found["step"] for found in ranks.results(40)}), said
        ranks.kill()


def test_a_node_that_does_not_answer_is_named_and_the_rank_that_is_past_the_step_too(zygote: Zygote):
    """Ranks that do not wait for each other: the daemon of one node is stopped, its rank trains on."""
    with a_cluster(zygote, "ab") as cluster:
        ranks = cluster.ranks("ab", sizes=(1 << 20,))
        ranks.connect(drain_every=SELDOM)
        ranks.start("train_alone_until_preempted", MANY, 0.01)
        time.sleep(0.5)
        stop(cluster.nodes["b"].daemon.pid)
        os.kill(ranks[0].pid, signal.SIGTERM)
        wait_for(lambda: (job := cluster.job("a")) and any("node b did not say" in text for text in job.errors))
        time.sleep(0.2)
        resume(cluster.nodes["b"].daemon.pid)
        first, second = (rank.result(40) for rank in ranks.all)
        assert first["step"] < second["step"]
        assert any(f"all ranks save at step {first['step']}" in text for text in second["logs"]), second["logs"]
        wait_for(lambda: any("no checkpoint has all ranks" in text for text in cluster.job("a").errors))
        ranks.kill()


# --- in the process itself


CODE = """
import itertools, os, signal, sys, time
import ckptd_client
heard = []
if "mine" in sys.argv:
    signal.signal(signal.SIGUSR1, lambda *_: heard.append("mine"))
with ckptd_client.connect("job", start=False) as client:
    assert client.preempted(0) is False
    if "fork" in sys.argv:
        pid = os.fork()
        if pid == 0:
            time.sleep(30)
            os._exit(0)
        os.kill(pid, signal.SIGTERM)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        assert client.preempted(1) is False
        sys.exit()
    if "time" in sys.argv:
        times = [time.perf_counter()]
        for first in range(0, 20000, 500):  # other processes run between some of them
            for step in range(first, first + 500):
                client.preempted(step)
            times.append(time.perf_counter())
        print(1e6 * min(after - before for before, after in itertools.pairwise(times)) / 500)
        sys.exit()
    os.kill(os.getpid(), signal.SIGUSR1)
    for step in range(1, 100000):
        if client.preempted(step):
            break
        time.sleep(0.001)
    print(step, heard)
    client.save({"x": 1}, step).wait("durable")
print(signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL)
"""


THREAD = """
import logging, signal, sys, threading, time
import ckptd_client
logging.basicConfig()
with ckptd_client.connect("job", start=False) as client:
    asked = threading.Thread(target=client.preempted, args=(0,))
    asked.start()
    asked.join()
    print(signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, flush=True)
    sys.stdin.readline()
    for step in range(1, 100000):
        if client.preempted(step):
            break
        time.sleep(0.001)
    print(step)
"""


def test_first_asked_in_a_thread_no_signal_is_received_and_it_is_said(node: Node):
    node.start()
    process = node.run(THREAD)
    assert process.stdout.readline() == b"True\n"
    node.complete(sys.executable, "-m", "ckptd", "drain", timeout_s=20)
    out, err = process.communicate(b"\n", timeout=60)
    assert process.returncode == 0, err.decode()
    assert int(out) < 1000
    assert b"SIGTERM and SIGUSR1 are not heard" in err


def alone(node: Node, *words: str) -> list[str]:
    process = node.run(CODE, *words)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err.decode()
    return out.decode().split()


def test_handlers_that_were_there_are_called_and_are_back_after_close(node: Node):
    node.start()
    step, heard, *back = alone(node, "mine")
    assert (int(step) < 1000, heard, back) == (True, "['mine']", ["True", "False"])
    assert alone(node)[2:] == ["True", "True"]


def test_a_forked_worker_is_ended_by_the_signal_as_before(node: Node):
    node.start()
    assert alone(node, "fork") == [str(-signal.SIGTERM)]


def test_a_question_costs_less_than_20_us(node: Node):
    node.start()
    (micros,) = alone(node, "time")
    assert float(micros) < 20


def test_what_is_no_step_is_refused(node: Node, join):
    node.start()
    client = join()
    for wrong in ("5", -1, 1.5, None):
        with pytest.raises(Exception, match="step"):
            client.preempted(wrong)
    client.close()
    assert not any(name.endswith(".steps") for _, _, names in os.walk(node.arena) for name in names)


def test_a_board_that_cannot_be_is_said_once(node: Node, join, monkeypatch, caplog):
    node.start()
    client = join()
    name = next(n for _, _, names in os.walk(node.arena) for n in names if n.endswith(".rank"))
    directory = next(d for d, _, names in os.walk(node.arena) if name in names)
    os.mkdir(os.path.join(directory, name.replace(".rank", ".steps")))
    assert client.preempted(1) is False
    assert client.preempted(2) is False
    assert len([r for r in caplog.records if "cannot hear of a preemption" in r.getMessage()]) == 1
    os.rmdir(os.path.join(directory, name.replace(".rank", ".steps")))
