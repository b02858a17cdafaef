"""The lives of saves: complete, late, repeated, disputed, superseded; drains that fail and stores that come back."""

import itertools

from ckptd.core import actions as act
from ckptd.core import events as ev
from ckptd.shared.base.ids import SaveId
from ckptd.shared.protocol.messages import Cadence, Done, Progress, SlotGranted
from tests.runs import RUN
from tests.unit.core.a_job import KEY, AJob

ONE, TWO, THREE, FOUR = (SaveId(1, i, 10 * i, RUN) for i in (1, 2, 3, 4))


def milestones(job, save, rank=0):
    return [str(m.milestone) for m in job.told(rank) if isinstance(m, Progress) and m.save == save and m.milestone]


def test_staged_only_when_the_last_rank_delivered_then_durable():
    job = AJob(world=2).start()
    job.stage(0, ONE)
    assert milestones(job, ONE) == []
    job.stage(1, ONE)
    assert milestones(job, ONE) == ["staged"]
    assert [a.slots for a in job.of(act.Drain)] == [tuple(s.name for s in job.node.slots.holding(ONE))]
    job.say(ev.Drained(job=KEY, save=ONE))
    assert not job.of(act.WriteVote)  # no digests yet
    job.digest_all(ONE)
    assert job.of(act.WriteVote)
    job.say(ev.VoteWritten(job=KEY, save=ONE))
    assert job.ends(ONE) == []
    job.say(ev.CommitEnded(job=KEY, save=ONE, nbytes=20))
    assert milestones(job, ONE) == ["staged", "durable"]
    assert job.ends(ONE) == ["durable"]


def test_the_slots_of_the_newest_stay_until_a_newer_is_whole():
    job = AJob(world=2).start()
    job.stage_all(ONE)
    job.drain(ONE)
    job.stage(0, TWO)
    assert len(job.node.slots.holding(ONE)) == 2
    job.stage(1, TWO)
    assert job.node.slots.holding(ONE) == []


def test_a_hand_over_said_twice_does_not_hold_its_slot_for_ever():
    """After a restart a rank repeats what it does not know to have been heard; the arena had said it already."""
    job = AJob(world=1).start()
    slot = job.idle(0)
    job.stage(0, ONE, slot=slot)
    job.drain(ONE)
    assert isinstance(job.answer(job.stage(0, ONE, slot=slot)), Done)
    assert job.told(0)[-1].end == "durable"  # and no news that would undo the end
    job.stage(0, TWO)
    assert job.node.slots.holding(ONE) == []


def test_a_hand_over_said_twice_to_a_new_daemon():
    job = AJob(world=1)
    name = "r00000-000001.slot"
    job.say(ev.SlotAdopted(job=KEY, rank=0, slot=name, capacity=4096, save=ONE, nbytes=10))
    job.say(ev.RankFound(job=KEY, rank=0, session="a", pid=1, host="h"))
    job.did += job.catalogue.adopted(KEY, job.now)
    job.attach(0, incarnation=1)
    job.stage(0, ONE, slot=name)
    job.slots(0)
    job.stage(0, TWO)
    assert job.node.slots.holding(ONE) == []


def test_one_rank_cannot_deliver_a_save_twice_in_two_slots():
    job = AJob(world=1).start()
    job.stage(0, ONE)
    assert job.answer(job.stage(0, ONE)).code == "protocol"


def test_late_ranks_of_a_save_that_is_over_get_their_slot_back():
    job = AJob(world=2).start()
    seq = job.request()
    job.say(ev.SaveSkipped(job=KEY, request=seq, rank=0, session="a", save=ONE, reason="no slot"))
    assert isinstance(job.answer(seq), Done)
    job.take()
    job.stage(1, ONE)
    assert job.ends(ONE, rank=1) == ["skipped"]
    assert job.node.slots.holding(ONE) == []
    assert [m for m in job.told(1) if isinstance(m, SlotGranted)]


def test_an_end_does_not_change_to_another():
    job = AJob(world=2).start()
    job.say(ev.SaveSkipped(job=KEY, rank=0, session="a", save=ONE, reason="no slot"))
    job.stage(1, SaveId(1, 1, 99, RUN))  # rank 1 disagrees about a save that is over
    assert set(job.ends(ONE)) == {"skipped"}
    assert set(job.ends(SaveId(1, 1, 99, RUN))) == {"failed"}


def test_ranks_that_disagree_fail_both_and_keep_nothing():
    job = AJob(world=2).start()
    other = SaveId(1, 1, 11, RUN)
    job.stage(0, ONE)
    job.stage(1, other)
    assert job.ends(ONE) == ["failed"]
    assert job.ends(other) == ["failed"]
    assert not any(slot.save for slot in job.node.slots)
    job.stage_all(TWO)
    assert milestones(job, TWO) == ["staged"]


def test_a_save_that_a_rank_never_delivers_is_abandoned():
    job = AJob(world=2).start()
    job.stage(0, ONE)
    job.tick(301)
    assert job.ends(ONE) == ["abandoned"]
    assert not any(slot.save for slot in job.node.slots)


def test_a_rank_that_dies_ends_what_waits_for_it_only():
    job = AJob(world=2).start()
    job.stage(0, ONE)
    job.stage(1, TWO)
    job.gone(1)
    assert job.ends(ONE) == ["abandoned"]
    assert job.ends(TWO) == []


def test_a_newer_whole_save_abandons_older_halves():
    job = AJob(world=2).start()
    job.stage(0, ONE)
    job.stage_all(TWO)
    assert job.ends(ONE) == ["abandoned"]


# --- what is drained


def test_drains_take_the_newest_and_the_others_are_notified_at_once():
    job = AJob(world=1, slots_per_rank=4).start()
    for save in (ONE, TWO, THREE):
        job.stage(0, save)
    assert job.ends(TWO) == ["superseded"]  # its slots went to newer saves, nobody needs to wait for the drain
    job.drain(ONE)
    assert [a.save for a in job.of(act.Drain)] == [ONE, THREE]
    job.drain(THREE)
    assert job.ends(THREE) == ["durable"]


def test_cadence_in_steps_and_kept():
    """The first, and then the first of each twenty: the multiples of twenty, where they are saved."""
    job = AJob(world=1, cadence=Cadence(steps=20)).start()
    saves = [SaveId(1, counter, 10 * counter, RUN) for counter in range(1, 6)]
    for save in saves:
        job.stage(0, save)
        if job.facts.active:
            job.drain(save)
    assert [job.ends(save) for save in saves] == [["durable"], ["durable"], ["kept"], ["durable"], ["kept"]]
    assert job.facts.ends == {"durable": 3, "kept": 2}


def saving_by_itself(drain_s, saves, every_s=10, fails_until=0, drained=None):
    """Steps that became durable of saves in every_s seconds to a store that takes drain_s, and how the saves ended.

    fails_until: so long each drain fails after a second. drained: gets when each drain that ended well began.
    """
    job = AJob(world=1, slots_per_rank=40, cadence=Cadence(0, 0.0)).start()
    durable = []
    for counter in range(1, saves + 1):
        job.stage(0, SaveId(1, counter, counter, RUN))
        for _ in range(every_s):
            job.tick(1.0)
            active = job.facts.active
            began = job.facts.records[active].drain_since if active is not None else 0.0
            if active is not None and job.now < fails_until and job.now > began:
                job.say(ev.Drained(job=KEY, save=active, problem="EIO"))
            elif active is not None and job.now - began >= drain_s:
                job.drain(active)
                durable.append(active.step)
                if drained is not None:
                    drained.append(began)
    return durable, job.facts.ends


def test_a_cadence_that_is_left_to_the_store_drains_as_often_as_it_keeps_up():
    """1.25 times a drain lies between two, and none is superseded: it was not due."""
    durable, ends = saving_by_itself(drain_s=40.0, saves=40)
    assert durable[:3] == [1, 6, 11]
    assert ends == {"durable": len(durable), "kept": 40 - len(durable)}


def test_a_cadence_that_is_left_to_a_fast_store_drains_each():
    assert saving_by_itself(drain_s=1.0, saves=20) == (list(range(1, 21)), {"durable": 20})


def test_a_store_that_fails_is_left_to_the_drain_that_is_tried_again():
    """No save is due while that waits; it takes the newest each time it is tried."""
    durable, ends = saving_by_itself(drain_s=40.0, saves=400, fails_until=1000)
    assert durable[0] > 90
    tries = 1000 / 60  # after a few short pauses, one in 60 s
    assert ends["superseded"] < 2 * tries
    assert ends["kept"] + len(durable) + ends["superseded"] >= 399


def test_after_a_store_that_failed_the_time_between_drains_is_that_of_before():
    """The first that ends well began long after its save was due."""
    drained = []
    saving_by_itself(drain_s=40.0, saves=200, fails_until=1000, drained=drained)
    assert len(drained) > 5
    assert min(after - before for before, after in itertools.pairwise(drained)) >= 50.0


def test_a_drain_that_hangs_makes_one_save_an_hour_due():
    durable, ends = saving_by_itself(drain_s=3 * 3600.0 - 60, saves=1100)
    assert len(durable) == 1
    assert ends["superseded"] == 3, "one that is due in an hour loses its turn; those to which that was lent are kept"
    assert ends["kept"] > 1100 - 3 - 1 - 3


def test_a_save_that_passes_a_lent_turn_on_is_kept_as_its_ranks_know_it():
    job = AJob(world=1, slots_per_rank=8, cadence=Cadence(0, 60.0)).start()
    job.stage(0, ONE)
    job.tick(61)
    job.stage(0, TWO)
    for save in (THREE, FOUR):
        job.tick(1)
        job.stage(0, save)
    assert [job.ends(save) for save in (TWO, THREE, FOUR)] == [["superseded"], ["kept"], ["kept"]]
    assert [str(job.facts.records[save].state) for save in (TWO, THREE, FOUR)] == ["superseded", "kept", "queued"]
    assert job.facts.records[THREE].why == "drain_every did not choose it for the store"
    job.drain(ONE)
    job.drain(FOUR)
    assert job.ends(FOUR) == ["kept", "durable"]
    assert job.facts.ends == {"durable": 2, "superseded": 1, "kept": 1}


def test_a_drain_that_was_given_up_makes_the_next_save_due():
    job = AJob(world=1, drain_give_up_s=100, slots_per_rank=8, cadence=Cadence(0, 0.0)).start()
    job.stage(0, ONE)
    for _ in range(8):
        job.say(ev.Drained(job=KEY, save=ONE, problem="ENOSPC"))
        job.tick(60)
    assert job.ends(ONE) == ["failed"]
    job.stage(0, TWO)
    assert job.facts.active == TWO
    job.tick(10)
    job.stage(0, THREE)
    assert job.ends(THREE) == ["kept"], "the store is busy"


def test_saves_that_were_dropped_are_still_counted():
    job = AJob(world=1, cadence=Cadence(steps=1000)).start()
    for counter in range(1, 201):
        job.stage(0, SaveId(1, counter, counter, RUN))
        if job.facts.active:
            job.drain(job.facts.active)
    assert len(job.facts.records) < 100
    assert job.facts.ends == {"durable": 1, "kept": 199}
    job.say(ev.DrainAsked(job=KEY))
    assert job.facts.ends == {"durable": 1, "kept": 198}, "the newest waits again"
    job.drain(job.facts.active)
    assert job.facts.ends == {"durable": 2, "kept": 198}


def test_cadence_in_seconds():
    job = AJob(world=1, cadence=Cadence(steps=0, seconds=60)).start()
    job.stage(0, ONE)
    job.drain(ONE)
    job.now += 59
    job.stage(0, TWO)
    job.now += 1
    job.stage(0, THREE)
    assert job.ends(TWO) == ["kept"]
    assert job.facts.active == THREE


def test_the_first_save_of_a_new_incarnation_is_due():
    """Going back a step and saving it again is no reason to keep it off the store."""
    job = AJob(world=1, cadence=Cadence(steps=20)).start()
    job.stage(0, ONE)
    job.drain(ONE)
    job.gone(0)
    job.attach(0, "b")
    job.number(2)
    job.slots(0, "b")
    job.stage(0, SaveId(2, 1, ONE.step, RUN), session="b")
    assert job.facts.active == SaveId(2, 1, ONE.step, RUN)


def test_a_forced_drain_reopens_what_was_kept():
    job = AJob(world=1, cadence=Cadence(steps=100)).start()
    job.stage(0, ONE)
    job.drain(ONE)
    job.stage(0, TWO)
    job.say(ev.DrainAsked(job=KEY, request=job.request(), rank=0, session="a"))
    job.drain(TWO)
    assert job.ends(TWO) == ["kept", "durable"]


def test_a_forced_drain_leaves_alone_what_memory_no_longer_has():
    job = AJob(world=1, cadence=Cadence(steps=100)).start()
    for save in (ONE, TWO, THREE):
        job.stage(0, save, drain=save == THREE)
        if job.facts.active:
            job.drain(save)
    job.say(ev.DrainAsked(job=KEY))
    assert job.ends(TWO) == ["kept"]


def test_no_drain_before_the_store_was_seen():
    job = AJob(world=1)
    job.attach(0)
    job.number(1)
    job.slots(0)
    job.stage(0, ONE)
    job.scan(problem="EIO")
    assert not job.of(act.Drain)
    job.tick(16)
    assert job.of(act.ScanStore)
    job.scan()
    assert job.of(act.Drain)


# --- failures


def test_a_failed_drain_is_tried_again_later_and_later():
    job = AJob(world=1).start()
    job.stage(0, ONE)
    pauses = []
    for _ in range(8):
        job.say(ev.Drained(job=KEY, save=ONE, problem="ENOSPC"))
        pauses.append(job.catalogue.next_deadline() - job.now)
        job.tick(pauses[-1])
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60]
    job.drain(ONE)
    assert job.ends(ONE) == ["durable"]


def test_a_drain_that_never_succeeds_is_given_up_and_the_memory_kept():
    job = AJob(world=1, drain_give_up_s=100).start()
    job.stage(0, ONE)
    for _ in range(8):
        job.say(ev.Drained(job=KEY, save=ONE, problem="ENOSPC"))
        job.tick(60)
    assert job.ends(ONE) == ["failed"]
    assert job.node.slots.holding(ONE)
    job.say(ev.DrainAsked(job=KEY))
    job.drain(ONE)
    assert job.ends(ONE) == ["failed", "durable"]


def test_a_failed_commit_is_tried_alone_then_the_drain_again():
    job = AJob(world=1).start()
    job.stage(0, ONE)
    job.digest_all(ONE)
    job.say(ev.Drained(job=KEY, save=ONE))
    job.say(ev.VoteWritten(job=KEY, save=ONE))
    job.say(ev.CommitEnded(job=KEY, save=ONE, problem="EIO"))
    job.tick(1)
    assert len(job.of(act.Commit)) == 2
    job.say(ev.CommitEnded(job=KEY, save=ONE, problem="EIO"))
    job.tick(2)
    assert len(job.of(act.Drain)) == 2


def test_while_a_failed_drain_waits_a_newer_save_takes_its_turn():
    job = AJob(world=1).start()
    job.stage(0, ONE)
    job.say(ev.Drained(job=KEY, save=ONE, problem="EIO"))
    job.stage(0, TWO)
    job.tick(1)
    assert job.facts.active == TWO
    assert job.ends(ONE) == ["superseded"]


# --- what is found on the store


def test_a_drain_that_was_finished_before_the_crash_is_durable():
    job = AJob(world=1)
    job.say(ev.SlotAdopted(job=KEY, rank=0, slot="r00000-000001.slot", capacity=4096, save=ONE, nbytes=10))
    job.did += job.catalogue.adopted(KEY, job.now)
    job.scan(ONE)
    assert not job.of(act.Drain)
    assert job.answer(job.attach(0, incarnation=1)).known[0].end == "durable"


def test_complete_votes_are_committed_without_another_drain():
    job = AJob(world=1)
    job.say(ev.SlotAdopted(job=KEY, rank=0, slot="r00000-000001.slot", capacity=4096, save=ONE, nbytes=10))
    job.did += job.catalogue.adopted(KEY, job.now)
    job.scan(partials=(ev.Partial(ONE, complete=True),))
    assert [a.save for a in job.of(act.Commit)] == [ONE]
    assert not job.of(act.Drain)


def test_unfinished_directories_that_none_will_finish_are_removed():
    job = AJob(world=1).start(number=5)
    old = SaveId(3, 1, 5, RUN)
    job.scan(partials=(ev.Partial(old, complete=False),))
    assert [a.save for a in job.of(act.RemovePartial)] == [old]


def test_retention_never_takes_the_last():
    job = AJob(world=1, keep_last=1).start(committed=())
    job.scan(ONE, TWO)
    assert [a.save for a in job.of(act.RemoveCheckpoint)] == [ONE]
    job.say(ev.CheckpointRemoved(job=KEY, save=ONE, problem="EACCES"))
    assert ONE in job.facts.on_store
    job.scan(ONE, TWO)
    job.say(ev.CheckpointRemoved(job=KEY, save=ONE))
    assert set(job.facts.on_store) == {TWO}


def test_retention_keeps_every_so_many_steps_and_what_is_pinned():
    job = AJob(world=1, keep_last=1, keep_every=20).start(committed=())
    job.scan(ONE, TWO, THREE, FOUR)
    assert [a.save for a in job.of(act.RemoveCheckpoint)] == [ONE, THREE]
    job.say(ev.CheckpointRemoved(job=KEY, save=ONE, pinned=True))
    job.say(ev.CheckpointRemoved(job=KEY, save=THREE))
    assert set(job.facts.on_store) == {ONE, TWO, FOUR}
    job.scan(ONE, TWO, FOUR)
    assert [a.save for a in job.of(act.RemoveCheckpoint)] == [ONE, THREE, ONE], "it may not be pinned any more"
    assert not job.of(act.Note)


def test_records_of_the_past_are_bounded():
    job = AJob(world=1).start()
    for i in range(1, 200):
        save = SaveId(1, i, i, RUN)
        job.stage(0, save)
        job.drain(save)
    assert len(job.facts.records) <= 65


def test_a_forced_save_is_drained_though_newer_ones_are_staged_meanwhile():
    job = AJob(world=1, cadence=Cadence(100, 0)).start()
    job.stage(0, ONE)  # the first is due: its drain runs
    job.stage(0, TWO, drain=True)
    job.stage(0, THREE)
    assert {str(s.save.step) for s in job.node.slots if s.save} == {"10", "20", "30"}
    job.drain(ONE)
    assert job.of(act.Drain)[-1].save == TWO
    job.drain(TWO)
    assert job.ends(TWO) == ["durable"]
    assert job.ends(THREE) == ["kept"]
    assert job.node.slot_retention.newest_staged == THREE


def test_of_two_forced_saves_that_wait_the_newer_is_drained():
    job = AJob(world=1, cadence=Cadence(100, 0), slots_per_rank=4).start()
    job.stage(0, ONE)
    job.stage(0, TWO, drain=True)
    job.stage(0, THREE, drain=True)
    job.drain(ONE)
    assert job.of(act.Drain)[-1].save == THREE
    assert job.ends(TWO) == ["superseded"]
    assert not job.node.slots.holding(TWO)


def test_the_newest_takes_the_turn_of_a_due_save_that_it_supersedes():
    job = AJob(world=1, cadence=Cadence(20, 0)).start()
    job.stage(0, ONE)  # due: step 10
    job.stage(0, THREE)  # due: step 30, waits
    later = SaveId(1, 4, 35, RUN)
    job.stage(0, later)  # not due
    assert job.ends(THREE) == ["superseded"]
    job.drain(ONE)
    assert job.of(act.Drain)[-1].save == later
    job.drain(later)
    assert job.ends(later)[-1] == "durable"


def test_slots_are_adopted_in_any_order_without_an_end_that_is_not_one():
    """Both saves are whole; the newer one's slots come first. Whether the older is durable only the store can say."""
    job = AJob(world=2)
    for rank, save in ((0, ONE), (0, TWO), (1, TWO), (1, ONE)):
        name = f"r{rank:05d}-{save.counter:06d}.slot"
        job.say(ev.SlotAdopted(job=KEY, rank=rank, slot=name, capacity=4096, world_size=2, save=save, nbytes=10))
    job.did += job.catalogue.adopted(KEY, job.now)
    known = job.answer(job.attach(0, incarnation=1)).known
    assert {(p.save.counter, p.end) for p in known} == {(1, None), (2, None)}
    job.scan(ONE)
    assert job.ends(ONE) == ["durable"]


def test_halves_that_were_adopted_end_when_the_store_knows_nothing_better():
    job = AJob(world=2)
    for rank, save in ((0, ONE), (0, TWO), (1, TWO)):
        name = f"r{rank:05d}-{save.counter:06d}.slot"
        job.say(ev.SlotAdopted(job=KEY, rank=rank, slot=name, capacity=4096, world_size=2, save=save, nbytes=10))
    job.did += job.catalogue.adopted(KEY, job.now)
    job.attach(0, incarnation=1)
    job.scan()
    assert job.ends(ONE) == ["abandoned"]
    assert not job.node.slots.holding(ONE)


def test_what_waited_for_its_drain_when_the_memory_was_given_up_has_an_end():
    job = AJob(world=1)
    job.say(ev.SlotAdopted(job=KEY, rank=0, slot="r00000-000001.slot", capacity=4096, save=ONE, nbytes=10))
    job.did += job.catalogue.adopted(KEY, job.now)
    job.attach(0, "b")  # waits for its number, so the job is not forgotten
    job.catalogue.jobs[KEY].node.handle(ev.JobReleased(job=KEY, node="node"))
    job.say(ev.Report(job=KEY, node="node", event=ev.SegmentsReleased(job=KEY, ranks=(0,), save=ONE)))
    job.scan()
    assert job.facts.records[ONE].end == "failed"


# --- a smaller world: the slots of ranks that are no more


def a_smaller_world(*, cadence=None, drained=True):
    """Three ranks staged ONE, ended, and started again as one rank."""
    job = AJob(world=3, cadence=cadence).start()
    job.stage_all(ONE)
    if drained:
        job.drain(ONE)
    for rank in range(3):
        job.gone(rank)
    job.world = 1
    job.attach(0, "b")
    job.number(2)
    job.slots(0, "b")
    return job


def held_ranks(job) -> list[int]:
    return sorted(slot.rank for slot in job.node.slots.holding(ONE))


def room_of_the_missing(job) -> int:
    return len(job.node.slots.of_rank(1)) + len(job.node.slots.of_rank(2))


def test_slots_of_missing_ranks_go_when_the_smaller_world_has_a_durable_checkpoint():
    job = a_smaller_world()
    assert held_ranks(job) == [0, 1, 2], "the only copy in memory"
    new = SaveId(2, 1, 20, RUN)
    job.stage(0, new, session="b")
    assert room_of_the_missing(job) == 2, "not before it is durable"
    job.drain(new)
    assert room_of_the_missing(job) == 0
    assert len(job.node.slots.of_rank(0)) == 3


def test_slots_of_missing_ranks_go_when_it_is_staged_where_no_drain_is_due():
    job = a_smaller_world(cadence=Cadence(steps=100))
    job.saves.due._last = (10, 0.0)  # else the first of an incarnation is
    job.stage(0, SaveId(2, 1, 20, RUN), session="b")
    assert job.ends(SaveId(2, 1, 20, RUN), 0, "b") == ["kept"]
    assert room_of_the_missing(job) == 0


def test_slots_of_missing_ranks_stay_while_nothing_newer_is_whole():
    job = a_smaller_world(drained=False)
    job.say(ev.SaveSkipped(job=KEY, request=99, rank=0, session="b", save=SaveId(2, 1, 20, RUN), reason="no slot"))
    job.drain(ONE)
    assert held_ranks(job) == [0, 1, 2]
    job.tick(3600)
    assert held_ranks(job) == [0, 1, 2]


def test_slots_of_missing_ranks_that_a_drain_still_reads_go_with_its_end():
    job = a_smaller_world(drained=False, cadence=Cadence(steps=100))
    job.saves.due._last = (10, 0.0)
    job.stage(0, SaveId(2, 1, 20, RUN), session="b")
    assert job.ends(SaveId(2, 1, 20, RUN), 0, "b") == ["kept"]
    assert held_ranks(job) == [0, 1, 2], "its drain runs"
    job.drain(ONE)
    assert room_of_the_missing(job) == 0


def test_a_number_made_up_while_the_store_was_silent_is_its_own_once_the_store_has_shown_that_it_is():
    job = AJob(world=1)
    job.attach(0)
    job.say(ev.IncarnationTaken(job=KEY, session="a", run=RUN, problem="EIO"))
    job.scan(problem="EIO")
    job.slots(0)
    job.scan()
    number = job.sessions.incarnation
    assert job.of(act.ScanStore)[-1].claim == act.Claim(number, RUN, "a")
    job.scan()
    first, second = SaveId(number, 1, 10, RUN), SaveId(number, 2, 20, RUN)
    job.stage_all(first)
    job.digest_all(first)
    job.drain(first)
    assert "durable" in job.ends(first)
    job.scan(first)
    job.stage_all(second)
    job.digest_all(second)
    job.drain(second)
    assert "durable" in job.ends(second)


# --- who else removes checkpoints


def test_what_others_removed_is_forgotten_with_the_next_look():
    job = AJob(world=1).start(committed=(ONE, TWO, THREE))
    job.scan(ONE, THREE)
    assert set(job.facts.on_store) == {ONE, THREE}
    job.scan()
    assert set(job.facts.on_store) == {ONE, THREE}, "an empty directory may be a mount that went away"


def test_a_commit_that_a_look_came_too_early_for_is_not_forgotten():
    job = AJob(world=1).start(committed=(ONE,))
    job.stage(0, TWO)
    job.drain(TWO)
    job.scan(ONE)
    assert set(job.facts.on_store) == {ONE, TWO}


def test_commits_look_at_the_store_once_a_minute():
    job = AJob(world=1).start(committed=())
    looks = []
    for save in (ONE, TWO, THREE):
        job.now += 31
        job.take()
        job.stage(0, save)
        job.drain(save)
        looks.append(len(job.of(act.ScanStore)))
    assert looks == [0, 1, 0]


def test_a_look_that_fails_later_gives_no_save_up():
    """The store had answered before: its silence is the drain's to count, which tries again."""
    job = AJob(world=1).start(committed=())
    job.scan(problem="EIO")
    job.stage(0, ONE)
    job.stage(0, TWO)
    job.tick(4000.0)
    assert "failed" not in job.ends(ONE) + job.ends(TWO)
