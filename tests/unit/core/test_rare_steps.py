"""Steps of a save that take two faults: a number in dispute, a look at the store in between, memory that comes back."""

import pytest

from ckptd.core import actions as act
from ckptd.core import events as ev
from ckptd.core.coordinator.job_state import MAX_RECORDS
from ckptd.core.coordinator.save_states import State
from ckptd.shared.base.ids import SaveId
from ckptd.shared.format.rank_members import members_of
from ckptd.shared.format.replica_attestations import Attestation
from ckptd.shared.protocol.messages import Cadence
from tests.runs import OTHER_RUN, RUN
from tests.unit.core.a_job import KEY, AJob

ONE, TWO, THREE, FOUR = (SaveId(1, i, 10 * i, RUN) for i in (1, 2, 3, 4))
SELDOM = Cadence(steps=1000)
HOPELESS_S = 100.0


def state(job, save):
    return job.facts.records[save].state


def adopt(job, save, *ranks):
    """A daemon that starts finds these segments."""
    for rank in ranks:
        name = f"r{rank:05d}-{save.counter:06d}.slot"
        job.say(ev.SlotAdopted(
            job=KEY, rank=rank, slot=name, capacity=4096, world_size=job.world, save=save, nbytes=10
        ))  # fmt: skip


def adopted(*saves, halves=(), cadence=None):
    """A daemon of two ranks that has started; the store has not answered yet."""
    job = AJob(world=2, cadence=cadence)
    for save in saves:
        adopt(job, save, 0, 1)
    for save in halves:
        adopt(job, save, 0)
    job.did += job.catalogue.adopted(KEY, job.now)
    return job


def report(job, fact):
    job.say(ev.Report(job=KEY, node="node", event=fact))


def holds(job, *saves, told=()):
    """The node says again what it has: all ranks' segments of these saves. told: what each rank attests."""
    segments = tuple(
        ev.HeldSegment(save, rank, job.world, 10, tuple(told[rank : rank + 1]))
        for save in saves
        for rank in range(job.world)
    )
    living = job.node.ranks.living
    report(job, ev.NodeHas(job=KEY, session="a", incarnation=1, run=RUN, segments=segments, living=living))


def failed(job, save):
    """Its drain was tried for long, in vain."""
    for _ in range(8):
        job.say(ev.Drained(job=KEY, save=save, problem="ENOSPC"))
        job.tick(60)
    assert state(job, save) is State.FAILED


# --- the number is in dispute


def test_no_save_of_a_number_in_dispute_waits_for_the_store():
    job = AJob(world=2, cadence=SELDOM, slots_per_rank=6)
    for rank in range(2):
        job.attach(rank)
    job.say(ev.IncarnationTaken(job=KEY, session="a", run=RUN, problem="EIO"))
    job.scan(problem="EIO")
    for rank in range(2):
        job.slots(rank)
    number = job.sessions.incarnation
    first, superseded, queued, kept, half = (SaveId(number, i, 10 * i, RUN) for i in range(1, 6))
    job.stage_all(first)
    job.stage_all(superseded, drain=True)
    job.stage_all(queued, drain=True)
    job.stage_all(kept)
    job.stage(0, half)
    before = [state(job, save) for save in (superseded, queued, kept, half)]
    assert before == [State.SUPERSEDED, State.QUEUED, State.KEPT, State.STAGING]
    job.scan(SaveId(number, 1, 5, OTHER_RUN))
    for save in (superseded, queued, kept, half):
        assert job.ends(save)[-1] == "failed"
        assert "the store has it already" in job.facts.records[save].reason


# --- saves that are another run's, and those of long ago


def test_what_was_taken_for_the_jobs_and_is_another_runs_is_in_no_table_any_more():
    queued, half = (SaveId(3, i, 10 * i, OTHER_RUN) for i in (1, 2))
    job = adopted(queued, halves=[half])
    assert [state(job, save) for save in (queued, half)] == [State.QUEUED, State.STAGING]
    job.scan(records=(ev.Recorded(3, RUN, "x"),))
    assert not job.facts.records
    assert not job.facts.anything_held
    assert len(job.node.slots.foreign) == 3


def test_saves_of_every_end_are_dropped_and_counted():
    job = AJob(world=2, cadence=SELDOM, slots_per_rank=4).start()
    job.stage_all(ONE)
    job.stage_all(TWO, drain=True)
    job.stage_all(THREE, drain=True)
    job.drain(ONE)
    job.drain(THREE)
    job.stage(0, FOUR)
    job.say(ev.SaveSkipped(job=KEY, rank=1, session="a", save=SaveId(1, 5, 50, RUN), reason="no slot", request=0))
    job.stage_all(SaveId(1, 6, 60, RUN))
    job.stage(0, SaveId(1, 7, 70, RUN))
    job.stage(1, SaveId(1, 7, 71, RUN))
    ends = {"durable": 2, "superseded": 1, "abandoned": 1, "skipped": 1, "kept": 1, "failed": 2}
    assert job.facts.ends == ends
    for counter in range(8, 8 + MAX_RECORDS + 8):
        job.stage_all(SaveId(1, counter, 10 * counter, RUN))
    assert min(job.facts.records).counter > 7
    assert job.facts.ends == ends | {"kept": 1 + MAX_RECORDS + 8}


# --- what a look at the store finds of a save that is not on its way there


def is_kept():
    job = adopted(halves=[ONE, TWO], cadence=SELDOM)
    job.attach(0, incarnation=1)
    holds(job, ONE, TWO)
    return job, TWO


def is_failed():
    job = AJob(world=1, drain_give_up_s=HOPELESS_S).start()
    job.stage(0, ONE)
    failed(job, ONE)
    return job, ONE


def is_superseded():
    job = AJob(world=1).start()
    job.stage(0, ONE)
    job.say(ev.Drained(job=KEY, save=ONE, problem="EIO"))
    job.stage(0, TWO)
    job.tick(1)
    job.say(ev.Drained(job=KEY, save=TWO, problem="EIO"))
    return job, ONE


def is_abandoned():
    job = AJob(world=2).start()
    job.stage(0, ONE)
    job.gone(1)
    return job, ONE


IDLE = [
    pytest.param(is_kept, State.KEPT, id="kept"),
    pytest.param(is_failed, State.FAILED, id="failed"),
    pytest.param(is_superseded, State.SUPERSEDED, id="superseded"),
    pytest.param(is_abandoned, State.ABANDONED, id="abandoned"),
]


@pytest.mark.parametrize(("begin", "before"), IDLE)
def test_what_is_found_committed_is_durable_whatever_was_said_of_it(begin, before):
    """Its commit was made by an earlier process, or its answer was lost."""
    job, save = begin()
    assert state(job, save) is before
    job.scan(save)
    assert state(job, save) is State.DURABLE


@pytest.mark.parametrize(("begin", "before"), IDLE)
def test_votes_that_are_all_there_are_committed_whatever_was_said_of_the_save(begin, before):
    job, save = begin()
    job.take()
    job.scan(partials=(ev.Partial(save, complete=True),))
    assert state(job, save) is State.COMMITTING
    assert [a.save for a in job.of(act.Commit)] == [save]
    job.say(ev.CommitEnded(job=KEY, save=save, nbytes=20))
    assert state(job, save) is State.DURABLE


# --- the way to the store ends


def test_what_waits_for_the_store_has_an_end_when_another_session_takes_the_job_over():
    job = AJob(world=1).start()
    job.stage(0, ONE)
    job.stage(0, TWO)
    assert [state(job, save) for save in (ONE, TWO)] == [State.DRAINING, State.QUEUED]
    job.scan(records=(ev.Recorded(1, RUN, "a"), ev.Recorded(9, OTHER_RUN, "b")))
    for save in (ONE, TWO):
        assert job.ends(save) == ["failed"]
        assert job.facts.records[save].reason == "incarnation 9 took the job over"


def test_a_commit_that_fails_for_too_long_is_given_up():
    job = AJob(world=1, drain_give_up_s=1.0).start()
    job.stage(0, ONE)
    job.digest_all(ONE)
    job.say(ev.Drained(job=KEY, save=ONE))
    job.say(ev.VoteWritten(job=KEY, save=ONE))
    job.say(ev.CommitEnded(job=KEY, save=ONE, problem="EIO"))
    job.tick(1)
    job.say(ev.CommitEnded(job=KEY, save=ONE, problem="EIO"))
    assert job.ends(ONE) == ["failed"]
    assert job.node.slots.holding(ONE)


# --- memory that was gone, or had never come, comes


def test_an_abandoned_save_of_which_all_is_found_is_kept():
    job = AJob(world=2, cadence=SELDOM).start()
    job.stage_all(ONE)
    job.drain(ONE)
    job.stage(0, TWO)
    job.gone(1)
    assert job.ends(TWO) == ["abandoned"]
    holds(job, TWO)
    assert job.ends(TWO)[-1] == "kept"


def test_an_abandoned_save_whose_replicas_differ_stays_so_each_time_that_it_is_found():
    job = AJob(world=2).start()
    told = [Attestation(members_of((0, 1)), cut * 8, b"w" + b"x" * 7) for cut in (b"c", b"d")]
    for _ in range(2):
        holds(job, ONE, told=told)
        assert state(job, ONE) is State.ABANDONED
        assert job.facts.records[ONE].mismatched


def test_the_newest_takes_the_turn_of_an_older_one_though_its_own_drain_was_given_up():
    """The rest of the older one is found only then."""
    job = AJob(world=2, drain_give_up_s=HOPELESS_S).start()
    job.stage(0, ONE)
    job.stage_all(TWO)
    assert job.ends(ONE) == ["abandoned"]
    failed(job, TWO)
    holds(job, ONE, TWO)
    assert [state(job, save) for save in (ONE, TWO)] == [State.SUPERSEDED, State.DRAINING]


def test_the_newest_takes_the_turn_of_an_older_one_when_its_memory_is_back():
    job = AJob(world=2).start()
    job.stage_all(ONE)
    job.stage(0, TWO)
    job.stage_all(THREE)
    report(job, ev.SegmentsReleased(job=KEY, ranks=(1,), save=THREE))
    job.drain(ONE)
    assert [job.ends(save) for save in (TWO, THREE)] == [["abandoned"], ["superseded"]]
    holds(job, TWO, THREE)
    assert [state(job, save) for save in (TWO, THREE)] == [State.SUPERSEDED, State.DRAINING]


def test_what_was_superseded_for_its_memory_is_drained_when_it_is_back_and_asked_for():
    job = AJob(world=2).start()
    job.stage_all(ONE)
    job.stage_all(TWO)
    report(job, ev.SegmentsReleased(job=KEY, ranks=(1,), save=TWO))
    job.drain(ONE)
    holds(job, TWO)
    assert job.ends(TWO)[-1] == "superseded"
    job.say(ev.DrainAsked(job=KEY))
    assert state(job, TWO) is State.DRAINING


def test_a_save_of_which_a_copy_is_given_up_still_waits_for_the_store():
    job = AJob(world=2).start()
    job.stage_all(ONE)
    job.stage_all(TWO)
    copy = ev.HeldSegment(TWO, 1, 2, 10)
    job.say(
        ev.Report(job=KEY, node="b", event=ev.NodeHas(job=KEY, session="a", incarnation=1, run=RUN, segments=(copy,)))
    )
    job.say(ev.Report(job=KEY, node="b", event=ev.SegmentsReleased(job=KEY, ranks=(1,), save=TWO)))
    assert state(job, TWO) is State.QUEUED
    report(job, ev.SegmentsReleased(job=KEY, ranks=(1,), save=TWO))
    assert state(job, TWO) is State.SUPERSEDED
