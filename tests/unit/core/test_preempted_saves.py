"""What is drained once somebody preempts a job: what ranks that ask save from the step on, and nothing else."""

from ckptd.core import actions as act
from ckptd.core import events as ev
from ckptd.shared.base.ids import SaveId
from ckptd.shared.protocol.messages import Cadence
from tests.runs import RUN
from tests.unit.core.a_job import KEY, AJob

FIRST, SECOND, THIRD = (SaveId(1, i, i, RUN) for i in (1, 2, 3))


def begun():
    """A job whose first save is durable, and of which no other is due for long."""
    job = AJob(world=1, cadence=Cadence(steps=1000)).start()
    save(job, FIRST)
    assert drained(job) == [FIRST]
    job.drain(FIRST)
    return job


def save(job, number):
    job.stage_all(number)


def drained(job):
    return [action.save for action in job.of(act.Drain)]


def preempt(job, *, highest, session="a"):
    job.say(ev.PreemptAsked(job=KEY, why="ckptd drain"))
    assert job.of(act.HoldRanks)
    job.say(ev.StepsRead(job=KEY, session=session, highest=highest))


def test_what_ranks_that_ask_save_from_the_step_on_is_drained():
    job = begun()
    preempt(job, highest=2)
    save(job, SECOND)
    assert drained(job) == [FIRST], "step 2 is before the one that is fixed"
    save(job, THIRD)
    assert drained(job) == [FIRST, THIRD]


def test_where_no_rank_asks_saves_are_drained_as_before():
    job = begun()
    preempt(job, highest=-1)
    save(job, SECOND)
    save(job, THIRD)
    assert drained(job) == [FIRST]


def test_the_next_session_is_not_preempted():
    job = begun()
    preempt(job, highest=0)
    job.gone(0)
    job.attach(0, "b")
    job.number(2)
    job.slots(0, "b")
    first, second = SaveId(2, 1, 1, RUN), SaveId(2, 2, 2, RUN)
    job.stage(0, first, session="b")
    job.drain(first)
    job.stage(0, second, session="b")
    assert second not in drained(job)
    assert job.catalogue.jobs[KEY].coordinator.preemption.shown("b") is None
