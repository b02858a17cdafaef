"""A daemon's journals on a real arena and a real store, under random faults: what is on record is true, and all of it.

The store refuses, hangs, or takes a segment and does not say so; the arena is full; daemons are killed, with a record
half written, or end; nodes are lost, memory and all. The world knows each record that was given to a daemon.
"""

import errno
import glob
import os
import shutil
import tempfile
from collections import Counter
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ckptd.arena.journal_files import found_journals
from ckptd.daemon import journals as module
from ckptd.shared.format import arena_paths
from ckptd.shared.protocol import journal as log
from ckptd.store.journal import read_journal
from ckptd.store.journal_messages import ReadAccount
from ckptd.store.messages import Failed
from ckptd.store.worker import put_journal
from tests.unit.daemon.test_journals import FLUSH_S, Parts, Worker

KEPT_NBYTES, SEGMENT_NBYTES = 6000, 1000
TEXT = "x" * 300
APPEND = module.JournalFile.append
HALF = b"\x40\x00\x00\x00half of a record"


class Unsure(Worker):
    """unsure: a segment is put, and the worker is killed before it says so."""

    unsure = False

    def answer(self, request, answer):
        if self.unsure and not isinstance(request, ReadAccount):
            put_journal(self.store, request)
            answer(Failed(request.id, "os", "the worker was killed", "the worker was killed", ""))
        else:
            super().answer(request, answer)


class Machine(RuleBasedStateMachine):
    """Records are numbers: the step of a Steps, the counter of a Durable, the times of a Problem."""

    def __init__(self):
        super().__init__()
        self.directory = tempfile.mkdtemp(prefix="ckptd-test-")
        self.patch = pytest.MonkeyPatch()
        self.parts = None
        self.given = {}  # number -> incarnation of its run, kind, time
        self.gone = 0  # at most so many records went with an arena or a daemon: nobody can say so
        self.sure = True  # each daemon knew what the store has, and so how much is lost
        self.torn = 0
        self.number = self.run = 0
        self.saves = []  # in the arena: the next daemon finds them, and says so again

    @initialize()
    def begin(self):
        self.patch.setattr(module, "MAX_KEPT_NBYTES", KEPT_NBYTES)
        self.patch.setattr(module, "SEGMENT_NBYTES", SEGMENT_NBYTES)
        drawn = Random(0)
        self.patch.setattr(module, "secrets", SimpleNamespace(token_hex=lambda nbytes: drawn.randbytes(nbytes).hex()))
        self.parts = Parts(Path(self.directory), self.patch)
        self.parts.worker = Unsure(self.parts.job.store)
        self.parts.again()
        self.run = 1

    def teardown(self):
        try:
            if self.parts is not None:
                self.heal()
        finally:
            self.patch.undo()
            shutil.rmtree(self.directory)

    # --- what happens

    def keep(self, entry, kind):
        self.given[self.number] = self.run, kind, self.parts.clock.time()
        self.parts.keep(entry, incarnation=self.run, run=self.run.to_bytes(16))

    @rule(count=st.integers(1, 12), large=st.booleans())
    def records(self, count, large):
        for _ in range(count):
            self.number += 1
            entry = log.Problem(at=0, text=TEXT, times=self.number) if large else log.Steps(at=0, step=self.number)
            self.keep(entry, type(entry))

    @rule()
    def a_save(self):
        self.number += 1
        self.saves = [(self.number, self.run)]
        self.keep(self.durable(*self.saves[0]), log.Durable)

    def durable(self, number, run):
        return log.Durable(at=0, counter=number, seconds=1.0, drain_s=1.0, nbytes=1, incarnation=run)

    @rule(how=st.sampled_from(["closed", "lost"]))
    def run_ends(self, how):
        self.number += 1
        self.keep(log.RunEnded(at=0, how=f"{how} {self.number}"), log.RunEnded)
        self.run += 1

    @rule(seconds=st.sampled_from([0.0, 1.0, FLUSH_S, 700.0]))
    def wait(self, seconds):
        self.parts.after(seconds)

    # --- what goes wrong

    @rule(mode=st.sampled_from(["works", "refuses", "hangs", "says nothing of what it did"]))
    def store(self, mode):
        worker = self.parts.worker
        worker.problem = "EROFS" if mode == "refuses" else ""
        worker.unsure = mode.startswith("says")
        self.sure &= not worker.unsure
        if mode == "hangs":
            worker.hangs = True
            self.parts.after(FLUSH_S)  # it is asked
        else:
            worker.go_on()

    @rule(full=st.booleans())
    def arena(self, full):
        """No file may be written to."""
        self.patch.setattr(module.JournalFile, "append", _is_full if full else APPEND)

    def segments(self):
        return sorted(
            glob.glob(os.path.join(self.parts.arena, arena_paths.JOBS, "*", "*" + arena_paths.JOURNAL_SUFFIX))
        )

    @rule(torn=st.booleans(), happens=st.booleans())
    def daemon_is_killed(self, torn, happens):
        self._dies(happens)
        if torn and (paths := self.segments()):
            with open(paths[-1], "ab") as file:
                file.write(HALF)
            self.torn += 1
        kept = self.kept()
        self.parts.again()
        for number, run in self.saves:
            if number in kept:
                self.parts.keep(self.durable(number, run), incarnation=run, run=run.to_bytes(16), again=True)

    def _dies(self, happens):
        """What its worker was about has happened, or it has not; nobody hears of it."""
        waiting, self.parts.worker.waiting = self.parts.worker.waiting, []
        for request, _ in waiting if happens else []:
            if not isinstance(request, ReadAccount):
                put_journal(self.parts.worker.store, request)
        journal = self.parts.journals._journals.get(self.parts.job)
        self.gone += journal.missing if journal is not None else 0
        self.sure = False

    @rule(happens=st.booleans())
    def node_is_lost(self, happens):
        self._dies(happens)
        self.gone += len(self.given) - len(self.found())
        shutil.rmtree(self.parts.arena)
        os.mkdir(self.parts.arena)
        self.parts.known.remember(self.parts.job, self.parts.store_id)
        self.parts.again()

    def kept(self):
        """Saves of which the arena has the record."""
        entries = [entry for one in found_journals(self.parts.arena) for entry in log.read_segment(one.content).entries]
        return {entry.counter for entry in entries if isinstance(entry, log.Durable)}

    # --- what must be

    def entries(self):
        found = read_journal(self.parts.worker.store.files("job"))
        assert found.damaged <= self.torn
        return found.entries

    def found(self):
        """Numbers on the store, each once and true."""
        numbers, run = [], 0
        for entry in self.entries():
            if isinstance(entry, log.RunBegan):
                run = entry.incarnation
                continue
            if isinstance(entry, log.Missing):
                continue
            number = _number_of(entry)
            assert self.given.get(number, (0,))[0] == run, f"{entry} of run {run} was never given"
            assert self.given[number] == (run, type(entry), entry.at), entry
            numbers.append(number)
        assert max(Counter(numbers).values(), default=0) <= 1
        return set(numbers)

    @invariant()
    def what_is_on_record_is_true(self):
        if self.parts is not None:
            self.found()

    @invariant()
    def the_arena_has_little(self):
        if self.parts is not None:
            assert sum(map(os.path.getsize, self.segments())) < KEPT_NBYTES + 3 * SEGMENT_NBYTES

    def heal(self):
        """Then all is on the store, or it is on record how much is not."""
        self.arena(full=False)
        worker = self.parts.worker
        worker.problem, worker.unsure = "", False
        worker.go_on()
        self.records(1, large=False)
        for _ in range(300):  # a segment each time
            self.parts.after(700.0)
            if self.parts.journals.next_deadline() is None:
                break
        found = self.found()
        missing = sum(entry.records for entry in self.entries() if isinstance(entry, log.Missing))
        assert self.number in found
        lost = len(self.given) - len(found)
        text = f"{lost} of {len(self.given)} are not there, of which {missing} are on record, and {self.gone} cannot be"
        assert lost <= missing + self.gone, text
        assert lost == missing or not self.sure, text


def _is_full(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _number_of(entry):
    match entry:
        case log.Steps():
            return entry.step
        case log.Durable():
            return entry.counter
        case log.Problem():
            return entry.times
    return int(entry.how.split()[1])


LONG = os.environ.get("FAULTS") == "long"
TestJournals = Machine.TestCase
TestJournals.settings = settings(max_examples=700 if LONG else 100, stateful_step_count=40, deadline=None)
