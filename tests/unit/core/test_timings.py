"""How long saves, drains and loads take, as the coordinator's records tell it, and how often saves are due."""

from ckptd.core import actions as act
from ckptd.core import events as ev
from ckptd.history.account import Account
from ckptd.history.distribution import DRAIN_RATE, RESTORE, STALL
from ckptd.shared.base.ids import SaveId
from ckptd.shared.protocol.messages import Cadence, Tier
from tests.runs import RUN
from tests.unit.core.a_job import KEY, AJob
from tests.unit.core.nodes import a_cluster
from tests.unit.history.test_account import counted


def save(number):
    return SaveId(1, number, 10 * number, RUN)


def timings(job):
    return job.catalogue.jobs[KEY].coordinator.timings


def values(actions):
    """Of the account of what is put on record: by what and tier, how many values, and their sum."""
    account = Account()
    for one in actions:
        if isinstance(one, act.KeepEntry):
            account.add(one.began)
            account.add(one.entry)
    return counted(account.histograms.shown())


def test_each_milestone_is_counted_once_from_the_first_rank_on():
    job = AJob(slots_per_rank=8).start()
    job.take()
    job.stage(0, save(1))
    job.tick(2.0)
    job.stage(1, save(1), stall_s=0.25)
    job.tick(10.0)
    job.drain(save(1))
    job.tick(5.0)
    assert values(job.did) == {
        ("staged", ""): (1, 2.0),
        ("durable", ""): (1, 12.0),
        (STALL, ""): (1, 0.25),
        (DRAIN_RATE, ""): (1, 2.0),
    }
    last = job.facts.last_drain
    assert (last.save, last.seconds, last.nbytes) == (save(1), 10.0, 20)


def test_a_drain_during_which_many_saves_are_made_has_its_whole_time():
    job = AJob(slots_per_rank=8, cadence=Cadence(0, 7200.0)).start()
    job.take()
    for number in range(1, 101):
        job.stage_all(save(number))
        job.tick(60.0)
    job.drain(save(1))
    assert values(job.did)["durable", ""] == (1, 6000.0)


def test_a_save_that_never_became_whole_is_not_counted():
    job = AJob().start()
    job.stage(0, save(1))
    job.tick(2.0)
    job.gone(1)
    assert values(job.did) == {}


def test_what_was_found_at_start_is_not_counted():
    job = AJob()
    for rank in range(2):
        name = f"r{rank:05d}-000001.slot"
        job.say(ev.SlotAdopted(
            job=KEY, rank=rank, slot=name, capacity=4096, save=save(1), nbytes=10, world_size=2,
        ))  # fmt: skip
    job.start(committed=(save(2),))
    job.tick(3.0)
    assert values(job.did) == {}


def test_protected_and_a_load_are_counted():
    cluster = a_cluster.a_protected_job()
    cluster.end_ranks()
    cluster.connect("abcd")
    cluster.load()
    found = values(cluster.nodes["a"].records)
    assert found["protected", ""][0] == 1
    assert found[RESTORE, Tier.ARENA][0] == 1


def test_the_pace_of_saves_and_of_the_store():
    job = AJob(slots_per_rank=40).start()
    assert timings(job).pace(job.now).save_every_s is None
    for number in range(1, 8):
        job.stage_all(save(number))
        job.tick(20.0)
        active = job.facts.active
        if active is not None and job.now - job.facts.records[active].drain_since >= 34.0:
            job.drain(active)
            job.tick()
    pace = timings(job).pace(job.now)
    assert (pace.save_every_s, pace.save_every_steps, pace.drain_s) == (20.0, 10, 40.0)
    assert pace.outrun == 2


def test_a_commit_of_votes_that_were_found_says_nothing_of_the_store():
    """Else the drain would seem to have begun with the node's clock."""
    job = AJob()
    job.now = 5000.0
    job.start()
    job.scan(partials=(ev.Partial(save(1), complete=True),))
    job.tick(3.0)
    assert job.facts.active == save(1)
    assert timings(job).running_s(job.now) == 0
    job.say(ev.CommitEnded(job=KEY, save=save(1), nbytes=20))
    assert job.facts.last_drain is None
    assert timings(job).pace(job.now).drain_s is None


def due_s(job):
    return timings(job).pace(job.now).due_s


def test_between_the_drains_of_a_job_that_drains_rarely_no_save_is_due():
    job = AJob(slots_per_rank=8, cadence=Cadence(0, 7200.0)).start()
    for number in range(1, 240):
        job.stage_all(save(number))
        job.tick(60.0)
        if job.facts.active is not None:
            assert due_s(job) == 60.0
            job.drain(job.facts.active)
        assert due_s(job) == 0.0
        job.tick()
    assert len(job.facts.on_store) == 2


def test_saves_that_fail_or_are_superseded_are_due_until_one_is_durable():
    job = AJob(slots_per_rank=8).start()
    for number in range(1, 200):  # more than there are records
        job.stage_all(save(number))
        job.tick(60.0)
        if (active := job.facts.active) is not None:
            job.say(ev.Drained(job=KEY, save=active, problem="No space left on device"))
        assert due_s(job) == 60.0 * number
    job.tick(7200.0)
    job.drain(job.facts.active)
    assert due_s(job) == 0.0


def test_what_waits_while_another_drain_ends_is_due_from_then():
    job = AJob(slots_per_rank=8).start()
    job.stage_all(save(1))
    job.tick(30.0)
    job.stage_all(save(2))
    job.tick(30.0)
    assert due_s(job) == 60.0
    job.drain(save(1))
    job.tick(5.0)
    assert due_s(job) == 5.0


def test_what_an_ended_run_left_is_not_due_for_the_next_one():
    job = AJob(slots_per_rank=8, drain_give_up_s=100.0).start()
    job.stage_all(save(1))
    for _ in range(2):
        job.tick(200.0)
        job.say(ev.Drained(job=KEY, save=save(1), problem="No space left on device"))
    assert (job.facts.active, due_s(job)) == (None, 400.0)
    for rank in range(2):
        job.gone(rank)
    assert job.facts.active == save(1), "it is tried again: no rank lives"
    for _ in range(2):
        job.tick(25_000.0)
        job.say(ev.Drained(job=KEY, save=save(1), problem="No space left on device"))
    assert due_s(job) == 50_400.0
    job.start("b", number=2)
    assert due_s(job) == 0.0
