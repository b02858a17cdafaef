"""How a rank left, as the others are told: who, whether it ended or closed, and what to type."""

from ckptd.core.coordinator.departures import Departure, How
from ckptd.shared.base.errors import parted


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
    assert hint.startswith("every rank calls load")
    assert Departure(1, How.ENDED, 7).of_load(called=True)[0] == "rank 1 (pid 7) has ended during the load"
    assert all(Departure(1, how).of_load(called=called)[1] for how in How for called in (True, False))
