"""An account of any history: its figures are those of the journal, no counter falls, no record costs more."""

import random

import msgspec
import pytest

from ckptd.cli.view.metrics import families
from ckptd.history.account import Account, account_of
from ckptd.history.goodput import spans, totals
from ckptd.history.last import last_of
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
from ckptd.shared.protocol.messages import End, Tier
from tests.opcodes import opcodes
from tests.unit import a_status
from tests.unit.history.test_account import SHARES, counted
from tests.unit.history.test_runs import staged

EXPECTED = [End.KEPT, End.SUPERSEDED, End.SKIPPED, End.FAILED, End.ABANDONED]


class History:
    """Records as daemons write them: they restart, find saves again, lose nodes, and steps rise or do not."""

    def __init__(self, seed):
        self.chance = random.Random(seed)
        self.at, self.number, self.counter, self.step = 1000.0, 0, 0, -1
        self.entries, self.saves = [], []
        self.run = None
        for _ in range(self.chance.randrange(2, 9)):
            self.begins()
            for _ in range(self.chance.choice([0, 1, 5, 40, 300])):
                self.goes_on()
            if self.chance.random() < 0.7:
                self.writes(RunEnded(at=self.at, how=self.chance.choice(["lost", "closed", "taken over", "loaded"])))
                self.at += self.chance.choice([0.0, 30.0, 1e5])

    def writes(self, entry):
        self.entries.append(entry)

    def begins(self):
        self.number += self.chance.choice([1, 1, 2])
        self.counter = 0
        self.run = RunBegan(
            at=self.at, incarnation=self.number, run=self.number.to_bytes(16, "big"), coordinator="n", nodes=1,
            world_size=self.chance.choice([8, 8, 8, 4]),
        )  # fmt: skip
        self.writes(self.run)
        if self.chance.random() < 0.7:
            self.loads()

    def loads(self):
        back = max(0, self.step - self.chance.randrange(200))
        newest = self.chance.choice([-1, self.step, back])
        self.at += 5
        self.step = back
        tier = self.chance.choice([Tier.ARENA, Tier.PFS])
        self.writes(Restored(at=self.at, incarnation=max(1, self.number - 1), counter=1, step=back, seconds=4.0,
                             tiers={tier: 8}, newest=newest))  # fmt: skip

    def goes_on(self):
        self.at += self.chance.choice([0.5, 5.0, 5.0, 5.0, 300.0])
        ahead = self.chance.choice([1, 1, 5, 0, -3])
        self.step = max(0, self.step + ahead)
        kind = self.chance.choices(["steps", "save", "ends", "again", "lost", "load", "daemon", "missing"],
                                   [8, 8, 8, 2, 1, 0.3, 1, 0.2])[0]  # fmt: skip
        match kind:
            case "steps":
                self.writes(Steps(at=self.at, step=self.step))
            case "save":
                self.counter += 1
                self.saves.append((self.number, self.counter, self.step))
                seconds, stall_s = self.chance.choice([0.0, 0.4]), self.chance.uniform(0, 0.3)
                self.writes(Staged(at=self.at, counter=self.counter, step=self.step, nbytes=8, seconds=seconds,
                                   stall_s=stall_s))  # fmt: skip
            case "ends" if self.saves:
                self.ends(*self.chance.choice(self.saves[-4:]))
            case "again":  # a daemon finds it in the arena and announces it
                for _, counter, step in [one for one in self.saves[-3:] if one[0] == self.number]:
                    self.writes(Staged(at=self.at, counter=counter, step=step, nbytes=8, seconds=0.0))
            case "lost":
                self.writes(Lost(at=self.at, node="n", what=self.chance.choice(["node", "ranks"]), ranks=1))
            case "load":
                self.loads()
            case "daemon":
                self.writes(msgspec.structs.replace(self.run, at=self.at, again=True, coordinator="m"))
            case "missing":
                self.writes(Missing(at=self.at, records=3))

    def ends(self, number, counter, step):
        of = 0 if number == self.number else number
        kind = self.chance.random()
        if kind < 0.3 and not of:
            self.writes(Protected(at=self.at, counter=counter, seconds=self.chance.choice([0.0, 1.0])))
        elif kind < 0.7:
            seconds, drain_s, nbytes = map(self.chance.choice, ([0.0, 9.0], [0.0, 7.0], [8, 16]))
            self.writes(Durable(at=self.at, counter=counter, seconds=seconds, incarnation=of, drain_s=drain_s,
                                nbytes=nbytes))  # fmt: skip
        else:
            self.writes(Ended(at=self.at, counter=counter, step=step, end=self.chance.choice(EXPECTED), incarnation=of))
        if kind > 0.9 and not of:  # it never was staged
            self.counter += 1
            self.writes(Ended(at=self.at, counter=self.counter, step=step, end=End.SKIPPED))


def compared(entries, found):
    """The account has the figures of the journal."""
    runs = runs_of(entries)
    divided = spans(runs)
    whole, kept = totals(divided, runs), found.goodput(0.0)
    for name in SHARES:
        assert getattr(kept, name) == pytest.approx(getattr(whole, name), rel=1e-9, abs=1e-3), name
    assert kept.failures == whole.failures
    listed, told = rows(runs, divided), found.totals()
    ends = {}
    for row in listed:
        for end, count in row.saves_by_end.items():
            ends[end] = ends.get(end, 0) + count
    assert {end: count for end, count in found.ends.items() if count} == {e: n for e, n in ends.items() if e != "open"}
    saves = [save for run in runs for save in run.saves]
    assert told.runs == len(listed)
    assert told.failed_runs == sum(run.failed for run in runs[:-1])
    assert told.staged_nbytes == sum(row.staged_nbytes for row in listed)
    assert told.drained_nbytes == sum(row.drained_nbytes for row in listed)
    assert told.lost_steps == sum(one.lost_steps or 0 for row in listed for one in row.restores)
    assert told.missing == sum(row.missing for row in listed)
    assert sum(told.losses.values()) == sum(len(row.losses) for row in listed)
    values = {name: value for name, value in counted(found.histograms.shown()).items() if name[0] != "restore"}
    rates = [save.drained_nbytes / save.drain_s for save in saves if save.drain_s]
    seconds = {
        "staged": [one.staged_s for one in saves if one.staged_s is not None],
        "stall": [one.stall_s for one in saves if one.staged_s is not None],
        "protected": [(one.staged_s or 0.0) + one.protected_s for one in saves if one.protected_s is not None],
        "durable": [(one.staged_s or 0.0) + one.durable_s for one in saves if one.durable_s is not None],
        "drain_bytes_per_s": rates,
    }
    expected = {(what, ""): (len(of), pytest.approx(sum(of), abs=0.01)) for what, of in seconds.items() if of}
    assert values == expected


@pytest.mark.parametrize("seed", range(40))
def test_its_figures_are_those_of_the_journal_at_every_time(seed):
    entries, found = History(seed).entries, Account()
    chance = random.Random(seed)
    for place, entry in enumerate(entries, 1):
        found.add(entry)
        if chance.random() < 0.02 or place == len(entries):
            compared(entries[:place], found)


def counters(found):
    """Samples of metrics that may not fall."""
    shown = found.histograms.shown()
    job = a_status.job(totals=found.totals(), goodput=found.goodput(0.0), ends=found.ends, histograms=shown)
    status = a_status.status(jobs=[job])
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in families(status)
        if family.type in {"counter", "histogram"}
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


@pytest.mark.parametrize("seed", range(6))
def test_no_counter_of_metrics_falls(seed):
    found, before, risen = Account(), {}, set()
    for entry in History(seed).entries[:250]:
        found.add(entry)
        after = counters(found)
        assert not {name: (value, after[name]) for name, value in before.items() if after[name] < value}
        risen |= {name[0] for name, value in after.items() if value > before.get(name, value)}
        before = after
    assert {"ckptd_staged_bytes_total", "ckptd_save_seconds_count"} <= risen


def test_failed_runs_are_counted_somewhere():
    counts = [account_of(History(seed).entries).totals().failed_runs for seed in range(10)]
    assert sum(counts) > 5


# --- what a record costs


@pytest.mark.parametrize("how", ["lost", "loaded"])
def test_the_work_for_the_runs_and_the_last_state_of_a_journal_grows_as_the_journal_does(how):
    """Each run loads what the one before it saved; where nothing happened in it, it is the begin of the next."""

    def journal(count):
        for number in range(1, count + 1):
            yield run(number)
            yield Restored(at=10.0 * number + 1, incarnation=number, counter=1, step=number, seconds=1.0, tiers={})
            if how == "lost":
                yield from (staged(10.0 * number + place, place, number + place) for place in range(1, 4))
            yield RunEnded(at=10.0 * number + 9, how=how)

    counts = []
    for count in (100, 400):
        entries = list(journal(count))
        counts.append(opcodes(lambda of=entries: last_of(runs_of(of), [])))
        assert len(runs_of(entries)) == (count if how == "lost" else 1)
    assert counts[1] < 4.5 * counts[0], counts


@pytest.mark.parametrize("seed", range(10))
def test_a_load_gives_up_what_is_newer_of_all_runs_before_it(seed):
    runs = runs_of(History(seed).entries)
    saves = {(run.incarnation, one.counter): one for run in runs for one in run.saves if one.staged_s is not None}
    for of in runs:
        for restore in of.restores:
            loaded = (restore.incarnation, restore.counter)
            saves = {order: one for order, one in saves.items() if order <= loaded or order[0] >= of.incarnation}
    unsaved = [(one.incarnation, one.counter, one.step, one.at) for one in last_of(runs, []).unsaved]
    assert unsaved == [(*order, saves[order].step, saves[order].at) for order in sorted(saves, reverse=True)]


def run(number):
    return RunBegan(
        at=10.0 * number, incarnation=number + 1, run=number.to_bytes(16, "big"), world_size=8, nodes=1, coordinator="a"
    )


def alternating(number):
    yield Lost(at=10.0 * number, node="a", what="node", ranks=1)
    yield Restored(at=10.0 * number, incarnation=1, counter=1, step=1, seconds=1.0, tiers={})


def ending(number):
    yield staged(10.0 * number, number, 10 * number)
    yield RunEnded(at=10.0 * number, how="lost")


def joining(number):
    yield run(number)
    yield Restored(at=10.0 * number + 1, incarnation=1, counter=1, step=1, seconds=1.0, tiers={})
    yield RunEnded(at=10.0 * number + 2, how="loaded")


def stalling(number):
    yield staged(10.0 * number, number, 7)


def swinging(number):
    yield Steps(at=10.0 * number, step=4 + number % 2)


def below_what_was_loaded(number):
    if number == 1:
        yield Restored(at=1.0, incarnation=1, counter=1, step=1 << 40, seconds=1.0, tiers={})
    yield Steps(at=10.0 * number, step=number)


def falling(number):
    """Late marks, each before the ones that are known."""
    yield Steps(at=1e6 - number, step=1000_000 - number)


def saving(number):
    yield staged(10.0 * number, number, 10 * number)
    yield Protected(at=10.0 * number + 1, counter=number, seconds=1.0)
    yield Durable(at=10.0 * number + 2, counter=number, seconds=2.0, drain_s=1.0, nbytes=8)


def failing(number):
    yield run(number)
    yield staged(10.0 * number + 5, 1, 10 * number)
    yield Lost(at=10.0 * number + 6, node="a", what="node", ranks=1)


KINDS = [alternating, ending, joining, stalling, swinging, below_what_was_loaded, falling, saving, failing]


def add(account, entries):
    for entry in entries:
        account.add(entry)


@pytest.mark.parametrize("kind", KINDS)
def test_neither_its_size_nor_the_work_for_a_record_grows(kind):
    found, seen = Account(), []
    found.add(run(0))
    for part in range(10):  # 384 of each: of all that comes in chunks, the same in each part
        entries = [entry for number in range(1 + 384 * part, 385 + 384 * part) for entry in kind(number)]
        traced = part in {1, 2, 9}
        if traced:
            seen.append((opcodes(lambda of=entries: add(found, of)) / len(entries), len(msgspec.msgpack.encode(found))))
        else:
            add(found, entries)
    most_work, most_nbytes = map(max, zip(*seen[:2], strict=True))
    assert max(of for of, _ in seen) < 1.2 * most_work < 1_000, seen
    assert max(nbytes for _, nbytes in seen) < 1.2 * most_nbytes < 20_000, seen
