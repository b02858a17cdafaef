"""Where the time of a job went, compared with a played training that knows it."""

import itertools
import time

import pytest

from ckptd.history.goodput import Kind, over_time, spans, step_s, totals
from ckptd.history.runs import runs_of
from ckptd.shared.protocol.journal import Restored, RunEnded, Staged, Steps
from ckptd.shared.protocol.messages import Tier
from tests.unit.history.played import Played, Training, played
from tests.unit.history.test_runs import began, flat, staged


def of(journal):
    runs = runs_of(flat(journal))
    found = spans(runs)
    return totals(found, runs), found


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("steps_every", [0, 10])
def test_the_time_of_a_played_training_is_found_again(seed, steps_every):
    play = played(Training(steps_every=steps_every), seed)
    found, _ = of(play.journal)
    true = play.spent
    whole = sum(true.values())
    assert found.total_s == pytest.approx(whole, abs=1e-3)
    for kind, seconds in true.items():  # what happened after the last mark of a run is an estimate
        close = 0.02 if kind in {Kind.REPEATED, Kind.UNEXPLAINED, Kind.TRAINING} else 0.002
        assert getattr(found, f"{kind}_s") == pytest.approx(seconds, abs=close * whole), kind
    assert found.ettr == pytest.approx(true[Kind.TRAINING] / whole, abs=0.02)
    assert (found.failures, found.step_s) == (4, pytest.approx(2.0, rel=0.01))


def test_spans_follow_each_other_without_a_gap():
    _, found = of(played(Training()).journal)
    assert all(one.stop == two.start for one, two in itertools.pairwise(found))
    assert {span.kind for span in found} == {*Kind} - {Kind.IDLE}, "no run closed before another began"


def test_an_undisturbed_run_loses_its_start_and_its_stalls():
    journal = [[began(), *(staged(10.5 + 10 * n, n, n, stall_s=1.0) for n in range(1, 11))]]
    found, _ = of(journal)
    assert found.step_s == 9.0
    assert (found.stall_s, found.repeated_s, found.restore_s) == (10.0, 0.0, 0.0)
    assert found.start_s == pytest.approx(20.0 - 2 * 9.0 - 1.0)  # steps 0 and 1 before the first save
    assert found.ettr == pytest.approx(found.training_s / found.total_s)


def test_steps_that_were_done_before_are_repeated():
    load = Restored(at=112.0, incarnation=1, counter=1, step=10, seconds=2.0, tiers={Tier.ARENA: 16})
    first = [began(), staged(20.5, 1, 10), *(Steps(at=20.0 + n, step=10 + n) for n in range(1, 31))]
    second = [began(100.0, 2), load, *(Steps(at=112.0 + n, step=10 + n) for n in range(1, 61))]
    found, _ = of([[*first, RunEnded(at=50.0, how="lost")], second])
    assert found.repeated_s == pytest.approx(30.0)
    assert found.restore_s == pytest.approx(2.0)
    assert found.start_s == pytest.approx(50.0 + 10.0 + 9.0)  # between the runs, and before each run's first step


def test_the_time_in_which_no_user_wanted_to_train_is_idle_and_lowers_no_ratio():
    """Two runs without a failure, with a month between them."""
    month = 30 * 86400.0
    first = [began(), *(Steps(at=10.0 * n, step=n) for n in range(1, 61)), RunEnded(at=600.0, how="closed")]
    begin = 600.0 + month
    load = Restored(at=begin + 5, incarnation=1, counter=1, step=60, seconds=5.0, tiers={Tier.ARENA: 16})
    second = [began(begin, 2), load, *(Steps(at=begin + 5 + 10.0 * n, step=60 + n) for n in range(1, 61))]
    found, spent = of([first, second])
    assert found.idle_s == pytest.approx(month)
    assert found.total_s == pytest.approx(600.0 + 605.0)
    assert found.ettr == pytest.approx(1200.0 / 1205.0, abs=0.02)
    assert found.start_s == pytest.approx(0.0, abs=1.0)
    assert [(span.start, span.stop) for span in spent if span.kind is Kind.IDLE] == [(600.0, begin)]
    lost = [*first[:-1], RunEnded(at=600.0, how="lost")]
    assert of([lost, second])[0].start_s == pytest.approx(month), "that somebody waits for"


def test_a_hang_between_two_saves_is_unexplained():
    ats = [10, 20, 30, 40, 50, 560, 570]  # of steps that take 10 s
    found, _ = of([[began(), *(Steps(at=float(at), step=n) for n, at in enumerate(ats))]])
    assert found.unexplained_s == pytest.approx(490.0)  # twice the usual time of a step is taken for training


def test_a_run_that_still_runs_trains_until_its_last_record():
    found, _ = of([[began(), *(Steps(at=10.0 * n, step=n) for n in range(1, 9)), staged(85.0, 1, 8)]])
    assert (found.unexplained_s, found.failures) == (0.0, 0)


@pytest.mark.parametrize("journal", [[], [[began()]], [[began(5.0)], [began(9.0, 2)]]])
def test_a_journal_of_nothing_has_no_ratio(journal):
    found, _ = of(journal)
    assert found.ettr in {None, 0.0}
    assert found.step_s is None


def test_one_save_alone_explains_nothing():
    """How long a step takes is not known."""
    found, _ = of([[began(), staged(100.5, 1, 10, stall_s=1.0)]])
    assert (found.training_s, found.unexplained_s, found.stall_s) == (0.0, pytest.approx(99.5, abs=0.6), 1.0)


def test_runs_that_overlap_count_once():
    found, spent = of([[began(), staged(50.0, 1, 5), RunEnded(at=90.0, how="taken over")], [began(60.0, 2)]])
    assert found.total_s == pytest.approx(60.0)
    assert spent[-1].stop == 60.0


def test_parts_of_the_time_add_up_to_all_of_it():
    found, spent = of(played(Training()).journal)
    parts = over_time(spent, 48)
    for kind in Kind:
        assert sum(one[kind] for _, one in parts) == pytest.approx(getattr(found, f"{kind}_s"))
    widths = {round(sum(one.values()), 3) for _, one in parts}
    assert len(parts) == 48
    assert max(widths) - min(widths) < 0.01
    assert over_time([], 4) == []


def test_many_saves_take_no_second():
    play = Played(Training(save_every=1, steps_every=1))
    play.run(50_000.0)
    assert sum(isinstance(entry, Staged) for entry in play.journal[0]) > 15_000
    began_s = time.process_time()
    of(play.journal)
    assert time.process_time() - began_s < 5  # 0.6 s; with the square of the saves: minutes


def test_the_usual_step_is_that_of_most_intervals():
    runs = runs_of([began(), *(Steps(at=t, step=n) for n, t in enumerate([10.0, 12.0, 14.0, 99.0, 101.0, 103.0]))])
    assert step_s(runs) == 2.0
