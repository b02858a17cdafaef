"""How often to save: closed forms, and the advised interval against simulated failures."""

import json
import math

import pytest
from msgspec import structs

from ckptd.history import intervals
from ckptd.history.intervals import Costs
from tests.simulation.interruptions import INTERRUPTIONS, RANK_NBYTES, START_S, STEP_S, STORE_SHARE, WALL_S, Job, play
from tests.unit.sources import ROOT

COSTS = Costs(step_s=2.0, stall_s=0.5, usable_s=4.0, drain_s=60.0, restart_s=120.0, store_share=0.1)


def measured():
    """Costs of the 405B shape by the figures of docs/charts: its largest job has more bytes a rank, fewer nodes."""
    data = json.loads((ROOT / "docs/charts/data.json").read_text())
    play = max((one for one in data["plays"] if one["scheme"] == "xor"), key=lambda one: one["nodes"])
    assert data["stated"]["nbytes"] >= RANK_NBYTES
    return Costs(
        step_s=STEP_S, stall_s=RANK_NBYTES / data["constants"]["copy_bytes_per_s"], usable_s=play["protected_s"],
        drain_s=play["durable_s"], restart_s=START_S + play["restored_s"], store_share=STORE_SHARE,
    )  # fmt: skip


def simulated(costs, mtbf_s, choice, *, failures=INTERRUPTIONS, seeds=24):
    """Mean ETTR of several jobs that save as chosen."""
    jobs = [Job(costs, choice.steps, choice.drain_saves, seed).run(mtbf_s, failures) for seed in range(seeds)]
    return sum(job.ettr for job in jobs) / len(jobs)


def test_the_405b_shape_with_auto_is_within_two_percent_of_the_best_interval():
    """Some days of it; ``python -m bench.interruptions`` measures the costs and plays all."""
    found = play(measured(), failures=4)
    print(f"\n{found}")
    assert found.missed() == []
    (job,) = found.auto
    assert job.drains > 0.9 * job.up_s / found.advised.drain_seconds
    again = Job(found.costs, found.advised.steps, found.advised.drain_saves, 0).run(found.mtbf_s, 4)
    assert job.ettr == pytest.approx(again.ettr, rel=0.002)  # what the core drained is what the model counts with


def test_the_advised_interval_is_the_best_of_all_in_weeks_of_the_405b_shape():
    costs = measured()
    mtbf_s = WALL_S - costs.restart_s
    best = intervals.best(costs, mtbf_s)
    found = {steps: simulated(costs, mtbf_s, intervals.choice(costs, mtbf_s, steps)) for steps in (1, 2, 10, 30, 100)}
    ettr = simulated(costs, mtbf_s, best)
    assert ettr >= max(found.values())
    assert best.ettr == pytest.approx(ettr, abs=0.003)  # 24 jobs of 419 failures: the mean varies by 0.1 %


@pytest.mark.parametrize(
    "costs",
    [
        COSTS,
        Costs(step_s=0.5, stall_s=20.0, usable_s=25.0, drain_s=100.0, restart_s=300.0, store_share=0.0),
        Costs(step_s=10.0, stall_s=0.01, usable_s=1.0, drain_s=500.0, restart_s=60.0, store_share=0.3),
        Costs(step_s=2.0, stall_s=0.5, usable_s=4.0, drain_s=1200.0, restart_s=120.0, store_share=0.5),
    ],
    ids=["usual", "synchronous", "slow-store", "drains-as-long-as-runs"],
)
@pytest.mark.parametrize("mtbf_s", [1800.0, 10_800.0, 40_000.0])
def test_expected_losses_are_those_of_simulated_failures(costs, mtbf_s):
    for one in intervals.table(costs, mtbf_s):
        assert one.ettr == pytest.approx(simulated(costs, mtbf_s, one, failures=5000, seeds=4), abs=0.01), one.steps


@pytest.mark.parametrize("drain_saves", [1, 5, 40])
def test_a_choice_may_have_an_interval_of_drains_of_its_own(drain_saves):
    one = intervals.choice(COSTS, 1800.0, 20, drain_saves)
    assert (one.drain_saves, one.drain_seconds) == (drain_saves, pytest.approx(drain_saves * one.seconds))
    assert one.ettr == pytest.approx(simulated(COSTS, 1800.0, one, failures=5000, seeds=4), abs=0.01)


@pytest.mark.parametrize("stall_s", [0.01, 1.0, 60.0])
@pytest.mark.parametrize("mtbf_s", [3600.0, 86400.0])
def test_the_best_choice_is_where_young_and_daly_say(stall_s, mtbf_s):
    """Where a save is usable at once and the store plays no part, which is what they count with."""
    costs = Costs(step_s=0.01, stall_s=stall_s, usable_s=0.0, drain_s=0.0, restart_s=0.0, store_share=0.0)
    found = intervals.best(costs, mtbf_s)
    assert found.steps * costs.step_s == pytest.approx(intervals.daly_s(stall_s, mtbf_s), rel=0.02)
    ends = (intervals.young_s(stall_s, mtbf_s), intervals.available_s(stall_s, mtbf_s, 0.0))
    assert all(one == pytest.approx(found.steps * costs.step_s, rel=0.2) for one in ends)


def test_closed_forms_give_the_figures_of_their_papers():
    """Daly 2006, figures 3 to 5: M = 24 h, 6 h and 15 min with a dump of 5 min give 117, 57 and 9.1 minutes."""
    found = [intervals.daly_s(300.0, hours * 3600) / 60 for hours in (24, 6, 0.25)]
    assert found == [pytest.approx(117, abs=0.5), pytest.approx(57, abs=0.5), pytest.approx(9.1, abs=0.3)]
    assert intervals.young_s(8.0, 100.0) == 40.0
    assert intervals.available_s(8.0, 100.0, 25.0) == pytest.approx(math.sqrt(2 * 125 * 8 + 64))
    assert intervals.daly_s(50.0, 20.0) == 20.0


def test_no_other_number_of_steps_is_better():
    found = intervals.best(COSTS, 5000.0)
    others = [intervals.choice(COSTS, 5000.0, steps).ettr for steps in range(intervals.least_steps(COSTS), 2000)]
    assert found.ettr == max(others)


def test_a_save_begins_when_the_one_before_is_usable():
    """A stall of nothing would say: save all the time."""
    costs = Costs(step_s=1.0, stall_s=0.0, usable_s=7.5, drain_s=1.0, restart_s=1.0, store_share=0.0)
    assert intervals.best(costs, 3600.0).steps == intervals.least_steps(costs) == 8


def test_the_store_is_given_no_more_than_it_keeps_up_with():
    one = intervals.choice(COSTS, 5000.0, 10)  # a save each 20.5 s, a drain takes 60 s
    assert (one.drain_saves, one.drain_seconds) == (4, pytest.approx(82.0))
    assert intervals.choice(COSTS, 5000.0, 100).drain_saves == 1
    assert intervals.drain_every_s(60.0, 20.0) == 75.0
    assert intervals.drain_every_s(60.0, 200.0) == 200.0


@pytest.mark.parametrize("stall_s", [0.0, 1e-4, 0.5])
def test_shares_add_up(stall_s):
    """None is below 0, be it by the last bit: it would be shown as -0.00 %."""
    costs = structs.replace(COSTS, stall_s=stall_s)
    for mtbf_s in (5.0, 5000.0, 5e6, 5e12):
        for one in intervals.table(costs, mtbf_s):
            assert one.ettr + one.stalls + one.repeated + one.restarts == pytest.approx(1.0)
            assert min(one.ettr, one.stalls, one.repeated, one.restarts) >= 0
            assert (one.stalls == 0) == (stall_s == 0 or one.ettr == 0)


def test_the_rows_of_a_table_are_other_choices():
    one = intervals.choice(COSTS, 5000.0, 777, 3)
    assert one in intervals.table(COSTS, 5000.0, one)


@pytest.mark.parametrize("mtbf_s", [0.01, 1.0, 1e9])
def test_costs_out_of_all_proportion_give_a_choice_too(mtbf_s):
    costs = Costs(step_s=0.001, stall_s=500.0, usable_s=1e5, drain_s=1e6, restart_s=1e4, store_share=0.5)
    assert 0.0 <= intervals.best(costs, mtbf_s).ettr <= 1.0
