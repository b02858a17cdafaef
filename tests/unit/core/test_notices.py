"""What the user of a job can change and should know: told to rank 0 and put down in the status, once a session."""

from ckptd.core import actions as act
from ckptd.core import events as ev
from ckptd.shared.base.ids import SaveId
from ckptd.shared.protocol.messages import Cadence, Progress
from tests.runs import RUN
from tests.unit.core.a_job import KEY, AJob


def save(number):
    return SaveId(1, number, 10 * number, RUN)


def notices(job, rank=0):
    return [m.notice for m in job.told(rank) if isinstance(m, Progress) and m.notice]


def noted(job, text):
    return [action.text for action in job.of(act.Note) if text in action.text]


def saving(job, numbers, *, every_s, drain_s):
    """A save in every_s seconds; a drain ends when it has taken drain_s, as far as a save is due then."""
    job.did.clear()
    for number in numbers:
        job.stage_all(save(number))
        job.tick(every_s)
        active = job.facts.active
        if active is not None and job.now - job.facts.records[active].drain_since >= drain_s:
            job.drain(active)
            job.tick()


def test_a_store_that_is_slower_than_the_saves_is_reported_with_both_measures():
    job = AJob(slots_per_rank=40).start()
    saving(job, range(1, 20), every_s=2.0, drain_s=10.0)
    (text,) = notices(job)
    assert text.startswith(
        "the store is slower than the saves: a drain takes 10 s, a save that is due comes every 2 s, and "
    )
    assert "ended superseded" in text
    assert text.endswith("connect(drain_every='13s') makes as many due as the store takes")
    assert noted(job, "slower than the saves") == [text]
    assert notices(job, rank=1) == []


def test_a_drain_that_has_not_ended_yet_is_reported_as_more_than_that():
    """Slots are given back to newer saves while the first drain runs."""
    job = AJob(slots_per_rank=3).start()
    job.did.clear()
    for number in range(1, 10):
        free = [any(slot.granted for slot in job.node.slots.of_rank(rank)) for rank in range(job.world)]
        if all(free):
            job.stage_all(save(number))
        job.tick(5.0)
    (text,) = notices(job)
    assert "a drain takes more than 20 s, a save that is due comes every 5 s, and 3 saves" in text


def test_a_store_that_keeps_up_is_nothing_to_tell():
    job = AJob(slots_per_rank=40).start()
    saving(job, range(1, 20), every_s=10.0, drain_s=2.0)
    assert notices(job) == []


def test_saves_that_are_not_due_are_not_counted():
    job = AJob(slots_per_rank=40, cadence=Cadence(steps=100)).start()
    saving(job, range(1, 30), every_s=2.0, drain_s=10.0)
    assert notices(job) == []


def test_one_that_lasts_is_reported_once_and_again_to_the_next_session():
    job = AJob(slots_per_rank=80).start()
    saving(job, range(1, 60), every_s=2.0, drain_s=10.0)
    assert len(notices(job)) == 1


def committed(job, number, left_out):
    job.stage_all(save(number))
    job.digest_all(save(number))
    job.say(ev.Drained(job=KEY, save=save(number)))
    job.say(ev.VoteWritten(job=KEY, save=save(number)))
    job.say(ev.CommitEnded(job=KEY, save=save(number), nbytes=20, left_out=left_out))
    job.tick(1)


def test_a_checkpoint_that_plain_readers_cannot_read_is_reported_once():
    job = AJob(slots_per_rank=40).start()
    job.did.clear()
    for number in (1, 2, 3):
        committed(job, number, "its tensors are in more than 1,000,000 boxes")
    (text,) = notices(job)
    assert text.startswith("step 10 has no .metadata: its tensors are in more than 1,000,000 boxes; plain dcp.load")
    for way_out in ("client.load", "ckptd export --format dcp", "connect(layout='plain')"):
        assert way_out in text
    assert noted(job, ".metadata") == [text]


def test_one_that_has_all_is_nothing_to_tell():
    job = AJob(slots_per_rank=40).start()
    job.did.clear()
    committed(job, 1, "")
    assert notices(job) == []


def test_a_drain_that_fails_is_reported_once_and_again_after_one_that_ended_well():
    job = AJob(slots_per_rank=40).start()
    job.did.clear()

    def fail(number, problem):
        job.stage_all(save(number))
        job.tick(120.0)
        job.digest_all(save(number))
        job.say(ev.VoteWritten(job=KEY, save=save(number), problem=problem))
        job.tick()

    fail(1, "no space left")
    fail(2, "no space left")
    (text,) = notices(job)
    assert text.startswith(f"step 10 is not durable: its drain to {KEY.store} failed: no space left; training goes on")
    assert noted(job, "is not durable") == []  # the status has the drain's own error
    fail(3, "it is gone")
    assert [text.partition(";")[0] for text in notices(job)[1:]] == [
        f"step 30 is not durable: its drain to {KEY.store} failed: it is gone"
    ]
    job.tick(120.0)
    job.drain(save(3))
    job.tick()
    assert len(notices(job)) == 2  # what failed before is past
    fail(4, "it is gone")
    assert len(notices(job)) == 3
    assert notices(job, rank=1) == []
