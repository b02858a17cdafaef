"""Short plays of the simulator; campaigns (make simulate) play the long ones."""

import collections
import dataclasses
import os
import subprocess
import sys

import msgspec
import pytest

from ckptd.core import actions as act
from ckptd.core import events as ev
from ckptd.core.coordinator import saves
from ckptd.core.coordinator.parity_scheduler import ParityScheduler
from ckptd.core.coordinator.protection_states import EncodingOn
from ckptd.core.coordinator.restores import Restores
from ckptd.core.coordinator.saves import Saves
from ckptd.core.node.node import JobNode
from ckptd.core.node.pulled import PulledSegments
from ckptd.core.scrub.memory import MemoryScrub
from ckptd.shared.format.schemes import Scheme
from tests import states
from tests.long_form import in_long
from tests.simulation import effects, growth
from tests.simulation.run import BrokenError, examine, play
from tests.simulation.shared import once_in_all
from tests.simulation.world import POLICY, World

LONG = {1: range(10), 3: range(14), 4: range(100, 110), 8: range(200, 206)}
SHORT = {1: (0, 1, 2, 8), 3: range(8), 4: (100, 102, 106), 8: (200, 204)}  # without a guard of the core some fail
RARE_SEEDS = range(7, 16)  # together they reach all that is rare
PLAYS = LONG if os.environ.get("FAULTS") == "long" else SHORT
CASES = [(nodes, seed) for nodes, seeds in PLAYS.items() for seed in seeds]


@pytest.mark.parametrize(("nodes", "seed"), CASES)
def test_no_promise_is_broken(nodes, seed):
    play(seed, nodes=nodes, seconds=60.0)


RARE = {
    "all daemons restart", "half are cut off", "memory full", "store not mounted", "checkpoint pinned",
    "checkpoint removed by hand", "coordinator restarts in a load", "rank dies in a load", "load of a named step",
    "load of a named run", "steps differ",
}  # fmt: skip


@pytest.fixture(scope="module")
def rarities():
    """Plays in which rare faults are frequent."""
    return [play(seed, nodes=4, rare_every_s=10.0) for seed in RARE_SEEDS]


def test_no_promise_is_broken_by_rare_faults(rarities):
    happened = {name for outcome in rarities for name in outcome.faults}
    assert happened >= RARE


def test_the_same_seed_is_the_same_play_with_rare_faults_too(rarities):
    assert play(RARE_SEEDS[0], nodes=4, rare_every_s=10.0).fingerprint == rarities[0].fingerprint


SCRUBS = dataclasses.replace(
    POLICY, scrub_memory=1 << 30, scrub_memory_every_s=20.0, scrub_store=1 << 30, scrub_store_every_s=60.0
)


@pytest.mark.parametrize("seed", [30, 33, *in_long(*range(34, 44))])
def test_scrubs_beside_all_faults_find_bits_that_flipped_and_nothing_else(seed):
    play(seed, nodes=4, policy=SCRUBS)
    outcome = play(seed, nodes=4, scheme="xor", policy=SCRUBS, flip_every_s=5.0)
    assert outcome.counts["bits flipped in memory"] > 0


@pytest.mark.parametrize(("scheme", "mended"), [("xor", "the parity of its set"), ("none", "the store")])
def test_flipped_bits_are_made_good(scheme, mended):
    quiet = {"fault_every_s": 0.0, "think_s": 60.0, "seconds": 2000.0}
    outcome = play(30, nodes=4, scheme=scheme, policy=SCRUBS, flip_every_s=9.0, **quiet)
    found = {name for name in outcome.counts if name.startswith("scrubs: ")}
    assert found >= {f"scrubs: arena made good from {mended}", "scrubs: pfs made good from memory"}


def is_afraid(self, event, now, _scrubbed=MemoryScrub.scrubbed):
    return _scrubbed(self, msgspec.structs.replace(event, damage="a ghost"), now)


def test_a_core_that_raises_an_alarm_for_nothing_is_caught(monkeypatch):
    monkeypatch.setattr(MemoryScrub, "scrubbed", is_afraid)
    with pytest.raises(BrokenError, match="no bit of this flipped"):
        play(30, nodes=4, policy=SCRUBS, fault_every_s=0.0, think_s=60.0)


def test_a_play_without_faults_reaches_everything():
    outcome = play(7, nodes=4, scheme="double", fault_every_s=0.0, seconds=60.0)
    assert outcome.told["protected"] > 0
    assert outcome.told["durable"] > 0
    assert outcome.counts["loads"] >= 1
    assert outcome.told["calm loads"] >= 1
    assert not outcome.faults


def test_the_same_seed_is_the_same_play_whatever_the_hash_seed():
    code = "from tests.simulation.run import play; print(play(11, nodes=4, seconds=40.0).fingerprint)"
    found = set()
    for hash_seed in ("0", "1", *in_long("2")):
        env = os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(p or "." for p in sys.path)}
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        found.add(done.stdout)
    assert len(found) == 1


def test_what_a_node_says_for_a_save_does_not_grow_with_the_job():
    few, many = (growth.measure(nodes, set_size=4) for nodes in (4, 32))
    assert many.most_messages <= few.most_messages
    assert many.most_nbytes <= 1.05 * few.most_nbytes  # names and numbers get a digit


def test_a_save_takes_as_much_of_the_journal_whatever_the_number_of_nodes():
    one, few, many = (growth.measure(nodes, set_size=4).journal_nbytes for nodes in (1, 4, 32))
    assert 0 < one < few, "one node has no redundancy: nothing becomes protected"
    assert few <= many <= few + 8, "a number of more digits, and no more"
    assert many <= 200


# --- a simulator that finds nothing proves nothing: cores that break a promise, each of which it must notice


def frees_at_once(self, _event=None):
    actions = []
    for slot in [s for s in self.slots if s.save is not None]:
        actions += self._free(slot)
    return actions


def says_protected_at_once(self, now):
    newest = self._facts.newest_staged
    if not self.on or newest is None or newest.protected:
        return []
    return self._protected((newest.save, self.epoch), EncodingOn.FOUND)


def never_drains(self, now):
    return []


@pytest.mark.parametrize(
    ("nodes", "broken", "notices"),
    [
        (3, (JobNode, "collect", frees_at_once), "was given up|slot"),
        (3, (ParityScheduler, "advance", says_protected_at_once), "protected"),
        (1, (Saves, "start_drain", never_drains), "does not reach its milestones"),  # it is given most of an hour
    ],
)
def test_a_core_that_breaks_a_promise_is_caught(monkeypatch, nodes, broken, notices):
    monkeypatch.setattr(*broken)
    with pytest.raises(BrokenError, match=notices):
        play(1, nodes=nodes, scheme="xor", seconds=20.0, fault_every_s=0.0)


def finds_no_difference(shares):
    return None


def brings_nothing_together(self, *words):
    return None


@pytest.mark.parametrize(
    ("odd", "broken", "notices"),
    [
        (1.0, (saves, "difference_of", finds_no_difference), "is staged, of which the slices do not make a whole"),
        (0.0, (Restores, "_have_near", brings_nothing_together), "from the store, and it lies in memory"),
    ],
)
def test_a_core_that_mixes_up_shares_is_caught(monkeypatch, odd, broken, notices):
    monkeypatch.setattr(*broken)
    with pytest.raises(BrokenError, match=notices):
        play(2, nodes=3, scheme="xor", seconds=60.0, fault_every_s=0.0, shared=1.0, odd=odd)


def takes_any_step(self, load, _candidates=Restores._candidates):
    step, load.step = load.step, None
    try:
        return _candidates(self, load)
    finally:
        load.step = step


def test_a_core_that_loads_what_was_not_named_is_caught(monkeypatch):
    monkeypatch.setattr(Restores, "_candidates", takes_any_step)
    with pytest.raises(BrokenError, match="was named") as raised:
        collections.deque((play(seed, nodes=4, rare_every_s=10.0) for seed in RARE_SEEDS), maxlen=0)
    assert " --rare 10" in str(raised.value)


def test_slices_are_restored_and_replicas_that_are_none_are_distinguished():
    some, every = (play(2, nodes=4, scheme="xor", seconds=60.0, fault_every_s=0.0, shared=1.0, odd=o) for o in (1, 0))
    assert some.told["mismatched"] > 0
    assert "mismatched" not in every.told
    for outcome in (some, every):
        assert outcome.told["protected"] > 0
        assert outcome.counts["near loads"] > 0
    assert every.counts["reads of slices"] > 0


def test_replicas_whose_tensors_lie_otherwise_now_pull_all_images_from_memory():
    outcome = play(3, nodes=4, scheme="xor", seconds=60.0, fault_every_s=0.0, shared=1.0, odd=0.0, relaid=1.0)
    assert outcome.counts["near loads"] == 1
    assert outcome.counts["read peer, whole"] > 0  # what they shared was not enough
    assert outcome.counts["reads of slices"] == outcome.counts["read peer, pulled"] > 0


def keeps_what_was_pulled(self):
    self._users = set()
    return []


def test_a_core_that_keeps_what_was_pulled_is_caught(monkeypatch):
    monkeypatch.setattr(PulledSegments, "_drop", keeps_what_was_pulled)
    with pytest.raises(BrokenError, match="what was pulled for a load of job is still there"):
        play(3, nodes=4, scheme="xor", seconds=60.0, fault_every_s=0.0, shared=1.0, odd=0.0, relaid=1.0)


def test_a_session_of_which_another_has_the_number_is_started_again():
    world, rows = World(1, 2, scheme=Scheme.XOR, set_size=2, fault_every_s=0.0), collections.Counter()
    launcher, store = world.launchers[0], world.store(world.launchers[0].job)
    with states.reached(rows), once_in_all():
        world.begin()
        assert world.run_until(lambda: store.committed, 600.0)
        store.mode, before = "silent", launcher.current
        before.crash(before.procs)
        assert world.run_until(lambda: launcher.current not in (None, before) and launcher.current.newest, 600.0)
        first, number = launcher.current, launcher.current.procs[0].incarnation
        store.numbers.add(number)
        store.records[number] = ev.Recorded(number, bytes(15) + b"x", "another")
        store.mode = "ok"
        assert world.run_until(lambda: first.told_to_start_again, 600.0)
        examine(world)
    assert launcher.current is not first
    assert any(row.endswith("number disputed") for row in rows)


def test_a_failure_says_how_to_play_it_again(monkeypatch):
    monkeypatch.setattr(JobNode, "collect", frees_at_once)
    with pytest.raises(BrokenError) as raised:
        play(3, nodes=3, seconds=20.0, fault_every_s=0.0)
    assert "tests.simulation.replay 3 --nodes 3 --seconds 20 --fault-every 0" in str(raised.value)
    assert len(raised.value.lines) > 100


def test_a_play_counts_the_rows_of_the_cores_tables():
    rows = play(7, nodes=4, scheme="xor", fault_every_s=0.0, seconds=30.0).rows
    assert rows.keys() <= {states.name_of(name, *row) for name, table in states.TABLES.items() for row in table.rows()}
    scrubs = {"memory scrub", "store scrub"}  # unless a daemon is told to
    assert {name.partition(":")[0] for name in rows} == set(states.TABLES) - scrubs


def test_a_row_that_is_in_no_table_breaks_a_play(monkeypatch):
    row = next(row for row in states.TABLES["save"].edges.values() if row)
    monkeypatch.setattr(states.TABLES["save"], "edges", {None: row})
    with pytest.raises(BrokenError, match=r"no row for|is whole"):
        play(1, nodes=3, scheme="xor", seconds=20.0, fault_every_s=0.0)


def test_every_action_of_the_core_has_an_effect():
    asynchronous = set(effects._EFFECTS)
    immediate = {
        act.ToRank, act.ToNode, act.FreeSlot, act.UnlinkSlot, act.KeepTopology, act.StopEncode, act.DropChunk,
        act.DropPulled, act.KeepNumber, act.RememberStore, act.ForgetJob, act.MeetPeers, act.Meet, act.EndMeeting,
        act.KeepLinks, act.Note, act.KeepEntry,
    }  # fmt: skip
    off = {act.DrainParity}  # unless a daemon is told to
    off |= {act.HoldRanks, act.AnnounceStep}  # nobody preempts a job here: tests/property/test_preemption.py
    kinds = {kind for kind in vars(act).values() if isinstance(kind, type) and issubclass(kind, act.Action)}
    assert kinds - off - {act.Action} == asynchronous | immediate
