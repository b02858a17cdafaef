"""Any order of words, outcomes and deaths: after each event the promises hold; in the end nothing waits or leaks."""

import functools
import os
from collections import Counter

import pytest
from hypothesis import note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from ckptd.core import actions as act
from ckptd.shared.protocol.messages import Cadence, End
from tests.property.world import KEY, POLICY, Proc, World
from tests.states import missed, reached

LONG = os.environ.get("HYPOTHESIS_PROFILE", "quick") != "quick"
PICK = st.integers(0, 999)
MOSTLY = st.sampled_from([True] * 7 + [False])


@pytest.fixture(autouse=True, scope="module")
def rows():
    """Prints the rows of the machines' tables that no example took. A step that is in no table is an error."""
    with reached(Counter()) as found:
        yield found
    assert found["save: committing -> durable: renamed and synced"]
    print(*missed(found), sep="\n")


def told(check):
    """A rule that shows the transcript when it fails."""

    @functools.wraps(check)
    def run(self, **drawn):
        try:
            return check(self, **drawn)
        except BaseException:
            self.tell()
            raise

    return run


class Machine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.world = World()
        self.sessions = 0

    # --- picking

    def procs(self, *states):
        return [p for p in self.world.procs if p.alive and p.state in states]

    def free(self):
        """Ranks that are in and do not wait for anything: a client does one thing at a time."""
        return [p for p in self.procs("in") if not p.waits and not p.loading]

    def up(self):
        return self.world.catalogue is not None

    # --- sessions

    @precondition(lambda self: len(self.procs("new", "waiting", "in", "lost", "stale")) < 4)
    @rule(size=st.integers(1, 3), takeover=MOSTLY.map(lambda x: not x), steps=st.sampled_from([1, 1, 20]))
    @told
    def start(self, size, takeover, steps):
        self.sessions += 1
        session = f"s{self.sessions}"
        fresh = [Proc(session, rank, size, Cadence(steps=steps), takeover) for rank in range(size)]
        self.world.procs += fresh
        for proc in fresh if self.up() else []:
            self.world.attach(proc)

    @precondition(lambda self: self.up() and self.procs("new"))
    @rule(pick=PICK)
    @told
    def attach(self, pick):
        procs = self.procs("new")
        self.world.attach(procs[pick % len(procs)])

    @precondition(lambda self: self.up() and self.procs("lost"))
    @rule(pick=PICK)
    @told
    def come_back(self, pick):
        procs = self.procs("lost")
        self.come_back_as(procs[pick % len(procs)])

    def come_back_as(self, proc):
        self.world.attach(proc)
        if proc.state != "in":
            return
        unheard, proc.unheard = proc.unheard, []
        for slot, save in unheard:
            if proc.state == "in":
                self.world.hand_over(proc, slot, save)
        proc.granted.clear()
        if proc.capacity and proc.state == "in":
            self.world.ask_slots(proc, proc.capacity)

    @precondition(lambda self: self.procs("new", "waiting", "in", "lost", "stale"))
    @rule(pick=PICK, crash=MOSTLY)
    @told
    def leave(self, pick, crash):
        procs = self.procs("new", "waiting", "in", "lost", "stale")
        self.world.end(procs[pick % len(procs)], crash=crash)

    # --- saving

    @precondition(lambda self: self.up() and self.free())
    @rule(pick=PICK, capacity=st.sampled_from([1, 1, 1, 2]))
    @told
    def ask_slots(self, pick, capacity):
        procs = self.free()
        self.world.ask_slots(procs[pick % len(procs)], capacity)

    @precondition(lambda self: self.procs("in", "lost"))
    @rule(pick=PICK, agrees=st.sampled_from([True] * 9 + [False]), drain=st.booleans())
    @told
    def save_one(self, pick, agrees, drain):
        procs = [p for p in self.procs("in", "lost") if p.capacity and not p.waits and not p.loading]
        if procs:
            self.save_as(procs[pick % len(procs)], agrees=agrees, drain=drain)

    @precondition(lambda self: self.up() and self.free())
    @rule(drain=st.booleans())
    @told
    def save_all(self, drain):
        for proc in self.free():
            if not proc.capacity:
                self.world.ask_slots(proc, 1)
            self.settle_slots()
            if proc in self.free():
                self.save_as(proc, agrees=True, drain=drain)

    def settle_slots(self):
        while any(isinstance(a, act.AllocateSlots) for a in self.world.todo):
            index = next(i for i, a in enumerate(self.world.todo) if isinstance(a, act.AllocateSlots))
            self.world.finish(index, well=True)

    def save_as(self, proc, *, agrees, drain):
        step = (proc.counter + 1) * 10 + (0 if agrees else 1 + proc.rank)
        self.world.save(proc, step, drain=drain)

    @precondition(lambda self: self.up() and self.free())
    @rule(pick=PICK)
    @told
    def say_twice(self, pick):
        """A hand over that was heard already."""
        procs = self.free()
        proc = procs[pick % len(procs)]
        held = [(n, f.save) for n, f in self.world.files.items() if f.save in proc.saves and f.rank == proc.rank]
        if held:
            self.world.hand_over(proc, *held[pick % len(held)])

    @precondition(lambda self: self.up() and self.free())
    @rule(pick=PICK)
    @told
    def force(self, pick):
        procs = self.free()
        self.world.drain_asked(procs[pick % len(procs)])

    # --- loading

    @precondition(lambda self: self.up() and self.free())
    @rule(pick=PICK)
    @told
    def load_one(self, pick):
        procs = self.free()
        self.world.load(procs[pick % len(procs)])

    @precondition(lambda self: self.up() and self.free())
    @rule()
    @told
    def load_all(self):
        for proc in self.free():
            if proc in self.free():
                self.world.load(proc)

    def readers(self):
        """Ranks that have been sent to read, and have all that they asked for."""
        return [p for p in self.procs("in") if p.reading and not p.waits]

    @precondition(lambda self: self.up() and self.readers())
    @rule(pick=PICK, how=st.sampled_from(["well"] * 8 + ["damaged", "fatal", "reshape"]))
    @told
    def report(self, pick, how):
        procs = self.readers()
        problem = "" if how == "well" else how
        self.world.report(procs[pick % len(procs)], problem, fatal=how == "fatal", reshape=how == "reshape")

    # --- damage

    @precondition(lambda self: any(f.digested for f in self.world.files.values()))
    @rule(pick=PICK)
    @told
    def damage(self, pick):
        names = sorted(name for name, f in self.world.files.items() if f.digested)
        self.world.damage(names[pick % len(names)])

    @precondition(lambda self: self.world.committed)
    @rule(pick=PICK)
    @told
    def damage_stored(self, pick):
        saves = sorted(self.world.committed)
        self.world.bad.add(saves[pick % len(saves)])

    # --- time, outcomes and deaths

    @precondition(lambda self: self.up() and self.world.todo)
    @rule(pick=PICK, well=MOSTLY)
    @told
    def finish(self, pick, well):
        self.world.finish(pick % len(self.world.todo), well=well)

    @precondition(lambda self: self.up() and self.world.todo)
    @rule()
    @told
    def finish_all(self):
        for _ in range(40):
            if self.world.todo:
                self.world.finish(0, well=True)

    @rule(seconds=st.sampled_from([0.5, 2, 31, 301, 5001, 90000]))
    @told
    def wait(self, seconds):
        self.world.now += seconds
        self.world.tick()

    @precondition(lambda self: self.up())
    @rule(effects=st.lists(st.booleans(), min_size=12, max_size=12), at_once=st.booleans())
    @told
    def kill_daemon(self, effects, at_once):
        self.world.crash(effects)
        if at_once:
            self.world.restart()

    @precondition(lambda self: not self.up())
    @rule()
    @told
    def start_daemon(self):
        self.world.restart()

    # --- in the end

    def settle(self):  # noqa: C901
        """All outcomes come, all ranks that live come back and finish what they do, and time passes."""
        world = self.world
        if not self.up():
            world.restart()
        for _ in range(600):  # a save that waits for ranks is looked at every 5 s, and given up after minutes
            for proc in self.procs("lost"):
                self.come_back_as(proc)
            for proc in self.procs("new"):
                world.attach(proc)
            for _ in range(60):
                if world.todo:
                    world.finish(0, well=True)
            for proc in self.readers():
                if proc in self.readers():
                    world.report(proc, "")
            due = world.catalogue.next_deadline()
            if self.readers():
                continue
            if not world.todo and (due is None or due - world.now > 3600):
                break
            world.now = max(world.now, due if due is not None and due - world.now < 3600 else world.now)
            world.tick()

    def teardown(self):
        if self.world.broken:
            return
        try:
            self.settle()
            self.all_answered()
            self.nothing_leaks()
        except BaseException:
            self.tell()
            raise

    def tell(self):
        """What happened before an assertion failed."""
        self.world.broken = True
        for line in self.world.trace:
            note(line)

    def all_answered(self):
        for proc in self.procs("new", "waiting", "in", "lost"):
            assert not proc.waits, f"{proc} waits for ever: {proc.waits}"
        job = self.world.catalogue.jobs.get(KEY)
        for proc in self.procs("in"):
            for save, ends in proc.saves.items():
                waits_for = job.coordinator.facts.records.get(save)
                if ends[-1] is None and waits_for is not None:
                    raise AssertionError(f"{proc}: {save} has no end: {waits_for}")
                if ends[-1] is End.DURABLE:
                    assert save in self.world.ever
        held = [s for s in job.node.slots if s.save] if job else []
        saves = job.coordinator.facts if job else None
        newest = saves.newest_staged.save if saves and saves.newest_staged else None
        assert {s.save for s in held} <= {newest}, f"held for nothing: {held}"

    def nothing_leaks(self):
        for proc in self.procs("new", "waiting", "in", "lost", "stale"):
            self.world.end(proc, crash=False)
        self.settle()
        self.world.now += POLICY.orphan_ttl_s + 1
        self.world.tick()
        self.settle()
        assert not self.world.files, f"leaked: {self.world.files}"
        assert not self.world.catalogue.jobs


TestCatalogue = pytest.mark.seconds(Machine.TestCase)
TestCatalogue.settings = settings(max_examples=20000 if LONG else 130, stateful_step_count=80 if LONG else 40)
