"""A bug of what works beside a job's saves: no save, drain or load waits for the journal or a scrub."""

import pytest

from ckptd.core import actions as act
from ckptd.core.beside import Beside
from ckptd.core.coordinator.journal import Journal
from ckptd.core.scrub.scrub import Scrub
from ckptd.shared.base.ids import JobKey, SaveId
from tests.runs import RUN
from tests.unit.core.a_job import AJob

ONE, TWO = (SaveId(1, number, 10 * number, RUN) for number in (1, 2))


@pytest.fixture(autouse=True)
def as_in_a_daemon(monkeypatch):
    monkeypatch.setattr(Beside, "strict", False)


class Kept(AJob):
    """All that it ever did."""

    def take(self):
        self.all = [*getattr(self, "all", []), *self.did]
        return super().take()


def orders():
    """All but records and notes of a run with two saves; the notes."""
    job = Kept().start()
    for save in (ONE, TWO):
        job.stage_all(save)
        job.digest_all(save)
        job.tick(1.0)
        job.drain(save)
    job.tick(1000.0)
    job.take()
    notes = [action.text for action in job.all if isinstance(action, act.Note)]
    return [action for action in job.all if not isinstance(action, act.KeepEntry | act.Note)], notes


@pytest.mark.parametrize(
    ("part", "method", "name"),
    [
        (Journal, "follow", "journal"),
        (Journal, "_was_staged", "journal"),
        (Journal, "_was_ended", "journal"),
        (Scrub, "follow", "scrub"),
        (Scrub, "tick", "scrub"),
    ],
)
def test_a_bug_costs_no_save_its_orders_and_is_noted_once(monkeypatch, part, method, name):
    expected, nothing = orders()
    assert (any(isinstance(action, act.Drain) for action in expected), nothing) == (True, [])

    def raises(*_arguments, **_words):
        raise KeyError("a bug")

    monkeypatch.setattr(part, method, raises)
    found, notes = orders()
    assert found == expected
    (note,) = notes
    assert note.startswith(f"a bug of ckptd's in the {name} (test_beside.py:")
    assert note.endswith("KeyError: 'a bug'")


def test_what_was_written_of_a_turn_that_raised_does_not_pile_up(monkeypatch):
    job = AJob().start()
    real = Journal._follow_topology

    def raises(_journal):
        raise KeyError("a bug")

    monkeypatch.setattr(Journal, "_follow_topology", raises)
    job.stage_all(ONE)
    monkeypatch.setattr(Journal, "_follow_topology", real)
    job.take()
    job.tick(1.0)
    assert not job.of(act.KeepEntry)


def test_few_bugs_are_known_to_be_the_same_again():
    beside, key = Beside(), JobKey("/store", "job")

    def raises(number):
        raise ValueError(number)

    def notes(number):
        return [action.text for action in beside(key, "journal", lambda: raises(number))]

    assert [len(notes(number % 3)) for number in range(9)] == [1, 1, 1, 0, 0, 0, 0, 0, 0]
    for number in range(1000):
        notes(number)
    assert len(beside._told) == 64
    assert len(notes(10**6)[0]) < 200


def test_tests_see_a_bug(monkeypatch):
    monkeypatch.setattr(Beside, "strict", True)
    monkeypatch.setattr(Journal, "follow", lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        orders()
