"""What a job's journal has of a run on one node: each record is of what its ranks were told."""

import pytest

from ckptd.core import actions as act
from ckptd.core import events as ev
from ckptd.core.coordinator import journal
from ckptd.shared.base.ids import SaveId
from ckptd.shared.protocol import journal as log
from ckptd.shared.protocol.messages import Cadence, End, Tier
from tests.runs import OTHER_RUN, RUN
from tests.unit.core.a_job import KEY, AJob

ONE, TWO, THREE = (SaveId(1, number, 10 * number, RUN) for number in (1, 2, 3))


def records(job, kind=None):
    return [one.entry for one in job.of(act.KeepEntry) if kind is None or isinstance(one.entry, kind)]


def kinds(job):
    return [type(entry).__name__ for entry in records(job)]


def runs(job):
    return [(one.began.incarnation, one.began.again) for one in job.of(act.KeepEntry)]


def started(**policy):
    job = AJob(**policy).start()
    job.take()
    return job


def test_a_save_that_becomes_durable_has_its_times_and_what_its_ranks_report():
    job = started()
    job.stage(0, ONE, stall_s=0.25, late_nbytes=4)
    job.tick(2.0)
    job.stage(1, ONE, stall_s=0.75, late_nbytes=3)
    job.tick(5.0)
    job.drain(ONE)
    staged, durable = records(job)
    assert staged == log.Staged(
        at=0, counter=1, step=10, nbytes=20, seconds=2.0, stall_s=0.75, mean_stall_s=0.5, late_nbytes=7
    )
    assert durable == log.Durable(at=0, counter=1, seconds=5.0, drain_s=5.0, nbytes=20, tries=1)
    kept = job.of(act.KeepEntry)[0]
    assert kept.began == log.RunBegan(
        at=0, incarnation=1, run=RUN, world_size=2, nodes=1, coordinator="node", drain_every="1",
        version=kept.began.version,
    )  # fmt: skip
    assert [one.age_s for one in job.of(act.KeepEntry)] == [2.0, 7.0]


def test_a_save_counts_from_when_the_training_went_on():
    """Of one rank, too: what was copied late is a part of its time, and the save cannot be loaded before."""
    job = started()
    job.stage(0, ONE, late_s=3.0)
    job.tick(2.0)
    job.stage(1, ONE, late_s=4.0)
    (staged,) = records(job)
    assert staged.seconds == 5.0
    alone = AJob(world=1).start()
    alone.tick(10.0)
    alone.take()
    alone.stage(0, ONE, late_s=4.0)
    assert records(alone)[0].seconds == 4.0


def test_a_cadence_is_on_record_as_the_user_gave_it():
    for cadence, text in ((Cadence(10, 0.0), "10"), (Cadence(0, 90.0), "90s"), (Cadence(0, 0.0), "auto")):
        job = AJob(cadence=cadence).start()
        job.stage_all(ONE)
        assert {one.began.drain_every for one in job.of(act.KeepEntry)} == {text}


def test_each_other_end_is_on_record_with_a_reason_where_the_settings_do_not_explain_it():
    job = AJob(cadence=Cadence(1000, 0.0)).start()
    job.take()
    job.stage_all(ONE)
    job.drain(ONE)
    job.stage_all(TWO)
    job.stage(0, THREE)
    job.gone(1)
    assert [(entry.counter, entry.end, entry.reason) for entry in records(job, log.Ended)] == [
        (2, End.KEPT, ""),
        (3, End.ABANDONED, job.facts.records[THREE].reason),
    ]
    assert "rank 1" in job.facts.records[THREE].reason


def test_a_drain_that_failed_counts_as_a_try_and_leaves_a_problem():
    job = started()
    job.stage_all(ONE)
    job.digest_all(ONE)
    job.say(ev.Drained(job=KEY, save=ONE, problem="EIO"))
    job.tick(3.0)
    job.drain(ONE)
    (problem,) = records(job, log.Problem)
    assert problem.text.startswith("drain of step 10 (incarnation 1) failed")
    (durable,) = records(job, log.Durable)
    assert durable.tries == 2
    assert durable.drain_s < durable.seconds


def test_the_same_problem_again_has_a_record_when_it_was_said_twice_as_often():
    job = started()
    journal = job.catalogue.jobs[KEY].journal
    for _ in range(9):
        job.did += journal.follow(None, [act.Note(job=KEY, text="x" * 900)], job.now)
    found = records(job, log.Problem)
    assert [entry.times for entry in found] == [1, 1, 2, 4]
    assert {len(entry.text) for entry in found} == {log.MAX_TEXT_CHARS}


def test_a_run_in_which_nothing_happened_begins_with_its_load():
    job = AJob().start(committed=(SaveId(1, 1, 10, OTHER_RUN),), number=2)
    for rank in range(2):
        job.ask_load(rank)
    job.tick(1.0)
    job.number(3)
    job.scan(SaveId(1, 1, 10, OTHER_RUN))
    for rank in range(2):
        job.report(rank, SaveId(1, 1, 10, OTHER_RUN), Tier.PFS)
    (restored,) = records(job)
    assert restored == log.Restored(
        at=0, incarnation=1, counter=1, step=10, seconds=1.0, tiers={Tier.PFS: 2}, nbytes=10, newest=-1
    )
    assert runs(job) == [(3, False)]
    assert job.of(act.KeepEntry)[0].age_s == 1.0


def test_a_load_in_the_middle_ends_a_run_and_has_on_record_how_far_it_had_come():
    job = started()
    job.stage_all(ONE)
    job.drain(ONE)
    job.stage_all(TWO)
    job.take()
    for rank in range(2):
        job.ask_load(rank)
    job.number(2)
    job.scan(ONE)
    job.digest_all(TWO)
    job.report_both(TWO)
    assert kinds(job)[:2] == ["RunEnded", "Restored"]
    assert runs(job)[:2] == [(1, False), (2, False)]
    (restored,) = records(job, log.Restored)
    assert (restored.step, restored.newest, restored.tiers) == (20, 20, {Tier.ARENA: 2})


def test_a_run_that_every_rank_closed_has_ended_and_its_last_drain_is_on_record_after_that():
    job = started()
    job.stage_all(ONE)
    job.detach(0)
    job.detach(1)
    job.drain(ONE)
    assert kinds(job) == ["Staged", "RunEnded", "Durable"]
    assert records(job, log.RunEnded)[0].how == "closed"


@pytest.mark.parametrize(("failed", "how"), [((0,), "failed"), ((0, 1), "failed"), ((), "closed")])
def test_a_run_that_an_exception_ended_has_failed(failed, how):
    job = started()
    for rank in (0, 1):
        job.detach(rank, failed=rank in failed)
    assert records(job, log.RunEnded)[0].how == how


def test_a_run_with_a_rank_that_was_killed_is_lost_whatever_the_others_said():
    job = started()
    job.detach(0, failed=True)
    job.gone(1)
    assert records(job, log.RunEnded)[0].how == "lost"


def test_a_run_whose_ranks_end_without_a_word_is_lost_with_the_number_of_its_ranks():
    job = started()
    job.gone(0)
    job.gone(1)
    assert records(job) == [
        log.Lost(at=0, node="node", what="ranks", ranks=1),
        log.Lost(at=0, node="node", what="ranks", ranks=1),
        log.RunEnded(at=0, how="lost"),
    ]


def test_many_losses_in_a_row_are_added_up():
    job = AJob(world=40).start()
    job.take()
    for rank in range(40):
        job.gone(rank)
    lost = records(job, log.Lost)
    assert len(lost) == 17
    assert sum(one.ranks for one in lost) == 40
    assert kinds(job)[-1] == "RunEnded"


def test_a_session_that_takes_the_job_over_ends_the_run_before_it():
    job = started()
    job.take()
    for rank in range(3):
        job.attach(rank, "b", takeover=True, world=3)
    job.number(2)
    assert records(job) == [log.RunEnded(at=0, how="taken over")]
    assert runs(job) == [(1, False)]
    assert job.of(act.KeepEntry)[0].began.world_size == 2


def test_a_daemon_that_restarted_continues_the_run():
    job = AJob()
    for rank in range(2):
        job.attach(rank, incarnation=4)
    job.scan()
    for rank in range(2):
        job.slots(rank)
    job.stage_all(SaveId(4, 9, 90, RUN))
    assert kinds(job) == ["Staged"]
    assert runs(job) == [(4, True)]


def test_a_run_is_not_over_while_a_rank_of_it_lives_that_has_not_come_back_to_a_daemon_that_restarted():
    job = AJob()
    for rank in range(2):
        job.say(ev.RankFound(job=KEY, rank=rank, session="a", pid=1, host="node"))
    job.attach(1, incarnation=4)
    job.scan()
    job.detach(1)
    assert records(job, log.RunEnded) == []
    job.attach(0, incarnation=4)
    job.detach(0)
    assert records(job, log.RunEnded) == [log.RunEnded(at=0, how="closed")]


def test_a_save_of_the_run_before_is_on_record_when_it_becomes_durable_and_not_as_staged_again():
    job = started()
    job.tick(1.0)
    job.stage_all(ONE)
    job.gone(0)
    job.gone(1)
    for rank in range(2):
        job.attach(rank, "b")
    job.number(2)
    job.take()
    job.drain(ONE)
    (durable,) = records(job)
    assert (durable.counter, durable.incarnation) == (1, 1)
    assert runs(job) == [(2, False)]


def test_what_was_found_in_the_arena_was_staged_at_a_time_that_is_not_known_here():
    """0 says so: who reads the journal has the record of the daemon that saw it."""
    job = AJob()
    job.now = 5.0
    for rank in range(2):
        slot = f"r{rank:05d}-000001.slot"
        job.say(ev.SlotAdopted(job=KEY, rank=rank, slot=slot, capacity=4096, world_size=2, save=ONE, nbytes=10))
    job.did += job.catalogue.adopted(KEY, job.now)
    job.scan()
    for rank in range(2):
        job.attach(rank, "b")
    job.number(2)
    job.tick(3.0)
    job.drain(ONE)
    (durable,) = records(job, log.Durable)
    assert (durable.counter, durable.seconds, durable.nbytes) == (1, 0.0, 20)
    assert durable.drain_s > 0


def test_what_an_earlier_daemon_drained_and_this_one_commits_is_on_record_without_a_time_of_its_drain():
    job = AJob()
    job.now = 5000.0
    for rank in range(2):
        job.attach(rank, "b")
    job.scan(partials=(ev.Partial(ONE, complete=True),))
    job.number(2)
    job.tick(3.0)
    assert [one.save for one in job.of(act.Commit)] == [ONE]
    job.say(ev.CommitEnded(job=KEY, save=ONE, nbytes=20))
    (durable,) = records(job, log.Durable)
    assert durable == log.Durable(at=0, counter=1, seconds=0.0, drain_s=0.0, nbytes=20, incarnation=1)
    assert runs(job) == [(2, False)]


def test_what_the_store_has_already_is_on_record_since_it_was_drained():
    job = AJob()
    for rank in range(2):
        job.attach(rank, "b")
    job.scan(ONE)
    job.number(2)
    assert not records(job, log.Durable)


def test_bytes_of_a_load_are_those_of_all_ranks_or_not_known():
    job = AJob()
    job.say(ev.SlotAdopted(job=KEY, rank=0, slot="r0-1.slot", capacity=4096, world_size=2, save=ONE, nbytes=10))
    job.did += job.catalogue.adopted(KEY, job.now)
    found = job.facts.records[ONE]
    assert journal.nbytes_of(found) == 0
    job.say(ev.SlotAdopted(job=KEY, rank=1, slot="r1-1.slot", capacity=4096, world_size=2, save=ONE, nbytes=10))
    job.did += job.catalogue.adopted(KEY, job.now)
    assert journal.nbytes_of(found) == 20
