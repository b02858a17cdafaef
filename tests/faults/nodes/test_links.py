"""What happens between daemons: cuts, silence, repetitions, flipped bits, strangers."""

import os
import time

import pytest

from ckptd.shared.bulk import wire
from ckptd.shared.format import arena_paths
from tests.cluster import wait_for
from tests.faults.nodes.clusters import PEER_TIMEOUT_S, Cluster, Ranks, a_cluster
from tests.faults.nodes.relay import Flip, Repeat
from tests.faults.ranks import SAVE_TIMEOUT_S
from tests.signals import resume, stop

pytestmark = [pytest.mark.faults, pytest.mark.timeout(240), pytest.mark.xdist_group("nodes-links")]

LONG = os.environ.get("FAULTS") == "long"
JOBS = iter(range(1000))


@pytest.fixture(name="four", scope="module")
def fixture_four(zygote):
    """a, b, c, d; b is behind a relay."""
    with a_cluster(zygote, relayed="b") as cluster:
        yield cluster


@pytest.fixture(name="job")
def fixture_job(four: Cluster):
    """A job's name; whatever is left of it is forgotten."""
    job = f"links-{next(JOBS)}"
    yield job
    relay = four.relays["b"]
    relay.open(True)
    for channel in (relay.control, relay.bulk):
        channel.held, channel.to_daemon, channel.from_daemon = False, None, None


def started(four: Cluster, job: str, homes: str = "abcd", **settings):
    ranks = four.ranks(homes, job)
    ranks.connect(**settings)
    ranks.call("load")
    return ranks


def degraded(four: Cluster, job: str) -> str:
    status = four.job("a", job)
    return "; ".join(status.degraded) if status else ""


def protected(four: Cluster, job: str, step: int) -> bool:
    """Whether all sets have encoded the step: a rank that hears of it as durable hears of it no more."""
    status = four.job("a", job)
    return status is not None and any(c.step == step and c.protected for c in status.checkpoints)


def save_through_cuts(four: Cluster, job: str, ranks: Ranks, step: int) -> None:
    """The control connection is cut while ranks save, then the one on which the encode pulls."""
    control, bulk = four.relays["b"].control, four.relays["b"].bulk
    bulk.held, before = True, bulk.asked
    ranks.start("save", step)
    for _ in range(3):
        control.cut()
        time.sleep(0.15)
    wait_for(lambda: bulk.asked > before)  # the encode runs
    bulk.cut()
    bulk.held = False
    ranks.results()
    wait_for(lambda: protected(four, job, step))
    ranks.call("wait", step, "durable")


def test_connections_that_are_cut_cost_time_only(four: Cluster, job: str):
    ranks = started(four, job)
    for step in (10, 20, 30) if LONG else (10,):
        save_through_cuts(four, job, ranks, step)
    four.end(ranks)


@pytest.mark.parametrize("name", ["a", "c"] if LONG else ["c"])  # the coordinator's, and another
def test_a_daemon_that_stays_away_for_a_while_costs_its_rank_s_saves_only(four: Cluster, job: str, name: str):
    """Once it is back, the other ranks' slots are free again at once, and its rank is not turned away."""
    ranks = started(four, job, start=False)
    ranks.save(10, "protected", "durable")
    four.nodes[name].kill()
    for step in (20, 30):
        ranks.call("save", step)  # 20 waits a little for a daemon, 30 fails at once
    four.restart(name)
    began = time.monotonic()
    for step in (40, 50, 60):
        ranks.save(step, "staged")
    assert time.monotonic() - began < SAVE_TIMEOUT_S / 2, "slots were held by saves that cannot complete"
    ranks.save(70, "protected", "durable")
    four.end(ranks)


def test_a_node_that_is_cut_off_degrades_its_set_until_it_is_back(four: Cluster, job: str):
    ranks = started(four, job)
    ranks.save(10, "protected")
    four.relays["b"].open(False)
    wait_for(lambda: "hears nothing of b" in degraded(four, job), 3 * PEER_TIMEOUT_S + 5)
    ranks.call("save", 20)
    time.sleep(0.3)
    assert [rank.call("handle", 20)[0] for rank in ranks.all] == [None] * 4, "rank 1's segment is not heard of"
    four.relays["b"].open(True)
    for milestone in ("protected", "durable"):
        ranks.call("wait", 20, milestone)
    wait_for(lambda: degraded(four, job) == "")
    four.end(ranks)


def test_a_stopped_peer_degrades_its_set_until_it_goes_on(four: Cluster, job: str):
    ranks = started(four, job)
    four.relays["b"].bulk.held = True  # so that the encode runs when the daemon is stopped
    ranks.save(10, "staged")
    stop(four.nodes["b"].daemon.pid)
    try:
        wait_for(lambda: "hears nothing of b" in degraded(four, job), 3 * PEER_TIMEOUT_S + 5)
        assert next(n for n in four.job("a", job).nodes if n.node == "b").reachable is False
        assert {rank.call("handle", 10)[0] for rank in ranks.all if rank.rank != 1} <= {"staged", "durable"}
        assert not any(c.protected for c in four.job("a", job).checkpoints)
    finally:
        resume(four.nodes["b"].daemon.pid)
        four.relays["b"].bulk.held = False
    wait_for(lambda: any(c.protected for c in four.job("a", job).checkpoints))
    wait_for(lambda: degraded(four, job) == "")
    ranks.call("wait", 10, "durable")
    four.end(ranks)


@pytest.mark.parametrize("restarted", "acb" if LONG else "c")
def test_a_daemon_restarted_during_the_encode_goes_on_with_it(four: Cluster, job: str, restarted: str):
    """The members offer their columns anew; the coordinator a, if it was that, is told what lies where."""
    ranks = started(four, job)
    bulk = four.relays["b"].bulk
    before, bulk.held = bulk.asked, True
    ranks.save(10, "staged")
    wait_for(lambda: bulk.asked > before)  # the encode runs
    four.restart(restarted)
    bulk.held = False
    wait_for(lambda: (s := four.job("a", job)) and any(c.protected for c in s.checkpoints))
    ranks.call("wait", 10, "durable")
    ranks.save(20, "protected", "durable")
    four.end(ranks)


def test_a_flipped_bit_on_the_wire_is_never_in_the_parity(four: Cluster, job: str):
    ranks = started(four, job)
    flip = four.relays["b"].bulk.from_daemon = Flip(200_000)
    ranks.save(10, "protected")
    assert flip.done
    told = [line for name in "acd" for line in four.nodes[name].log_text().splitlines() + four.job("a", job).errors]
    assert any("node b: bytes of rank 1" in line and "damaged on the wire" in line for line in told), told
    ranks.call("wait", 10, "durable")
    ranks.kill()
    four.replace("c")
    ranks = four.ranks("abcd", job)
    ranks.connect()
    found = ranks.load()
    assert [f["tier"] for f in found] == ["arena", "arena", "rebuilt", "arena"]
    four.end(ranks)


def test_a_flipped_bit_on_the_wire_is_never_in_a_rebuilt_shard(four: Cluster, job: str):
    ranks = started(four, job)
    ranks.save(10, "protected", "durable")
    ranks.kill()
    four.replace("c")
    flip = four.relays["b"].bulk.from_daemon = Flip(20_000)
    ranks = four.ranks("abcd", job)
    ranks.connect()
    found = ranks.load()
    assert flip.done
    assert found[2]["tier"] == "pfs", found
    assert any("damaged on the wire" in note for note in found[2]["notes"]), found
    ranks.save(20, "protected", "durable")
    four.end(ranks)


def test_what_is_said_again_changes_nothing(four: Cluster, job: str):
    """A recorded token opens no bulk connection; what is lost with the ZeroMQ connection that a frame sent twice ends
    is sent anew. Duplicates on the control link itself are for tests/unit/peers/test_link.py.
    """
    relay = four.relays["b"]
    ranks = started(four, job)
    repeat = relay.control.to_daemon = Repeat()
    ranks.save(10, "protected", "durable")
    wait_for(lambda: repeat.done)
    before = list(four.job("b", job).ranks)
    for said in [bytes(said) for said in relay.control.said + relay.bulk.said if len(said) > 64]:
        channel = relay.bulk if said.startswith(wire.MAGIC) else relay.control
        with channel.connect() as again:
            again.settimeout(2.0)
            again.sendall(said)
            answer = b""
            try:
                while more := again.recv(1 << 16):
                    answer += more
            except (TimeoutError, ConnectionResetError):
                pass
            if channel is relay.bulk:
                assert answer == b"", "a token is good for one connection"
    assert list(four.job("b", job).ranks) == before
    ranks.save(20, "protected", "durable")
    assert four.nodes["b"].daemon.poll() is None
    four.end(ranks)


def test_a_daemon_with_another_key_is_refused_and_reported(four: Cluster, job: str):
    ranks = started(four, job)
    ranks.save(10, "protected", "durable")
    four.nodes["d"].kill()
    os.unlink(os.path.join(four.nodes["d"].arena, arena_paths.IDENTITY))
    four.start("d")
    ranks.call("save", 20)
    wait_for(lambda: any("key" in line and "refuse" in line for line in four.nodes["a"].status().errors))
    assert "hears nothing of d" in degraded(four, job)
    assert [rank.call("handle", 20)[0] for rank in ranks.all] == [None] * 4
    ranks.kill()
    ranks = four.ranks("abcd", job)
    ranks.connect()
    assert ranks.load()[0]["step"] >= 10
    ranks.save(30, "protected", "durable")
    four.end(ranks)
