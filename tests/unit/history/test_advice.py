"""Advice from the journal of a played training, whose costs and failures are known."""

import pytest

from ckptd.history import advice, goodput
from ckptd.history.runs import runs_of
from tests.unit.history.played import Played, Training, played
from tests.unit.history.test_runs import began, flat, staged

T = Training()


def advised(journal, mtbf_s=None):
    runs = runs_of(flat(journal))
    return advice.advise(runs, goodput.spans(runs), mtbf_s)


def test_costs_are_those_that_were_played():
    found = advised(played(T, failures=12).journal)
    assert found.costs.step_s == pytest.approx(T.step_s, rel=0.01)
    assert found.costs.stall_s == T.stall_s
    assert found.costs.usable_s == pytest.approx(T.stage_s + T.protect_s)
    assert (found.stage_s, found.protect_s, found.costs.drain_s) == (T.stage_s, T.protect_s, T.drain_s)
    assert found.costs.restart_s == pytest.approx(T.away_s + T.start_s + T.restore_s, rel=0.05)
    assert (found.restores, found.restores_from_store) == (12, 0)
    assert found.costs.store_share == pytest.approx(0.5 / 13)
    assert found.now.steps == T.save_every
    assert found.notes == []


def test_failures_of_the_journal_give_their_mean_distance():
    play = played(T, failures=12)
    found = advised(play.journal)
    assert (found.failures, found.mtbf_from) == (12, "journal")
    up = sum(one[-1].at - one[0].at for one in play.journal)
    assert found.mtbf_s == pytest.approx(up / 12)
    assert found.observed_s == pytest.approx(up)


def test_a_given_distance_counts_before_the_journal():
    journal = played(T, failures=12).journal
    often, seldom = advised(journal, 600.0), advised(journal, 600_000.0)
    assert (often.mtbf_from, often.mtbf_s) == ("given", 600.0)
    assert often.best.steps < advised(journal).best.steps < seldom.best.steps
    assert often.best.checkpoints > seldom.best.checkpoints


def test_the_best_choice_is_in_the_table_and_no_other_is_better():
    found = advised(played(T, failures=12).journal)
    assert found.best in found.choices
    assert found.now in found.choices
    assert max(one.ettr for one in found.choices) == found.best.ettr


def test_a_slow_store_gets_a_drain_in_seconds_and_a_fast_one_each():
    slow = Training(drain_s=500.0)
    assert advised(played(slow, failures=6).journal).drain_every.endswith("s")
    fast = Training(drain_s=2.0, stall_s=4.0)
    assert advised(played(fast, failures=6).journal).drain_every == "1"


def test_without_a_failure_the_time_without_one_is_taken():
    play = Played(T)
    play.run(5000.0, how="closed")
    found = advised(play.journal)
    assert (found.mtbf_from, found.failures) == ("none", 0)
    assert found.mtbf_s == pytest.approx(5000.0, rel=0.01)
    assert [note for note in found.notes if "no failure so far" in note]
    assert [note for note in found.notes if "no restore so far" in note]
    assert found.costs.restart_s == pytest.approx(T.start_s, rel=0.1)


def test_few_failures_are_called_rough():
    assert [note for note in advised(played(T, failures=2).journal).notes if "rough" in note]


@pytest.mark.parametrize(
    ("journal", "lacks"),
    [
        ([], "two saves"),
        ([[began()]], "two saves"),
        ([[began(), staged(10.0, 1, 5)]], "two saves"),
        ([[began(), staged(10.0, 1, 5), staged(20.0, 2, 10)]], "drained"),
    ],
)
def test_a_journal_that_lacks_figures_says_which(journal, lacks):
    assert lacks in advised(journal)
