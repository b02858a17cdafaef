"""How a rank left, as the others are told: who, whether it ended or closed, and what to type."""

from ckptd.core.coordinator.departures import Departure, How
from ckptd.shared.base.errors import parted
from ckptd.shared.base.ids import SaveId
from ckptd.shared.protocol.messages import End
from tests.runs import RUN
from tests.unit.core.a_job import AJob


def save(number):
    return SaveId(1, number, 10 * number, RUN)


def test_of_a_save():
    text, hint = parted(Departure(1, How.ENDED, 7).before_save)
    assert text == "rank 1 (pid 7) has ended and has not saved this step"
    assert "start the job again" in hint
    text, hint = parted(Departure(1, How.CLOSED, 7).before_save)
    assert text == "rank 1 (pid 7) has closed its client and has not saved this step"
    assert "closes only after the last save" in hint
    assert parted(Departure(1).before_save)[0] == "rank 1 has left the job and has not saved this step"


def test_of_a_load():
    text, hint = Departure(1, How.CLOSED, 7).of_load(called=False)
    assert text == "rank 1 (pid 7) has closed its client without calling load"
    assert hint.startswith("every rank must call load")
    assert Departure(1, How.ENDED, 7).of_load(called=True)[0] == "rank 1 (pid 7) has ended during the load"
    assert all(Departure(1, how).of_load(called=called)[1] for how in How for called in (True, False))


def test_a_rank_that_closes_receives_which_saves_of_others_it_has_not_saved():
    job = AJob(world=2).start()
    job.stage_all(save(1))
    job.stage(0, save(2))
    job.did.clear()
    request = job.detach(1)
    news, *rest = job.told(1)
    assert (news.save, news.end) == (save(2), End.ABANDONED)
    assert parted(news.reason) == ("rank 0 saved it, and rank 1 has not", "call client.save(state, step) on every rank")
    assert [reply.reply_to for reply in rest] == [request], "and before the answer, after which it listens no more"


def test_a_rank_that_saved_all_receives_nothing_when_it_closes():
    job = AJob(world=2).start()
    job.stage(0, save(1))
    job.did.clear()
    request = job.detach(0)
    assert [reply.reply_to for reply in job.told(0)] == [request]
