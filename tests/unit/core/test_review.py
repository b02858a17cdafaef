"""What a hostile reader of the core found: each of these lost data or waited for ever once."""

from ckptd.core import actions as act
from ckptd.core import events as ev
from ckptd.shared.base.ids import SaveId
from tests.runs import OTHER_RUN, RUN
from tests.unit.core.a_job import KEY, AJob

OLD = SaveId(2, 1, 40, OTHER_RUN)
ONE = SaveId(1, 1, 50, RUN)


def test_a_number_made_up_without_the_store_never_meets_an_older_life():
    job = AJob(world=1)
    job.attach(0)
    job.say(ev.IncarnationTaken(job=KEY, session="a", run=RUN, problem="no space left"))
    job.slots(0)
    job.stage(0, ONE)  # incarnation 1, made up
    job.scan(SaveId(1, 1, 50, OTHER_RUN), OLD)  # the store has that very name, of an older life, and a newer one
    assert job.ends(ONE) == ["failed"]
    assert not job.of(act.Drain)
    assert not job.of(act.RemoveCheckpoint)


def test_a_load_goes_on_above_what_it_found_though_the_store_gave_no_number():
    job = AJob(world=1).start(committed=(SaveId(7, 1, 40, RUN),))
    asked = job.ask_load(0)
    job.say(ev.IncarnationTaken(job=KEY, session="a", run=RUN, problem="no space left"))
    job.scan(SaveId(7, 1, 40, RUN))
    assert job.answer(asked).incarnation > 7


def test_a_closed_job_keeps_its_memory_until_its_last_checkpoint_is_durable():
    job = AJob(world=1, drain_give_up_s=100.0, orphan_ttl_s=10_000.0).start()
    job.stage(0, ONE)
    job.detach(0)
    for _ in range(20):
        if job.facts.active:
            job.say(ev.Drained(job=KEY, save=ONE, problem="ENOSPC"))
        job.tick(30)
    assert job.node.slots.holding(ONE), "the only copy was given away"
    if job.facts.active:
        job.say(ev.Drained(job=KEY, save=ONE, problem="ENOSPC"))
    drains = len(job.of(act.Drain))
    job.tick(100)
    assert len(job.of(act.Drain)) > drains, "and it is still tried"
    job.drain(ONE)
    assert KEY not in job.catalogue.jobs


def test_a_run_of_the_same_session_name_is_a_new_life():
    job = AJob(world=1).start()
    job.stage(0, ONE)
    job.drain(ONE)
    job.gone(0)
    job.attach(0)
    assert job.of(act.TakeIncarnation)[-1].at_least == 2


def test_one_crash_among_those_who_close_keeps_the_memory():
    job = AJob(world=2).start()
    job.stage_all(ONE)
    job.drain(ONE)
    job.gone(1)
    job.detach(0)
    job.tick(1)
    assert len(job.node.slots.holding(ONE)) == 2


def test_a_store_that_never_answers_lets_none_wait_for_ever():
    job = AJob(world=1, drain_give_up_s=100.0)
    job.attach(0)
    job.scan(problem="hung")
    job.number(1)
    job.slots(0)
    job.stage(0, ONE)
    for _ in range(10):
        job.tick(20)
        job.scan(problem="hung")
    assert job.ends(ONE) == ["failed"]


def test_a_digest_that_failed_before_its_drain_is_reported_to_the_drain():
    job = AJob(world=1).start()
    job.stage(0, ONE)
    slot = job.node.slots.holding(ONE)[0].name
    job.say(ev.DigestsFailed(job=KEY, slot=slot, save=ONE, problem="EMFILE"))
    job.say(ev.Drained(job=KEY, save=ONE))
    assert job.facts.active is None
    assert "EMFILE" in job.facts.records[ONE].error


def test_a_newer_forced_save_takes_the_place_of_one_that_waits():
    job = AJob(world=1, slots_per_rank=3)
    job.attach(0)
    job.scan(problem="hung")
    job.number(1)
    job.slots(0)
    two, three = SaveId(1, 2, 60, RUN), SaveId(1, 3, 70, RUN)
    for save in (ONE, two, three):
        job.stage(0, save, drain=True)
    assert len([s for s in job.node.slots if s.save]) < 3


def test_a_drain_that_finds_its_save_committed_confirms_it():
    job = AJob(world=1).start()
    job.stage(0, ONE)
    job.digest_all(ONE)
    job.say(ev.Drained(job=KEY, save=ONE, committed=True))
    assert not job.of(act.WriteVote)
    assert job.of(act.Commit)


def test_a_job_that_never_came_in_is_forgotten():
    job = AJob(world=1)
    job.attach(0)
    job.say(ev.IncarnationTaken(job=KEY, session="a", run=RUN, problem="ENOENT", hopeless=True))
    job.gone(0)
    assert KEY not in job.catalogue.jobs


def test_a_job_that_died_before_its_first_save_is_forgotten():
    job = AJob(world=1).start()
    job.gone(0)
    job.tick(61)
    assert KEY not in job.catalogue.jobs
