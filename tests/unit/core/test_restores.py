"""Loads: every rank is answered, whatever the others do, and all get the same bytes."""

import pytest

from ckptd.core import actions as act
from ckptd.core import events as ev
from ckptd.shared.base.ids import SaveId
from ckptd.shared.protocol.messages import Cadence, Done, LoadFrom, Refused, Tier, decode_reply, encode
from ckptd.shared.protocol.segments import Wanted
from tests.runs import OTHER_RUN, OTHER_STORE_ID, RUN, STORE_ID
from tests.unit.core.a_job import KEY, LATE, AJob

ONE = SaveId(1, 1, 10, RUN)
TWO = SaveId(1, 2, 20, RUN)


def a_load(*, committed=(), staged=(), step=None, world=2, **policy):
    """A job whose ranks have all asked; returns it and the requests."""
    job = AJob(world=world, **policy).start(committed=committed)
    for save in staged:
        job.stage_all(save)
        job.digest_all(save)
    asked = [job.ask_load(rank, step=step) for rank in range(world)]
    job.number(2)
    job.scan(*committed)
    return job, asked


def orders(job, asked):
    return [job.answer(seq) for seq in asked]


def test_nothing_to_restore():
    job, asked = a_load()
    assert [(o.save, o.agreed, o.incarnation) for o in orders(job, asked)] == [(None, False, 2)] * 2


def test_the_newest_wins_and_is_agreed_when_all_have_read_it():
    job, asked = a_load(committed=(ONE,), staged=(TWO,))
    assert {(o.save, o.tier, o.agreed) for o in orders(job, asked)} == {(TWO, Tier.ARENA, False)}
    first = job.report(0, TWO, Tier.ARENA)
    assert job.answer(first) is None
    last = job.report(1, TWO, Tier.ARENA)
    assert job.answer(first).agreed
    assert job.answer(last).agreed
    assert job.answer(last).incarnation == 2


def test_a_damaged_slot_falls_to_the_store_for_that_rank_only():
    job, _ = a_load(committed=(ONE,), staged=(ONE,))
    seqs = [job.report(0, ONE, Tier.ARENA, "digest"), job.report(1, ONE, Tier.ARENA)]
    assert [job.answer(seq).tier for seq in seqs] == [Tier.PFS, Tier.ARENA]
    assert job.answer(seqs[0]).path == f"/store/job/{ONE.dirname}"
    assert any("digest" in note for note in job.answer(seqs[0]).notes)


def test_a_checkpoint_that_one_rank_cannot_read_is_passed_over_by_all():
    job, _ = a_load(committed=(ONE,), staged=(TWO,))
    seqs = [job.report(0, TWO, Tier.ARENA, "digest"), job.report(1, TWO, Tier.ARENA)]
    assert [(job.answer(seq).save, job.answer(seq).tier) for seq in seqs] == [(ONE, Tier.PFS)] * 2


def test_when_what_was_staged_only_is_damaged_all_are_refused_with_every_reason():
    job, _ = a_load(staged=(TWO,))
    seqs = [job.report(0, TWO, Tier.ARENA, "digest of block 3"), job.report(1, TWO, Tier.ARENA)]
    for seq in seqs:
        assert "digest of block 3" in job.answer(seq).message
        assert job.answer(seq).code == "restore"
        assert "ckptd forget" in job.answer(seq).hint


def test_when_nothing_is_left_of_what_was_durable_all_are_refused_with_every_reason():
    job, _ = a_load(committed=(TWO,))
    seqs = [job.report(0, TWO, Tier.PFS, "digest of block 3"), job.report(1, TWO, Tier.PFS)]
    for seq in seqs:
        assert "digest of block 3" in job.answer(seq).message
        assert job.answer(seq).code == "restore"


def test_a_step_that_is_not_there():
    job, asked = a_load(committed=(ONE,), step=11)
    assert {o.message for o in orders(job, asked)} == {"there is no checkpoint of step 11"}


OTHERS = ("demo (step 900)", "llama (step 7)")


@pytest.mark.parametrize("step", [None, 11])
def test_a_job_without_checkpoints_names_those_that_the_store_has_of_other_jobs(step):
    job = AJob(world=1).start()
    seq = job.ask_load(0, step=step)
    job.number(2)
    job.scan(others=OTHERS)
    answer = job.answer(seq)
    said = answer.message if step else " ".join(answer.notes)
    assert "no checkpoint of job 'job' lies in /store, which has demo (step 900), llama (step 7)" in said
    assert "if one of these is meant, give its name: connect(job=...)" in (answer.hint if step else said)


def test_only_the_name_that_is_nearly_the_same_is_proposed():
    job = AJob(world=1).start()
    seq = job.ask_load(0)
    job.number(2)
    job.scan(others=("llama (step 7)", "jobs (step 900)"))
    assert "if 'jobs' is meant, connect(job='jobs')" in " ".join(job.answer(seq).notes)


@pytest.mark.parametrize("step", [None, 11])
def test_a_job_that_was_saved_to_another_store_learns_that_what_lies_there_is_not_seen(step):
    job = AJob(world=1)
    job.say(ev.StoreRemembered(job=KEY, store_id=OTHER_STORE_ID))
    job.start()
    seq = job.ask_load(0, step=step)
    job.number(2)
    job.scan(others=OTHERS)
    answer = job.answer(seq)
    said = answer.message if step else answer.notes[0]
    assert f"checkpoints in the store with id {OTHER_STORE_ID}, to which job 'job' was saved before" in said
    assert f"/store is now the store with id {STORE_ID}" in said
    assert "mount" in (answer.hint if step else said)
    assert "demo" not in f"{answer}", "a job of another store, which nobody misspelt"


def test_what_the_look_at_the_store_proposes_is_the_hint():
    job = AJob(world=1).start()
    seq = job.ask_load(0)
    job.number(2)
    job.scan(notes=("/store/job/best is a checkpoint that was renamed",), cures=("mv /store/job/best there",))
    assert job.answer(seq).message == "no checkpoint can be restored: /store/job/best is a checkpoint that was renamed"
    assert job.answer(seq).hint == "mv /store/job/best there"


def test_a_load_in_the_store_that_was_always_the_jobs_names_no_other():
    job = AJob(world=1)
    job.say(ev.StoreRemembered(job=KEY, store_id=STORE_ID))
    job.start()
    seq = job.ask_load(0)
    job.number(2)
    job.scan()
    assert job.answer(seq).notes == []


def test_ranks_that_ask_for_different_steps():
    job = AJob(world=2).start()
    asked = [job.ask_load(0, step=1), job.ask_load(1, step=2)]
    assert {o.code for o in orders(job, asked)} == {"usage"}


def test_a_store_that_does_not_answer_is_no_empty_store():
    job = AJob(world=1).start()
    seq = job.ask_load(0)
    job.number(2)
    job.scan(problem="EIO")
    assert job.answer(seq).code == "restore"
    assert "EIO" in job.answer(seq).message


def test_memory_serves_while_the_store_does_not_answer():
    job = AJob(world=1).start()
    job.stage(0, ONE)
    job.digest_all(ONE)
    seq = job.ask_load(0)
    job.scan(problem="EIO")
    job.say(ev.IncarnationTaken(job=KEY, session="a", run=RUN, problem="EIO"))
    assert (job.answer(seq).save, job.answer(seq).tier) == (ONE, Tier.ARENA)
    assert any("EIO" in note for note in job.answer(seq).notes)


# --- other ranks than those that saved


def test_a_checkpoint_of_another_world_size_is_read_from_the_store_by_all():
    job = AJob(world=2).start()
    asked = [job.ask_load(rank) for rank in range(2)]
    job.number(2)
    job.say(ev.StoreScanned(job=KEY, store_id=STORE_ID, after=LATE, committed=(ev.OnStore(ONE, 4, 10, ONE.dirname),)))
    assert [(o.save, o.tier) for o in orders(job, asked)] == [(ONE, Tier.PFS)] * 2
    assert orders(job, asked)[0].path.endswith(ONE.dirname)


def another_world(*, digested=True, **policy):
    """A job of one rank whose newest checkpoint, of two, is in memory only."""
    job = AJob(world=2, **policy, cadence=Cadence(steps=100)).start(committed=())
    job.stage_all(ONE)
    job.drain(ONE)
    job.stage_all(TWO)
    if digested:
        job.digest_all(TWO)
    for rank in range(2):
        job.gone(rank)
    job.world = 1
    job.attach(0, "b")
    job.number(2)
    return job


def test_ranks_of_another_world_read_from_the_memory_of_all_ranks():
    job = another_world()
    job.take()
    seq = job.ask_load(0, "b")
    job.number(3)
    job.say(ev.StoreScanned(job=KEY, store_id=STORE_ID, after=LATE, committed=(ev.OnStore(ONE, 2, 10, ONE.dirname),)))
    job.digest_all(TWO)
    answer = job.answer(seq)
    assert (answer.save, answer.tier, answer.saved_by) == (TWO, Tier.ARENA, 2)
    wanted, seq = (Wanted(0), Wanted(1)), job.request()
    job.say(ev.SegmentsWanted(job=KEY, rank=0, session="b", request=seq, save=TWO, wanted=wanted))
    assert [(one.rank, one.name[-5:]) for one in job.answer(seq).files] == [(0, ".slot"), (1, ".slot")]
    assert not job.of(act.PullSegments)
    assert not job.of(act.Drain)


def test_a_rank_that_is_replaced_while_it_waits_for_segments_receives_the_answer_and_its_successor_does_not():
    job = another_world(digested=False)
    seq = job.ask_load(0, "b")
    job.number(3)
    job.say(ev.StoreScanned(job=KEY, store_id=STORE_ID, after=LATE, committed=(ev.OnStore(ONE, 2, 10, ONE.dirname),)))
    assert job.answer(seq).saved_by == 2
    seq = job.request()
    job.say(ev.SegmentsWanted(job=KEY, rank=0, session="b", request=seq, save=TWO, wanted=(Wanted(0), Wanted(1))))
    assert job.answer(seq) is None
    job.attach(0, "c", takeover=True)
    job.number(4)
    assert "this load is over" in job.answer(seq).refused
    assert [a.session for a in job.of(act.ToRank) if getattr(a.message, "reply_to", None) == seq] == ["b"]


def test_what_they_cannot_read_there_is_read_from_the_store():
    job, _ = a_load(committed=(ONE,), staged=(ONE,))
    seqs = [job.report(0, ONE, Tier.ARENA, "not here", reshape=True), job.report(1, ONE, Tier.ARENA)]
    assert [(o.tier, o.saved_by) for o in orders(job, seqs)] == [(Tier.ARENA, 2)] * 2
    seqs = [job.report(0, ONE, Tier.ARENA, "block 0 is damaged", lacks=(1,)), job.report(1, ONE, Tier.ARENA)]
    assert [(o.tier, o.saved_by) for o in orders(job, seqs)] == [(Tier.PFS, 0)] * 2
    assert any("block 0 is damaged" in note for note in job.answer(seqs[0]).notes)


def test_one_in_memory_only_that_cannot_be_pulled_is_drained_first():
    job = another_world()
    job.take()
    seq = job.ask_load(0, "b")
    job.number(3)
    job.say(ev.StoreScanned(job=KEY, store_id=STORE_ID, after=LATE, committed=(ev.OnStore(ONE, 2, 10, ONE.dirname),)))
    assert job.answer(seq).saved_by == 2
    seq = job.report(0, TWO, Tier.ARENA, "no room here", session="b")
    assert job.answer(seq) is None
    assert job.facts.active == TWO
    job.drain(TWO)
    assert (job.answer(seq).save, job.answer(seq).tier) == (TWO, Tier.PFS)


def test_ranks_that_need_other_ranks_images_and_cannot_have_them_here_read_the_store():
    job, _ = a_load(committed=(ONE,), staged=(ONE,))
    seqs = [job.report(0, ONE, Tier.ARENA, "not here", reshape=True), job.report(1, ONE, Tier.ARENA)]
    assert not job.answer(seqs[0]).notes, "nothing was wrong"
    seqs = job.report_both(ONE, "no room here")
    assert [(job.answer(seq).save, job.answer(seq).tier) for seq in seqs] == [(ONE, Tier.PFS)] * 2
    assert "no room here" in job.answer(seqs[0]).notes[0]
    seqs = [job.report(rank, ONE, Tier.PFS) for rank in range(2)]
    assert all(job.answer(seq).agreed for seq in seqs)


def test_ranks_that_need_other_ranks_images_and_cannot_have_them_here_have_them_drained():
    job, _ = a_load(staged=(ONE,))
    seqs = [job.report(0, ONE, Tier.ARENA, "not here", reshape=True), job.report(1, ONE, Tier.ARENA)]
    assert [job.answer(seq).saved_by for seq in seqs] == [2, 2]
    seqs = job.report_both(ONE, "no room here")
    assert [job.answer(seq) for seq in seqs] == [None, None]
    job.drain(ONE)
    assert [(job.answer(seq).save, job.answer(seq).tier) for seq in seqs] == [(ONE, Tier.PFS)] * 2


def test_a_rank_that_finds_all_images_too_few_has_found_damage():
    job, _ = a_load(committed=(ONE, TWO))
    seqs = [job.report(rank, TWO, Tier.PFS, "not there", reshape=True) for rank in range(2)]
    assert {job.answer(seq).save for seq in seqs} == {ONE}
    assert "not there" in job.answer(seqs[0]).notes[0]


def test_a_drain_that_a_load_waits_for_has_a_time_of_its_own():
    job, _ = a_load(staged=(ONE,))
    job.tick(290)
    job.report_both(ONE, "not here", reshape=True)
    seqs = job.report_both(ONE, "no room here")
    job.tick(290)
    assert [job.answer(seq) for seq in seqs] == [None, None]
    job.tick(20)
    assert {job.answer(seq).code for seq in seqs} == {"restore"}
    assert "its drain does not end" in job.answer(seqs[0]).message


def test_a_failing_drain_that_a_load_waits_for_is_given_up_for_an_older_checkpoint():
    job, _ = a_load(staged=(TWO,), committed=(ONE,))
    job.report_both(TWO, "not here", reshape=True)
    seqs = job.report_both(TWO, "no room here")
    job.tick(310)
    answer = job.answer(seqs[0])
    assert (answer.save, answer.tier) == (ONE, Tier.PFS)
    assert any("its drain does not end" in note for note in answer.notes)


def a_silent_store(**number):
    """A job whose store has not answered. The load of its ranks waits for the drain of what lies in memory."""
    job = AJob(world=2)
    for rank in range(2):
        job.attach(rank)
    job.say(ev.IncarnationTaken(job=KEY, session="a", run=RUN, **number))
    job.scan(problem="EIO")
    for rank in range(2):
        job.slots(rank)
    job.stage_all(ONE)
    job.digest_all(ONE)
    for rank in range(2):
        job.ask_load(rank)
    job.scan(problem="EIO")
    job.say(ev.IncarnationTaken(job=KEY, session="a", run=RUN, problem="EIO"))
    job.report_both(ONE, "not here", reshape=True)
    seqs = job.report_both(ONE, "no room here")
    assert orders(job, seqs) == [None, None]
    return job, seqs


def test_a_load_that_waits_for_a_drain_goes_on_when_the_checkpoint_is_found_on_the_store():
    job, seqs = a_silent_store(number=1)
    job.scan(ONE)
    assert [(o.save, o.tier) for o in orders(job, seqs)] == [(ONE, Tier.PFS)] * 2


def test_a_load_does_not_wait_for_a_drain_that_an_older_life_forbids():
    job, seqs = a_silent_store(problem="EIO")
    theirs = SaveId(2, 1, 5, OTHER_RUN)
    job.scan(theirs)
    job.number(3)  # the load's own was made up too, and is that life's
    job.scan(theirs)
    assert [(o.save, o.tier) for o in orders(job, seqs)] == [(theirs, Tier.PFS)] * 2


def test_a_rank_that_never_asks_ends_the_load():
    job = AJob(world=2).start()
    seq = job.ask_load(0)
    job.hold()
    job.number(2)
    job.scan()
    job.tick(301)
    assert "ranks [1] did not call load" in job.answer(seq).message


# --- nobody waits for ever


@pytest.mark.parametrize("end", ["gone", "detach"])
def test_a_rank_that_still_reads_when_another_ends_is_answered(end):
    job, _ = a_load(staged=(ONE,))
    getattr(job, end)(1)
    seq = job.report(0, ONE, Tier.ARENA)
    assert isinstance(job.answer(seq), Refused)
    assert "rank 1" in job.answer(seq).message


@pytest.mark.parametrize("end", ["gone", "detach"])
def test_a_rank_that_asks_when_another_has_ended_is_answered(end):
    job = AJob(world=2).start()
    getattr(job, end)(1)
    seq = job.ask_load(0)
    assert isinstance(job.answer(seq), Refused)
    assert "rank 1 left the job" in job.answer(seq).message
    assert job.answer(seq).code == "restore"


def test_a_rank_that_asks_when_very_many_have_ended_learns_the_first_of_them():
    ranks = 200
    job = AJob(world=ranks).start()
    for rank in range(1, ranks):
        job.gone(rank)
    answer = job.answer(job.ask_load(0))
    assert isinstance(answer, Refused)
    assert decode_reply(encode(answer)) == answer
    assert "rank 1, 2, 3, 4, 5, 6, 7, 8, ... (199 in all) left the job" in answer.message


def test_a_rank_that_still_reads_when_anothers_state_does_not_fit_is_answered():
    job, _ = a_load(staged=(ONE,))
    first = job.report(0, ONE, Tier.ARENA, "shapes differ", fatal=True)
    last = job.report(1, ONE, Tier.ARENA)
    assert job.answer(first).code == "mismatch"
    job.hold()
    assert isinstance(job.answer(last), Refused)
    assert "shapes differ" in job.answer(last).message


def test_a_rank_that_asks_again_in_the_middle_is_sent_to_read_again_before_any_rank_learns_of_agreement():
    job, _ = a_load(staged=(ONE,))
    job.report(1, ONE, Tier.ARENA)
    job.hold()
    again = job.ask_load(1)
    job.hold()
    assert (job.answer(again).save, job.answer(again).agreed) == (ONE, False)
    waiting = job.report(0, ONE, Tier.ARENA)
    job.hold()
    assert job.answer(waiting) is None
    last = job.report(1, ONE, Tier.ARENA)
    for seq in (waiting, last):
        assert job.answer(seq).agreed


def test_the_next_load_starts_afresh_after_a_failed_one():
    job, _ = a_load(staged=(ONE,))
    job.report(0, ONE, Tier.ARENA, "shapes differ", fatal=True)
    job.report(1, ONE, Tier.ARENA)
    asked = [job.ask_load(rank) for rank in range(2)]
    job.number(3)
    job.scan()
    assert {o.save for o in orders(job, asked)} == {ONE}
    seqs = [job.report(rank, ONE, Tier.ARENA) for rank in range(2)]
    assert all(job.answer(seq).agreed for seq in seqs)


def test_after_a_load_that_failed_the_job_goes_on_saving_in_its_incarnation():
    job, _ = a_load(staged=(ONE,))
    job.report(0, ONE, Tier.ARENA, "shapes differ", fatal=True)
    job.report(1, ONE, Tier.ARENA)
    for rank in range(2):
        assert isinstance(job.answer(job.stage(rank, TWO)), Done)
    assert isinstance(job.answer(job.attach(0, incarnation=1)), object)
    assert job.sessions.incarnation == 1


def test_after_a_load_that_succeeded_the_former_incarnation_is_stale():
    job, _ = a_load(staged=(ONE,))
    for rank in range(2):
        job.report(rank, ONE, Tier.ARENA)
    assert job.answer(job.stage(0, TWO)).code == "stale"
    assert isinstance(job.answer(job.stage(0, SaveId(2, 1, 20, RUN))), Done)


def test_the_slots_of_the_chosen_checkpoint_are_held_until_all_have_read():
    job, _ = a_load(staged=(ONE,))
    job.report(0, ONE, Tier.ARENA)
    assert len(job.node.slots.holding(ONE)) == 2


def test_retention_waits_for_a_load():
    three = tuple(SaveId(1, i, i, RUN) for i in range(1, 6))
    job = AJob(world=1, keep_last=2).start()
    seq = job.ask_load(0)
    job.take()
    job.number(2)
    job.say(
        ev.StoreScanned(
            job=KEY, store_id=STORE_ID, after=LATE, committed=tuple(ev.OnStore(s, 1, 1, s.dirname) for s in three)
        )
    )
    assert not [a for a in job.did if type(a).__name__ == "RemoveCheckpoint"]
    assert isinstance(job.answer(seq), LoadFrom)
    job.report(0, three[-1], Tier.PFS)
    assert [a.save for a in job.did if type(a).__name__ == "RemoveCheckpoint"] == list(three[:3])


def test_a_rank_is_sent_to_its_slot_once_the_digests_are_taken():
    job = AJob().start()
    job.stage_all(TWO)
    asked = [job.ask_load(rank) for rank in range(2)]
    job.number(2)
    job.scan()
    assert orders(job, asked) == [None, None]
    job.digest_all(TWO)
    assert [o.tier for o in orders(job, asked)] == [Tier.ARENA] * 2


def test_a_load_after_a_rank_left_is_refused_at_once():
    job = AJob(world=2).start()
    job.detach(1)
    asked = job.ask_load(0)
    assert job.answer(asked).code == "restore"
    assert "rank 1 left" in job.answer(asked).message


# --- a rank that hangs in its read


def test_a_rank_that_never_reports_ends_the_load_and_is_named():
    job, _ = a_load(staged=(ONE,), world=3)
    waiting = job.report(1, ONE, Tier.ARENA)
    job.hold()
    job.tick(3599)
    assert job.answer(waiting) is None
    job.tick(2)
    refused = job.answer(waiting)
    assert refused.code == "restore"
    assert "ranks 0, 2 did not report within 3600 s" in refused.message
    assert not job.catalogue.jobs[KEY].coordinator.restores.running


def test_the_late_one_learns_why_its_load_is_over_and_another_load_can_begin():
    job, _ = a_load(staged=(ONE,))
    job.report(0, ONE, Tier.ARENA)
    job.hold()
    job.tick(3601)
    late = job.report(1, ONE, Tier.ARENA)
    job.hold()
    assert "ranks 1 did not report" in job.answer(late).message
    asked = [job.ask_load(rank) for rank in range(2)]
    job.number(3)
    job.scan()
    assert {o.save for o in orders(job, asked)} == {ONE}


def test_each_round_of_a_load_has_its_own_time_to_read():
    job, _ = a_load(committed=(ONE,), staged=(TWO,))
    job.tick(3000)
    seqs = [job.report(0, TWO, Tier.ARENA, "digest"), job.report(1, TWO, Tier.ARENA)]
    assert [job.answer(seq).save for seq in seqs] == [ONE, ONE]
    waiting = job.report(0, ONE, Tier.PFS)
    job.hold()
    job.tick(3000)
    assert job.answer(waiting) is None
    job.tick(601)
    assert "ranks 1 did not report" in job.answer(waiting).message


def test_the_slots_are_free_again_once_the_load_is_given_up():
    job, _ = a_load(staged=(ONE,))
    job.report(0, ONE, Tier.ARENA)
    job.tick(3601)
    assert job.node.loads.save is None
