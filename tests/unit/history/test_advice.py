"""Advice from the journal of a played training, whose costs and failures are known."""

import itertools
import random

import pytest
from msgspec import structs

from ckptd.history import advice, goodput
from ckptd.history.runs import runs_of
from ckptd.shared.base.ids import SaveId
from ckptd.shared.protocol.journal import Durable, RunBegan
from ckptd_client._daemon.settings import parse_cadence
from tests.runs import RUN
from tests.unit.core.a_job import AJob
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
    up = sum(one[-1].at - one[0].at for one in play.journal) - 13 * T.start_s - 12 * T.restore_s
    assert found.mtbf_s == pytest.approx(up / 12, rel=0.01)
    assert found.observed_s == pytest.approx(up, rel=0.01)


def test_what_it_says_of_now_is_what_the_history_measured():
    """Each second is between failures, or of a restart, and not of both: starts are as long as half a run."""
    play = Played(Training(start_s=900.0, away_s=0.0, detect_s=0.0))
    for place in range(20):  # a failure at each moment between two saves
        play.run(900.0 + T.restore_s + 1800.0 + (place / 20 - 0.5) * (T.save_every * T.step_s + T.stall_s))
    runs = runs_of(flat(play.journal))
    found, measured = goodput.spans(runs), goodput.totals(goodput.spans(runs), runs)
    said = advice.advise(runs, found)
    assert said.mtbf_s == pytest.approx(1800.0, rel=0.02)
    assert said.costs.restart_s == pytest.approx(905.0, rel=0.02)
    assert said.now.ettr == pytest.approx(measured.ettr, rel=0.02)
    up, restarts = said.observed_s, measured.start_s + measured.restore_s
    assert up + restarts == pytest.approx(measured.total_s)


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


def test_a_slow_store_gets_a_drain_each_so_many_steps_and_a_fast_one_each_save():
    slow = Training(drain_s=500.0)
    best = advised(played(slow, failures=6).journal).best
    assert advised(played(slow, failures=6).journal).drain_every == best.drain_saves * best.steps > best.steps
    fast = Training(drain_s=2.0, stall_s=4.0)
    assert advised(played(fast, failures=6).journal).drain_every == 1


def test_the_cadence_that_is_advised_drains_as_often_as_the_table_says():
    """In a job whose saves come now a little early, now a little late: by the clock some would be due one later."""
    found = advised(played(Training(drain_s=500.0), failures=6).journal)
    best, chance, due = found.best, random.Random(1), []
    job = AJob(world=1, slots_per_rank=40, cadence=parse_cadence(found.drain_every)).start()
    for counter in range(1, 20 * best.drain_saves):
        save = SaveId(1, counter, counter * best.steps, RUN)
        job.tick(best.seconds * chance.uniform(0.97, 1.03))
        job.stage(0, save)
        if job.facts.records[save].due:
            due.append(counter)
            job.drain(save)
    assert {after - before for before, after in itertools.pairwise(due[1:])} == {best.drain_saves}


@pytest.mark.parametrize(
    ("drain_every", "drain_s", "saves"),
    [
        ("1", 20.0, 1),
        ("1", 250.0, 3),  # of a save each 100.4 s the store takes one of three
        ("", 20.0, 1),
        ("100", 20.0, 2),
        ("110", 20.0, 3),
        ("1000", 20.0, 20),
        ("1000", 5000.0, 50),
        ("900s", 20.0, 9),
        ("1e+06s", 20.0, 9961),
        ("auto", 20.0, 1),
        ("auto", 250.0, 4),
        ("nan", 20.0, 1),
        ("inf", 20.0, 1),
    ],
)
def test_now_drains_as_the_run_does(drain_every, drain_s, saves):
    play = played(Training(drain_s=20.0), failures=6)
    entries = [
        structs.replace(one, drain_every=drain_every) if isinstance(one, RunBegan)
        else structs.replace(one, drain_s=drain_s) if isinstance(one, Durable)
        else one
        for one in flat(play.journal)
    ]  # fmt: skip
    now = advised([entries]).now
    assert (now.steps, now.drain_saves) == (50, saves)


def test_without_a_failure_the_time_without_one_is_taken():
    play = Played(T)
    play.run(5000.0, how="closed")
    found = advised(play.journal)
    assert (found.mtbf_from, found.failures) == ("none", 0)
    assert found.mtbf_s == found.observed_s == pytest.approx(5000.0 - T.start_s, rel=0.01)
    (note,) = [note for note in found.notes if "no failure so far" in note]
    assert "is not known" in note
    assert "at least" not in note
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
