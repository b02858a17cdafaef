"""What a daemon knows of all runs while their records come, compared with what the whole journal says."""

import random
from dataclasses import replace

import msgspec
import pytest

from ckptd.history.account import Account, account_of
from ckptd.history.distribution import SECONDS, distribution
from ckptd.history.goodput import spans, totals
from ckptd.history.runs import runs_of
from ckptd.history.summary import rows
from ckptd.shared.protocol.journal import (
    Durable,
    Ended,
    Lost,
    Missing,
    Protected,
    Restored,
    RunBegan,
    RunEnded,
    Staged,
    Steps,
)
from ckptd.shared.protocol.messages import End, Milestone, Tier
from tests.unit.history.played import Training, played
from tests.unit.history.test_runs import began, staged

SHARES = ("total_s", "training_s", "stall_s", "restore_s", "repeated_s", "start_s", "unexplained_s", "idle_s", "ettr")


def counted(found):
    """By what and tier: how many values, and their sum."""
    return {(one.what, one.tier): (sum(one.counts), round(one.total, 3)) for one in found if any(one.counts)}


def compared(entries):
    """The account of the entries has the figures of the journal. Returns both goodputs."""
    runs = runs_of(entries)
    whole = totals(spans(runs), runs)
    kept = account_of(entries).goodput(0.0)
    for name in SHARES:
        assert getattr(kept, name) == pytest.approx(getattr(whole, name), abs=1e-3), name
    assert kept.failures == whole.failures
    return kept, whole


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("steps_every", [0, 10])
@pytest.mark.parametrize("training", [Training(), Training(save_every=5, jitter=0.3, drain_s=2.0)])
def test_its_figures_are_those_of_the_journal(seed, steps_every, training):
    play = played(replace(training, steps_every=steps_every), seed)
    kept, whole = compared(play.entries)
    assert kept.step_s == pytest.approx(whole.step_s, rel=0.05)
    for cut in range(1, len(play.entries), max(1, len(play.entries) // 23)):
        compared(play.entries[:cut])


@pytest.mark.parametrize("seed", range(4))
def test_hangs_slow_steps_and_runs_in_which_nothing_happened_change_nothing_of_that(seed):
    chance = random.Random(seed)
    entries, at, step = [], 1000.0, -1
    for number in range(1, 9):
        entries.append(RunBegan(at=at, incarnation=number, run=number.to_bytes(16, "big"), world_size=8, nodes=1,
                                coordinator="n"))  # fmt: skip
        if step >= 0 and chance.random() < 0.8:
            lost = chance.randrange(0, 200)
            at, step = at + 5, max(0, step - lost)
            entries.append(Restored(at=at, incarnation=max(1, number - 1), counter=1, step=step, seconds=5.0,
                                    tiers={Tier.ARENA: 8}, newest=chance.choice([-1, step + lost])))  # fmt: skip
        seconds = chance.choice([1.0, 2.0, 5.0])
        for counter in range(chance.choice([0, 1, 30, 500])):
            ahead = chance.randrange(1, 9)
            step += ahead
            at += seconds * ahead * chance.uniform(0.8, 1.2) + (chance.random() < 0.02) * 300
            kind = chance.random()
            if kind < 0.5:
                entries.append(Steps(at=at, step=step))
            else:
                entries.append(Staged(at=at + 0.4, counter=counter + 1, step=step, nbytes=8, seconds=0.4,
                                      stall_s=chance.uniform(0, 0.3)))  # fmt: skip
        at += chance.uniform(0, 60)
        if chance.random() < 0.7:
            entries += [Lost(at=at, node="n", what="ranks", ranks=1)] * chance.randrange(3)
            entries.append(RunEnded(at=at, how=chance.choice(["lost", "closed"])))
        at += chance.uniform(0, 100)
    for cut in (len(entries) // 3, len(entries) // 2, len(entries)):
        compared(entries[:cut])


def test_it_goes_on_where_another_process_left_it():
    entries = played(Training(save_every=5), 3).entries
    for cut in range(0, len(entries), 97):
        before = account_of(entries[:cut])
        kept = msgspec.msgpack.decode(msgspec.msgpack.encode(before), type=Account)
        for entry in entries[cut:]:
            kept.add(entry)
        whole = account_of(entries)
        assert kept.goodput(0.0) == whole.goodput(0.0)
        assert (kept.totals(), kept.ends) == (whole.totals(), whole.ends)
        assert kept.histograms.shown() == whole.histograms.shown()


def test_a_run_that_is_not_over_counts_until_now_and_one_that_is_does_not():
    entries = [began(), *(Steps(at=10.0 * n, step=n) for n in range(1, 9))]
    found = account_of(entries)
    assert found.goodput(81.0).total_s == pytest.approx(found.goodput(0.0).total_s + 1)
    hang = found.goodput(1080.0)
    assert hang.unexplained_s == pytest.approx(980.0, abs=10), "no step for 1,000 s: at most two count"
    found.add(RunEnded(at=90.0, how="closed"))
    assert found.goodput(1080.0) == found.goodput(0.0)


def test_counts_are_those_of_the_journal():
    entries = played(Training(jitter=0.2), 5, failures=6).entries
    found, runs = account_of(entries), runs_of(entries)
    listed = rows(runs, spans(runs))
    ends = {}
    for row in listed:
        for end, count in row.saves_by_end.items():
            ends[end] = ends.get(end, 0) + count
    assert found.ends == {end: count for end, count in ends.items() if end != "open"}
    told = found.totals()
    assert told.runs == len(listed)
    assert told.staged_nbytes == sum(row.staged_nbytes for row in listed)
    assert told.drained_nbytes == sum(row.drained_nbytes for row in listed)
    assert told.losses == {"node": sum(len(row.losses) for row in listed)}
    assert told.lost_steps == sum(one.lost_steps or 0 for row in listed for one in row.restores)
    values = counted(found.histograms.shown())
    assert values["stall", ""][0] == values["staged", ""][0] == sum(row.stall.count for row in listed if row.stall)
    assert values["restore", "arena"][0] == sum(len(row.restores) for row in listed)


def test_durations_count_from_the_first_rank_on():
    entries = [
        began(),
        Staged(at=12.0, counter=1, step=1, nbytes=100, seconds=2.0, stall_s=0.5),
        Protected(at=15.0, counter=1, seconds=3.0),
        Durable(at=22.0, counter=1, seconds=10.0, drain_s=4.0, nbytes=80_000_000),
        Missing(at=23.0, records=3),
    ]
    found = account_of(entries)
    assert counted(found.histograms.shown()) == {
        ("staged", ""): (1, 2.0), ("protected", ""): (1, 5.0), ("durable", ""): (1, 12.0), ("stall", ""): (1, 0.5),
        ("drain_bytes_per_s", ""): (1, 20_000_000.0),
    }  # fmt: skip
    assert found.totals().missing == 3


def test_a_save_counts_by_its_last_end():
    entries = [began(), staged(10.0, 1, 1), Ended(at=11.0, counter=1, step=1, end=End.KEPT)]
    found = account_of(entries)
    assert found.ends == {"kept": 1}
    found.add(Durable(at=15.0, counter=1, seconds=5.0, drain_s=1.0, nbytes=8))
    found.add(Ended(at=16.0, counter=1, step=1, end=End.FAILED))
    assert found.ends == {"kept": 0, "durable": 1}


def test_records_of_an_older_run_count_and_take_no_time():
    first, second = began(), began(at=100.0, incarnation=2)
    entries = [first, staged(10.0, 1, 1), staged(20.0, 2, 2), second, staged(110.0, 1, 3), staged(120.0, 2, 4)]
    third = began(at=200.0, incarnation=3)
    found = account_of([*entries, third, staged(210.0, 1, 5)])
    before = found.goodput(0.0)
    found.add(first)
    found.add(staged(30.0, 9, 3))
    assert found.goodput(0.0) == before
    assert counted(found.histograms.shown())["staged", ""][0] == 6


def test_a_value_counts_up_to_its_bound_and_a_large_one_above_all():
    found = distribution((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.5):
        found.add(value)
    assert (found.counts, found.total) == ([2, 1, 1], 5.5)
    assert (SECONDS[0], SECONDS[-1]) == (0.01, 5000.0)


def test_all_distributions_are_there_before_the_first_value_so_that_it_is_an_increase():
    found = Account().histograms.shown()
    assert [(one.what, one.tier) for one in found] == [
        *((milestone, "") for milestone in Milestone), ("stall", ""), ("drain_bytes_per_s", ""),
        *(("restore", tier) for tier in Tier),
    ]  # fmt: skip
    assert all(len(one.counts) == len(one.bounds) + 1 for one in found)
