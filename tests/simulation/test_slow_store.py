"""An hour of saving to a store that is ten times too slow; ``python -m tests.simulation.slow_store`` plays many."""

from collections import Counter
from dataclasses import replace

import pytest

from ckptd.core.coordinator.job_state import JobState
from ckptd.core.coordinator.retention import Retention
from ckptd.core.coordinator.saves import Saves
from ckptd.core.node.node import JobNode
from ckptd.core.node.slots import SlotTable
from ckptd.shared.protocol.messages import Cadence
from tests.long_form import LONG, in_long
from tests.simulation.arena import Arena
from tests.simulation.ranks import CAPACITY
from tests.simulation.slow_store import HOURS, Hour, play

SHORT = Hour(seconds=600.0)


def test_three_slots_save_all_through_the_hour_and_drain_what_the_store_can_take():
    report = play(replace(HOURS["three slots"], nodes=2))
    assert report.saves > 90  # of 120: which ones find no slot is the seed's
    assert set(report.ends) == {"durable", "superseded"}
    assert 11 <= report.ends["durable"] <= 14  # a drain takes five minutes
    assert report.refused == 0
    assert len(report.durable) == 3  # keep_last


def test_two_slots_skip_while_a_drain_holds_one_of_them():
    report = play(HOURS["two slots"])
    assert set(report.ends) == {"durable", "skipped"}
    assert report.ends["skipped"] > 5 * report.ends["durable"]
    assert report.refused == 0


def test_drains_by_the_clock_keep_the_saves_between_them():
    report = play(replace(HOURS["drain_every 10 minutes"], nodes=2))
    assert {"durable", "kept"} <= set(report.ends) <= {"durable", "kept", "superseded"}
    assert 6 <= report.ends["durable"] <= 8
    assert len(report.durable) >= 3


@pytest.mark.parametrize("name", ["auto", *in_long("auto, failing for 45 minutes", "auto, silent for 45 minutes")])
def test_a_cadence_that_is_left_to_the_store_makes_due_what_the_store_takes(name):
    report = play(replace(HOURS[name], nodes=2))
    ends = report.ends
    assert set(ends) <= {"durable", "kept", "superseded", "failed"}
    assert ends["superseded"] <= 2 if name == "auto" else ends["superseded"] < 60
    assert ends["durable"] >= 3
    assert ends["kept"] > report.saves / 2
    assert report.refused == 0


WORSE = ["a tenth with drain=True", "silent for 15 minutes", "failing for 45 minutes"]


@pytest.mark.parametrize("name", WORSE if LONG else WORSE[1:])
def test_a_store_that_is_worse_still_costs_drains_and_not_checkpoints(name):
    report = play(replace(HOURS[name], nodes=2))
    assert report.saves > 90  # of 120: which ones find no slot is the seed's
    assert report.ends["durable"] >= 3
    assert report.refused == 0


@pytest.mark.parametrize("name", ["killed while it is silent", *in_long("ranks killed every 10 minutes")])
def test_what_was_staged_is_loaded_from_memory_whatever_the_store_does(name):
    hour = replace(HOURS[name], nodes=2)
    assert play(hour).loads == len(hour.crashes)


def test_without_parity_and_with_two_of_each_set():
    for scheme in ("none", "double"):
        hour = replace(SHORT, scheme=type(SHORT.scheme)(scheme))
        assert set(play(hour).ends) == {"durable", "superseded"}


def test_an_arena_that_is_too_small_holds_no_byte_too_many_and_each_save_learns_of_it():
    report = play(replace(SHORT, short_nbytes=CAPACITY))
    assert report.refused > 0
    assert set(report.ends) == {"skipped"}


def test_steps_that_are_kept_for_good_stay_whatever_is_newer():
    hour = replace(SHORT, nodes=2, seconds=1800.0, cadence=Cadence(steps=250), keep_every=250, every_s=10.0)
    steps = [save.step for save in play(hour).durable]
    assert len(steps) > 3
    assert all(step % 250 == 0 for step in steps[:-3])


# --- a core that does less is caught


def takes_one_more(self, rank):
    self._per_rank = 4
    return provision(self, rank)


provision = SlotTable.provision


def frees_at_once(self, _event=None):
    return [action for slot in list(self.slots) if slot.save is not None for action in self._free(slot)]


def says_nothing(self, record):
    return []


def gives_no_room(self, nbytes):
    """As an arena without a budget."""


def keeps_the_newest_alone(self):
    self._facts.policy = replace(self._facts.policy, keep_last=1)
    return retire(self)


retire = Retention.retire


@pytest.mark.parametrize(
    ("broken", "notices"),
    [
        ([(JobNode, "collect", frees_at_once)], "nothing as new lies in memory|given up|which holds"),
        ([(Saves, "_superseded", says_nothing)], "nothing was heard of the end"),
        ([(SlotTable, "provision", takes_one_more), (Arena, "make_room", gives_no_room)], "holds .* bytes, of"),
        ([(Retention, "retire", keeps_the_newest_alone)], "retention removes"),
    ],
)
def test_a_core_that_breaks_this_is_caught(monkeypatch, broken, notices):
    for owner, name, instead in broken:
        monkeypatch.setattr(owner, name, instead)
    with pytest.raises(AssertionError, match=notices):
        play(replace(SHORT, seconds=900.0))


def test_a_status_that_forgets_saves_is_caught(monkeypatch):
    monkeypatch.setattr(JobState, "ends", property(lambda self: Counter(r.end for r in self.records.values() if r.end)))
    with pytest.raises(AssertionError, match="the status tells of"):
        play(Hour(nodes=2))
