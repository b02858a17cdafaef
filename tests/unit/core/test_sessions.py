"""Who may be the job: takeovers, second starts by mistake, ranks that die before the door."""

from datetime import UTC, datetime

import pytest

from ckptd.core import actions as act
from ckptd.core import events as ev
from ckptd.core.coordinator.departures import How
from ckptd.core.coordinator.sessions import Sessions
from ckptd.core.policy import Policy
from ckptd.shared.base.ids import MAX_INCARNATION, SaveId, incarnation_at
from ckptd.shared.protocol.messages import Attached, Cadence, Done, LoadFrom, Notice, Refused, SlotGranted, SlotsComing
from ckptd.shared.protocol.topology import Peer
from tests.runs import OTHER_RUN, RUN
from tests.unit.core.a_job import KEY, AJob

ONE = SaveId(1, 1, 10, RUN)
TWO = SaveId(1, 2, 20, RUN)


def test_all_ranks_of_a_session_get_one_incarnation():
    job = AJob(world=3)
    seqs = [job.attach(rank) for rank in range(3)]
    assert len(job.of(act.TakeIncarnation)) == 1
    job.number(7)
    assert [job.answer(seq).incarnation for seq in seqs] == [7, 7, 7]
    late = job.attach(1)  # its connection broke, the daemon did not
    assert job.answer(late).incarnation == 7


@pytest.mark.parametrize(("clock", "number"), [(1000, 1000), (3, 8)])
def test_a_number_that_the_store_did_not_give_is_the_clocks_and_above_all_known(clock, number):
    job = AJob(world=1)
    seq = job.attach(0)
    job.sessions.incarnation = 7
    job.say(ev.IncarnationTaken(job=KEY, session="a", run=RUN, number=clock, problem="EIO"))
    assert job.answer(seq).incarnation == number
    assert "EIO" in job.answer(seq).warnings[0]


def test_numbers_of_the_clock_grow_and_are_above_those_that_stores_count():
    began = datetime(2026, 11, 22, tzinfo=UTC).timestamp()
    first, later, last = (incarnation_at(began + seconds) for seconds in (0, 4, 10 * 365 * 86400))
    assert 10**6 < first < later < last <= MAX_INCARNATION


def test_a_store_that_cannot_be_used_refuses_all_ranks():
    job = AJob(world=2)
    seqs = [job.attach(rank) for rank in range(2)]
    job.say(
        ev.IncarnationTaken(job=KEY, session="a", run=RUN, problem="no such directory", hint="mkdir", hopeless=True)
    )
    for seq in seqs:
        assert (job.answer(seq).code, job.answer(seq).hint) == ("config", "mkdir")
    assert job.catalogue.empty


def test_a_wrong_world_size_or_rank_is_refused():
    job = AJob(world=2).start()
    assert job.answer(job.attach(1, world=3)).code == "usage"
    assert job.answer(job.attach(5, "b", world=2)).code == "usage"
    job.attach(0, "c")
    assert job.answer(job.attach(1, "c", world=4)).code == "usage"


# --- a second start by mistake must not disturb the first


def test_a_second_start_leaves_the_running_session_its_slots_and_answers():
    job = AJob(world=1).start()
    granted = job.idle(0)
    second = job.attach(0, "b")
    assert job.answer(second) is None
    assert not job.of(act.UnlinkSlot)
    seq = job.stage(0, ONE, slot=granted)
    assert isinstance(job.answer(seq), Done)
    assert any(m.milestone for m in job.told(0) if hasattr(m, "milestone"))
    job.tick(31)
    refused = job.answer(second)
    assert refused.code == "connect"
    assert "pid 100 on host" in refused.message
    assert isinstance(job.answer(job.stage(0, TWO)), Done)  # and goes on after the second one was turned away


def test_a_second_start_does_not_change_the_cadence_of_the_first():
    job = AJob(world=1, cadence=Cadence(steps=10)).start()
    job.cadence = Cadence(steps=1)
    job.attach(0, "b")
    assert job.sessions.cadence == Cadence(steps=10)
    job.gone(0)
    job.number(2)
    assert job.sessions.cadence == Cadence(steps=1)


def test_ranks_that_wait_before_admission_get_nothing_done():
    job = AJob(world=1).start()
    job.attach(0, "b")
    seq = job.ask(0, "b")
    assert job.answer(seq).code == "protocol"
    assert not [m for m in job.told(0, "b") if isinstance(m, SlotGranted)]


def test_a_rank_that_dies_before_admission_is_forgotten():
    job = AJob(world=1).start()
    job.attach(0, "b")
    job.gone(0, "b")
    job.take()
    job.detach(0, "a")
    assert not job.of(act.TakeIncarnation)
    assert job.of(act.ForgetJob)
    assert not job.catalogue.jobs


def test_a_rank_that_dies_while_its_number_is_taken_is_forgotten():
    job = AJob(world=1)
    job.attach(0)
    job.scan()
    job.gone(0)
    job.number(1)
    job.tick(86401)
    assert not job.catalogue.jobs


def test_some_ranks_die_while_their_number_is_taken():
    job = AJob(world=2)
    job.attach(0)
    seq = job.attach(1)
    job.gone(0)
    job.number(1)
    assert isinstance(job.answer(seq), Attached)
    assert set(job.sessions.members) == {1}


def test_waiting_for_a_number_does_not_spin_past_the_deadline():
    job = AJob(world=1)
    job.attach(0)
    job.tick(31)  # the store is slow; tick asserts that the loop can sleep
    job.number(1)
    assert 0 in job.sessions.members


def test_two_takeovers_at_once_end_with_one_session():
    job = AJob(world=1).start()
    job.attach(0, "b", takeover=True)
    last = job.attach(0, "c", takeover=True)
    job.number(2)
    job.number(3)
    job.tick()
    assert job.sessions.session == "c"
    assert job.answer(last).incarnation == 3


# --- takeover


def test_after_a_takeover_the_replaced_rank_is_refused_and_its_answers_reach_no_other():
    job = AJob(world=1).start()
    slot = job.idle(0)
    job.attach(0, "b", takeover=True)
    job.number(2)
    assert slot in {a.slot for a in job.of(act.UnlinkSlot)}  # its writer lives, so its bytes are given up
    for seq in (job.stage(0, ONE, slot=slot), job.ask(0), job.ask_load(0), job.report(0, ONE, "arena")):
        assert job.answer(seq).code == "stale"
        assert [a.session for a in job.of(act.ToRank) if getattr(a.message, "reply_to", 0) == seq] == ["a"]
    assert isinstance(job.answer(job.ask(0, "b")), SlotsComing)


def test_a_takeover_after_a_restart_never_grants_what_the_old_rank_may_be_writing():
    """Found in the arena, unsealed: the live process of the old session may be in the middle of its copy."""
    job = AJob(world=1)
    name = "r00000-000009.slot"
    job.say(ev.SlotAdopted(job=KEY, rank=0, slot=name, capacity=4096, save=None))
    job.say(ev.RankFound(job=KEY, rank=0, session="a", pid=1, host="h"))
    job.catalogue.adopted(KEY, job.now)
    job.attach(0, "b", takeover=True)
    job.number(2)
    job.ask(0, "b")
    assert name in {a.slot for a in job.of(act.UnlinkSlot)}
    assert name not in {m.slot for m in job.told(0, "b") if isinstance(m, SlotGranted)}


def test_a_takeover_ends_the_load_of_the_replaced_session():
    job = AJob(world=2).start()
    old = job.ask_load(0)
    for rank in range(2):
        job.attach(rank, "b", takeover=True)
    job.number(2)  # of the load that is about to end
    job.number(3)
    assert job.answer(old).code == "stale"
    asked = [job.ask_load(rank, "b") for rank in (1, 0)]
    job.number(4)
    job.scan()
    assert all(isinstance(job.answer(seq), LoadFrom) for seq in asked)


# --- restarts


def test_ranks_come_back_to_a_restarted_daemon_and_learn_what_became_of_their_saves():
    job = AJob(world=1)
    job.say(
        ev.SlotAdopted(job=KEY, rank=0, slot="r00000-000001.slot", capacity=4096, save=SaveId(4, 1, 9, RUN), nbytes=10)
    )
    job.say(ev.RankFound(job=KEY, rank=0, session="a", pid=1, host="h"))
    job.did += job.catalogue.adopted(KEY, job.now)
    seq = job.attach(0, incarnation=4)
    welcome = job.answer(seq)
    assert welcome.incarnation == 4
    assert [(p.save.step, p.milestone) for p in welcome.known] == [(9, "staged")]


def test_an_older_incarnation_cannot_come_back():
    job = AJob(world=1)
    job.say(
        ev.SlotAdopted(job=KEY, rank=0, slot="r00000-000001.slot", capacity=4096, save=SaveId(4, 1, 9, RUN), nbytes=10)
    )
    assert isinstance(job.answer(job.attach(0, incarnation=3)), Refused)


def test_memory_of_a_rank_that_ended_while_no_daemon_ran_is_found_at_start():
    job = AJob(world=1)
    job.say(ev.SlotAdopted(job=KEY, rank=0, slot="r00000-000001.slot", capacity=4096, save=ONE, nbytes=10))
    job.say(ev.RankGone(job=KEY, rank=0, session="a"))
    job.did += job.catalogue.adopted(KEY, job.now)
    assert job.node.slots.holding(ONE)
    assert job.catalogue.jobs[KEY].coordinator.leave.orphaned


def attached(node, *waiting, session="s", **words):
    peer = Peer(node, f"{node}-arena", f"tcp://{node}:1", "k" * 40)
    return ev.NodeAttached(job=KEY, session=session, peer=peer, waiting=waiting, **words)


# --- memory of jobs that nobody belongs to


@pytest.mark.parametrize(("loaded", "answer"), [(0, ev.SessionRefused), (2, ev.SessionRefused), (3, ev.SessionOpened)])
def test_a_rank_with_an_older_number_comes_back_only_if_a_load_of_its_own_session_replaced_it(loaded, answer):
    sessions = Sessions(KEY, "a", Policy())
    sessions.session, sessions.incarnation, sessions.world_size = "s", 3, 1
    back = attached("a", ev.Arrival(0, 1, 1))
    order = sessions.attached("a", back, 0.0, loaded)[-1]
    assert isinstance(order.message, answer)


def test_a_refused_visitor_does_not_make_orphans_immortal():
    job = AJob(world=1).start()
    job.stage(0, ONE)
    job.drain(ONE)
    job.gone(0)
    job.attach(3, "b")  # rank 3 of 1: refused
    job.gone(3, "b")
    job.tick(86401)
    assert {a.slot for a in job.of(act.UnlinkSlot)}
    assert not job.catalogue.jobs


def test_a_crashed_jobs_memory_is_kept_for_its_time():
    job = AJob(world=1).start()
    job.stage(0, ONE)
    job.drain(ONE)
    job.gone(0)
    job.tick(86399)
    assert job.node.slots.holding(ONE)
    job.tick(2)
    assert not job.catalogue.jobs


def test_memory_stays_while_a_process_that_may_come_back_lives():
    job = AJob(world=1)
    job.say(ev.SlotAdopted(job=KEY, rank=0, slot="r00000-000001.slot", capacity=4096, save=ONE, nbytes=10))
    job.say(ev.RankFound(job=KEY, rank=0, session="a", pid=1, host="h"))
    job.did += job.catalogue.adopted(KEY, job.now)
    job.tick(90000)
    assert job.node.slots.holding(ONE)
    job.scan()
    job.gone(0)
    job.tick()
    assert job.node.slots.holding(ONE)  # the worker reads it
    job.say(ev.Drained(job=KEY, save=ONE, problem="EIO"))
    job.tick()
    assert not job.catalogue.jobs


def test_a_closed_jobs_memory_goes_when_it_is_durable():
    job = AJob(world=1).start()
    job.stage(0, ONE)
    seq = job.detach(0)
    assert isinstance(job.answer(seq), Done)
    assert job.node.slots.holding(ONE)
    job.drain(ONE)
    assert not job.catalogue.jobs


def test_slots_that_are_allocated_after_the_job_is_gone_are_unlinked():
    job = AJob(world=1)
    job.attach(0)
    job.scan()
    job.number(1)
    job.ask(0)
    job.detach(0)
    assert not job.catalogue.jobs
    late = job.ready(0)
    assert [a.slot for a in job.of(act.UnlinkSlot)] == [late]
    assert not job.catalogue.jobs


def test_ranks_of_a_larger_session_that_was_taken_over_belong_no_more():
    job = AJob(world=2).start()
    job.world = 1
    job.attach(0, "b", takeover=True, world=1)
    job.number(2)
    assert set(job.node.ranks.admitted) == {0}
    assert job.answer(job.ask_load(1)).code == "stale"


def test_after_a_restart_the_newer_of_two_sessions_is_the_job_whichever_came_back_first():
    job = AJob(world=2)
    for rank, session in ((0, "old"), (1, "old"), (0, "new")):
        job.say(ev.RankFound(job=KEY, rank=rank, session=session, pid=1, host="h"))
    olds = [job.attach(rank, "old", incarnation=1) for rank in range(2)]
    assert all(isinstance(job.answer(seq), Attached) for seq in olds)
    new = job.attach(0, "new", incarnation=5, world=1)
    assert job.answer(new).incarnation == 5
    assert job.sessions.session == "new"
    assert set(job.node.ranks.admitted) == {0}
    assert job.answer(job.attach(1, "old", incarnation=1)).code == "stale"


def test_a_replaced_rank_still_learns_what_becomes_of_its_saves():
    job = AJob(world=2).start()
    job.stage_all(ONE)
    job.stage(0, TWO)
    for rank in range(2):
        job.attach(rank, "b", takeover=True)
    job.number(2)
    assert job.ends(TWO, 0, "a") == ["abandoned"]
    job.drain(ONE)
    assert job.ends(ONE, 1, "a") == ["durable"]


def test_a_replaced_rank_gets_no_durable_of_what_a_run_in_between_hides():
    """A load gives that run's checkpoints: what this rank saved later lies on the store, and is worth nothing."""
    job = AJob(world=2).start()
    job.stage_all(ONE)
    for rank in range(2):
        job.attach(rank, "b", takeover=True)
    job.number(3)
    mine, theirs, now = ev.Recorded(1, RUN, "a"), ev.Recorded(2, OTHER_RUN, "elsewhere"), ev.Recorded(3, RUN, "b")
    job.scan(records=(mine, theirs, now))
    job.drain(ONE)
    assert job.ends(ONE, 1, "a") == ["failed"]


def test_a_replaced_rank_is_not_forgotten_with_its_successor():
    job = AJob(world=1).start()
    job.attach(0, "b", takeover=True)
    job.number(2)
    job.detach(0, "b")
    assert not job.node.slots
    third = job.attach(0, "c")
    assert job.answer(third) is None  # for the first one lives
    job.gone(0, "a")
    job.number(3)
    assert job.answer(third).incarnation == 3


def test_a_rank_is_answered_also_when_its_job_is_gone():
    job = AJob(world=1)
    assert job.answer(job.ask_load(0, "a")).code == "stale"
    assert isinstance(job.answer(job.detach(0, "a")), Done)


def freed_then_granted(job, slot, session):
    told = [
        (type(a).__name__, getattr(a, "slot", "") or getattr(getattr(a, "message", None), "slot", "")) for a in job.did
    ]
    return told.index(("FreeSlot", slot)) < told.index(("ToRank", slot))


def test_a_seal_that_none_knew_of_is_broken_before_the_slot_is_granted_again():
    """A rank that dies between seal and hand over: the next writer's half written bytes must not pass for its save."""
    job = AJob(world=1).start()
    slot = job.idle(0)
    job.gone(0)
    job.attach(0, "b")
    job.number(2)
    job.take()
    job.ask(0, "b")
    assert freed_then_granted(job, slot, "b")


def test_a_slot_that_looked_free_to_a_new_daemon_may_have_been_sealed_since():
    job = AJob(world=1)
    job.say(ev.SlotAdopted(job=KEY, rank=0, slot="r00000-000001.slot", capacity=4096, save=ONE, nbytes=10))
    job.say(ev.SlotAdopted(job=KEY, rank=0, slot="r00000-000002.slot", capacity=4096))
    job.did += job.catalogue.adopted(KEY, job.now)
    job.attach(0, incarnation=1)
    job.take()
    job.ask(0)
    assert freed_then_granted(job, "r00000-000002.slot", "a")


def test_processes_of_a_node_that_does_not_answer_keep_no_memory():
    sessions = Sessions(KEY, "a", Policy())
    sessions.found("b", ev.RanksFound(job=KEY, living=(ev.Living(1, "s", 7, "b"),)))
    assert sessions.wanted
    sessions.links.went("b")
    assert not sessions.wanted
    sessions.links.came("b")
    assert sessions.wanted


def test_a_number_that_comes_when_none_who_answers_waits_for_admission_opens_nothing():
    """The store was slow, the ranks ended, and of a lost node nobody said so: another session may be the job by now."""
    sessions = Sessions(KEY, "a", Policy())
    assert sessions.attached("b", attached("b", ev.Arrival(1, 2)), 0.0) == []
    *_, take = sessions.attached("a", attached("a", ev.Arrival(0, 2)), 0.0)
    assert isinstance(take, act.TakeIncarnation)
    sessions.gone(0, "s", 0.5, How.ENDED)
    sessions.links.went("b")
    assert sessions.opened(ev.IncarnationTaken(job=KEY, session="a", run=RUN, number=14), 2.0) == []
    assert (sessions.session, sessions.incarnation) == ("", 0)


def test_a_number_of_another_session_is_not_this_ones():
    """A node tells of the largest it knows, which may be of a run that is set apart."""
    job = AJob(world=1).start()
    before = (job.sessions.incarnation, job.sessions.run)
    for said in ("", "another"):
        has = ev.NodeHas(job=KEY, incarnation=9, run=OTHER_RUN, session=said)
        job.say(ev.Report(job=KEY, node="node", event=has))
        assert (job.sessions.incarnation, job.sessions.run) == before
    assert job.sessions.next_number == 10


# --- for whom a session waits at the door


def notices(job: AJob, rank: int, session: str) -> list[Notice]:
    return [message for message in job.told(rank, session) if isinstance(message, Notice)]


def test_a_session_that_waits_for_old_ranks_learns_of_them_within_seconds_and_once():
    job = AJob(world=2).start()
    for rank in range(2):
        job.say(ev.RankFound(job=KEY, rank=rank, session="a", pid=100 + rank, host="host"))
        job.attach(rank, "b")
    job.tick(2.9)
    assert notices(job, 0, "b") == [], "ranks of a job that is started again at once take a moment to end"
    job.tick(0.2)
    (notice,) = notices(job, 0, "b")
    assert notice.message == "job 'job' is still running: rank 0 (pid 100 on host), rank 1 (pid 101 on host)"
    assert "end those processes, use another job name, or connect(..., takeover=True)" in notice.hint
    job.tick(10)
    assert len(notices(job, 0, "b")) == 1
    assert notices(job, 1, "b") == [], "one rank says it for all"
    for rank in range(2):
        job.gone(rank)
    assert job.of(act.TakeIncarnation)


def test_an_admission_in_time_says_nothing():
    job = AJob(world=1).start()
    job.attach(0, "b")
    job.tick(2)
    job.gone(0)
    job.number(2)
    job.tick(10)
    assert notices(job, 0, "b") == []


def test_of_many_old_ranks_a_few_are_named():
    job = AJob(world=100).start()
    job.attach(0, "b")
    job.tick(3.1)
    assert notices(job, 0, "b")[0].message.endswith("rank 3 (pid 103 on host), ... (100 in all)")
