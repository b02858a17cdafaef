"""The status of a daemon has the values of its core: each field is compared, for jobs in known states."""

import pytest

from ckptd.core import events as ev
from ckptd.core.jobs import Catalogue
from ckptd.core.policy import Policy
from ckptd.daemon import status
from ckptd.history.account import account_of
from ckptd.shared.base.ids import SaveId
from ckptd.shared.format.schemes import Scheme
from ckptd.shared.protocol.journal import RunEnded, Steps
from ckptd.shared.protocol.messages import Tier
from ckptd.shared.protocol.status import (
    CheckpointStatus,
    DrainStatus,
    JobStatus,
    NodeStatus,
    PaceStatus,
    RankStatus,
    RestoreStatus,
)
from tests.runs import RUN
from tests.unit.core.a_job import KEY, AJob
from tests.unit.core.nodes import a_cluster
from tests.unit.history.test_runs import began

ONE, TWO, THREE = (SaveId(1, number, 10 * number, RUN) for number in (1, 2, 3))
HEX = RUN.hex()


def shown(job):
    """The job's part of the status."""
    (found,) = status.jobs(job.catalogue.jobs, job.now, {})
    return found


def running(**policy):
    """Two ranks that have joined; their processes hold their locks."""
    job = AJob(**policy)
    for rank in range(2):
        job.say(ev.RankFound(job=KEY, rank=rank, session="a", pid=100 + rank, host="host"))
    return job.start()


def a_rank(number, **changes):
    values = {
        "rank": number, "host": "host", "pid": 100 + number, "alive": True, "attached": True, "slots": 3,
        "slots_in_use": 0, "slot_nbytes": 4096, "newest_step": None, "late": "", "drain_nbytes": 0,
        "drain_nbytes_done": 0,
    }  # fmt: skip
    return RankStatus(**values | changes)


def a_node(**changes):
    values = {"node": "node", "domain": "", "ranks": [0, 1], "reachable": True, "set_index": 0, "encoded_step": None}
    return NodeStatus(**values | changes)


def a_checkpoint(save, **changes):
    values = {
        "step": save.step, "incarnation": save.incarnation, "counter": save.counter, "phase": "staged",
        "milestone": "staged", "end": None, "reason": "", "tiers": ["arena"], "ranks": 2, "world_size": 2, "nbytes": 20,
        "age_s": 0.0, "protected": False, "replicas": "", "run": HEX,
    }  # fmt: skip
    return CheckpointStatus(**values | changes)


def test_no_job_is_no_entry():
    assert status.jobs(Catalogue("node", Policy()).jobs, 0.0, {}) == []


def test_a_job_that_has_not_saved():
    job = running()
    assert status.jobs(job.catalogue.jobs, job.now, {KEY: ["quota exceeded"]}) == [
        JobStatus(
            job="job", store="/store", incarnation=1, world_size=2, ranks=[a_rank(0), a_rank(1)], checkpoints=[],
            drain=None, errors=["quota exceeded"], scheme=str(shown(job).scheme), set_size=shown(job).set_size,
            coordinator="node", nodes=[a_node()], degraded=[], silent=[], preempt_step=None, ends={}, restore=None,
            pace=PaceStatus(
                save_every_s=None, save_every_steps=None, drain_s=None, drain_bytes_per_s=None, outrun=0
            ),
            histograms=[], goodput=None, totals=None,
        )
    ]  # fmt: skip


def test_the_coordinator_shows_what_is_on_record_of_the_job():
    job = running()
    account = account_of([began(), Steps(at=10.0, step=1), Steps(at=20.0, step=2), RunEnded(at=20.0, how="closed")])
    account.ends = {"durable": 7, "kept": 0}
    (told,) = status.jobs(job.catalogue.jobs, job.now, {}, {KEY: account}.get)
    assert told.goodput == account.goodput(0.0)
    assert told.totals == account.totals()
    assert told.histograms == account.histograms.shown()
    assert told.ends == {"durable": 7}
    job.catalogue.jobs[KEY].node.membership.coordinator = "elsewhere"
    (told,) = status.jobs(job.catalogue.jobs, job.now, {}, {KEY: account}.get)
    assert (told.goodput, told.totals, told.histograms) == (None, None, [])


def test_a_save_that_one_rank_has_staged():
    job = running()
    job.stage(0, ONE)
    job.tick(7.0)
    job_status = shown(job)
    (found,) = job_status.checkpoints
    assert found.reason.startswith("waits for rank 1: every rank must call save")
    values = {"milestone": None, "tiers": [], "ranks": 1, "nbytes": 10, "age_s": 7.0, "reason": found.reason}
    assert found == a_checkpoint(ONE, phase="staging", missing=[(1, 1)], **values)
    assert job_status.ranks == [a_rank(0, slots_in_use=1, newest_step=10), a_rank(1)]
    assert job_status.drain is None


def test_a_drain_that_runs():
    job = running()
    job.stage_all(ONE)
    job.tick(4.0)
    job.say(ev.DrainMoved(job=KEY, save=ONE, by_rank=((0, 3), (1, 5))))
    job_status = shown(job)
    assert job_status.checkpoints == [a_checkpoint(ONE, phase="draining", age_s=4.0)]
    assert job_status.drain == DrainStatus(
        save=ONE, nbytes=20, nbytes_done=8, seconds=4.0, bytes_per_s=2.0, seconds_left=6.0, attempt=1, last_error="",
        retry_in_s=None,
    )  # fmt: skip
    assert job_status.nodes == [a_node(drain_nbytes=20, drain_nbytes_done=8)]
    in_use = {"slots_in_use": 1, "newest_step": 10, "drain_nbytes": 10}
    assert job_status.ranks == [a_rank(0, **in_use, drain_nbytes_done=3), a_rank(1, **in_use, drain_nbytes_done=5)]


def test_a_drain_has_an_estimate_from_its_first_second_by_the_rate_of_the_last_one():
    job = running()
    job.stage_all(ONE)
    assert shown(job).drain.seconds_left is None, "nothing is known of the store yet"
    job.tick(4.0)
    job.drain(ONE)
    job.stage_all(TWO)
    drain = shown(job).drain
    assert (drain.save, drain.nbytes_done, drain.bytes_per_s, drain.seconds_left) == (TWO, 0, 0.0, 4.0)
    job.tick(1.0)
    job.say(ev.DrainMoved(job=KEY, save=TWO, by_rank=((0, 5), (1, 5))))
    assert shown(job).drain.seconds_left == 1.0, "its own rate, once it has one"


def test_a_load_says_who_has_called_it_and_who_has_read():
    job = running()
    job.stage_all(ONE)
    for rank in range(2):
        job.gone(rank)
    job.start("b", number=2)
    assert shown(job).restore is None
    job.ask_load(0, "b")
    job.hold()
    job.tick(6.0)
    found = shown(job).restore
    assert (found.phase, found.step, found.ranks, found.missing) == ("collecting", None, 1, [(1, 1)])
    assert found.seconds >= 6.0
    job.ask_load(1, "b")
    job.number(3)
    job.scan()
    job.hold()
    found = shown(job).restore
    assert isinstance(found, RestoreStatus)
    assert (found.phase, found.step, found.ranks, found.missing) == ("reading", 10, 0, [(0, 1)])
    for rank in range(2):
        job.report(rank, ONE, Tier.ARENA, session="b")
    job.hold()
    assert shown(job).restore is None


def test_a_drain_that_is_committed_now():
    job = running()
    job.stage_all(ONE)
    job.digest_all(ONE)
    job.say(ev.DrainMoved(job=KEY, save=ONE, by_rank=((0, 10), (1, 10))))
    job.say(ev.Drained(job=KEY, save=ONE))
    job.say(ev.VoteWritten(job=KEY, save=ONE))
    assert shown(job).checkpoints == [a_checkpoint(ONE, phase="committing")]
    assert shown(job).nodes == [a_node(drain_nbytes=20, drain_nbytes_done=20, drain_voted=True)]


def test_a_drain_that_failed_and_waits():
    job = running(drain_retry_s=8.0)
    job.stage_all(ONE)
    job.say(ev.Drained(job=KEY, save=ONE, problem="No space left on device"))
    job.tick(3.0)
    drain = shown(job).drain
    assert (drain.save, drain.nbytes, drain.attempt, drain.last_error) == (ONE, 20, 2, "No space left on device")
    assert (drain.retry_in_s, drain.bytes_per_s, drain.seconds_left) == (5.0, 0.0, None)
    assert shown(job).checkpoints == [a_checkpoint(ONE, reason="No space left on device", age_s=3.0)]


def test_durable_checkpoints_and_the_ends_of_saves():
    job = running()
    job.stage_all(ONE)
    job.drain(ONE)
    job.stage_all(TWO)
    job.stage_all(THREE)
    job_status = shown(job)
    durable = {"phase": "durable", "milestone": "durable", "end": "durable"}
    assert [(one.step, one.phase, one.end, one.tiers) for one in job_status.checkpoints] == [
        (30, "staged", None, ["arena"]),
        (20, "draining", None, ["arena"]),
        (10, "durable", "durable", ["pfs"]),
    ]
    assert job_status.checkpoints[-1] == a_checkpoint(ONE, **durable, tiers=["pfs"])
    assert job_status.ends == {"durable": 1}


def test_what_an_earlier_daemon_committed_has_no_age():
    job = AJob().start(committed=(ONE,))
    durable = {"phase": "durable", "milestone": "durable", "end": "durable"}
    assert shown(job).checkpoints == [a_checkpoint(ONE, **durable, tiers=["pfs"], nbytes=10, age_s=None)]


def test_a_save_that_a_rank_did_not_deliver():
    job = running()
    job.stage(0, ONE)
    job.gone(1)
    (found,) = shown(job).checkpoints
    assert (found.phase, found.end, found.milestone, found.ranks) == ("abandoned", "abandoned", None, 0)
    assert "rank 1" in found.reason
    assert shown(job).ends == {"abandoned": 1}


def test_ranks_that_ended_and_ranks_that_have_not_called_this_daemon():
    job = running()
    job.stage_all(ONE)
    job.gone(1)
    ranks = shown(job).ranks
    assert [(rank.rank, rank.alive, rank.attached, rank.slots_in_use) for rank in ranks][1] == (1, False, True, 1)
    restarted = AJob()
    restarted.say(ev.SlotAdopted(job=KEY, rank=0, slot="r00000-000001.slot", capacity=4096, save=ONE, nbytes=10))
    restarted.say(ev.RankFound(job=KEY, rank=0, session="a", pid=7, host="host"))
    found = a_rank(0, pid=7, attached=False, slots=1, slots_in_use=1, newest_step=10)
    assert shown(restarted).ranks == [found]


def test_a_preemption_shows_its_step():
    job = running()
    job.say(ev.PreemptAsked(job=KEY, why="ckptd drain"))
    job.say(ev.StepsRead(job=KEY, session="a", highest=41))
    assert shown(job).preempt_step == 42


def test_of_many_checkpoints_the_newest_are_shown_and_the_newest_durable_one():
    committed = tuple(SaveId(1, number, number, RUN) for number in range(1, 41))
    assert [one.step for one in shown(AJob().start(committed=committed)).checkpoints] == [*range(40, 8, -1)]


@pytest.mark.parametrize("name", "ab")
def test_nodes_of_a_job_on_its_coordinator_and_elsewhere(name):
    cluster = a_cluster.a_protected_job()
    cluster.cut_off("c")
    (found,) = status.jobs(cluster.nodes[name].catalogue.jobs, cluster.now, {})
    assert (found.coordinator, found.scheme, found.set_size) == ("a", Scheme.XOR, 4)
    assert [node.node for node in found.nodes] == [*"abcd"]
    assert [node.ranks for node in found.nodes] == [[0], [1], [2], [3]]
    assert [node.node for node in found.nodes if not node.reachable] == ["c"]
    assert {node.set_index for node in found.nodes} == {0}
    if name == "a":
        assert [node.encoded_step for node in found.nodes] == [10] * 4
        assert [one.protected for one in found.checkpoints] == [True]
        assert ["c" in line for line in found.degraded] == [True]
    else:
        assert [node.encoded_step for node in found.nodes] == [None] * 4
        assert (found.checkpoints, found.degraded, found.ends) == ([], [], {})


def test_the_line_for_systemd():
    job = running()
    assert status.one_line(Catalogue("node", Policy())) == "no jobs"
    assert status.one_line(job.catalogue) == "job: staged -, durable -"
    job.stage_all(ONE)
    job.say(ev.DrainMoved(job=KEY, save=ONE, by_rank=((0, 2), (1, 3))))
    assert status.one_line(job.catalogue) == "job: staged 10, durable -, draining 10, 25 % of this node's share"
    job.drain(ONE)
    assert status.one_line(job.catalogue) == "job: staged 10, durable 10"
