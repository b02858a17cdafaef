"""Jobs so small that one could do without leaders, with leaders: what goes wrong with them costs no promise.

FAULTS=long takes more moments, cuts and seeds.
"""

import dataclasses
import os

import pytest

from ckptd.core import events as ev
from ckptd.core.groups import leaders
from ckptd.shared.format.schemes import Scheme
from ckptd.shared.protocol.messages import Milestone
from tests.simulation.costs import Costs
from tests.simulation.run import play
from tests.simulation.world import KEY, POLICY, World

LONG = os.environ.get("FAULTS") == "long"
NODES = 12
ALL = (Milestone.STAGED, Milestone.PROTECTED, Milestone.DURABLE)
SOON_S = 60.0
CHIEF = "n000"


@pytest.mark.parametrize(
    ("nodes", "seed"), [(8, 3), *([(4, 2), (4, 3), (8, 1), (8, 2), (16, 3), (16, 12)] if LONG else [])]
)
def test_no_promise_is_broken_where_leaders_pass_packets_on(nodes, seed):
    outcome = play(seed, nodes=nodes, seconds=60.0, slower=1.0, relayed_from=3)
    assert outcome.told["staged"]
    assert outcome.counts["letters passed on"]


def test_a_job_of_fewer_nodes_has_no_leaders():
    assert not play(2, nodes=8, seconds=30.0, slower=1.0).counts.get("letters passed on")


class Job:
    """Ranks that save now and then, on nodes whose links have found their paths."""

    def __init__(self):
        policy = dataclasses.replace(POLICY, relayed_from=3)
        quiet = {"fault_every_s": 0.0, "shared": 0.0, "odd": 0.0, "think_s": 4.0}
        self.world = world = World(1, NODES, scheme=Scheme.XOR, set_size=2, policy=policy, costs=Costs(), **quiet)
        world.clock.steady, world.forced = True, 1.0
        self.downs = []
        saw = world.saw

        def sees(machine, event):
            if isinstance(event, ev.PeerDown) and not event.rests:
                self.downs.append((machine.name, event.node))
            saw(machine, event)

        world.saw = sees
        world.begin()
        self.reach(lambda: self.session is not None and self.session.phase == "train")
        self.reach(self.is_relayed)

    @property
    def session(self):
        return self.world.launchers[0].current

    @property
    def chief(self):
        """The coordinator's machine."""
        return self.session.homes[0]

    @property
    def groups(self):
        """Node -> leader."""
        return leaders(self.chief.catalogue.jobs[KEY].node.membership.topology, 3)

    def reach(self, done, seconds=SOON_S):
        assert self.world.run_until(done, seconds), (self.session.phase, self.downs)

    def path(self, node, other):
        """By which leader its packets for the other go; None: directly, or there is no link."""
        machine = self.world.nodes[node]
        found = [remote.path.via for (name, _), remote in machine.plane._remotes.items() if name == other]
        return found[0].node if found and found[0] is not None else None

    def is_relayed(self):
        """Whether each member's packets go by its leader, both ways."""
        chief = self.chief.name
        if not all(machine.up for machine in self.world.nodes.values()):
            return False
        pairs = self.groups.items()
        return all(self.path(node, chief) == self.path(chief, node) == leader for node, leader in pairs)

    def next_save(self, events=0):
        """Plays up to so many events of the coordinator after the ranks began a save."""
        before = self.session.rounds
        self.reach(lambda: self.session.rounds > before)
        begin = self.chief.load.events
        self.reach(lambda: self.chief.load.events >= begin + events or not self.session._waiting)

    def is_told(self, save):
        """Whether all ranks know that the save has reached everything."""
        return all(self.session.count(save, milestone) >= self.session.world_size for milestone in ALL)

    def completes(self):
        """A save that begins after this reaches everything, and the links their paths again."""
        self.reach(self.is_relayed, 3 * SOON_S)
        begun = self.session.rounds
        self.reach(lambda: any(s.step > 10 * begun and self.is_told(s) for s, _ in self.session.told), 3 * SOON_S)


@pytest.fixture(scope="module")
def leader():
    """One of the leaders; and how many events a save is for the coordinator."""
    job = Job()
    job.next_save()
    begin, save = job.chief.load.events, job.session.newest
    job.reach(lambda: job.session.newest != save)
    save = job.session.newest
    job.reach(lambda: job.is_told(save))
    assert job.downs == []
    return min(set(job.groups.values())), job.chief.load.events - begin


@pytest.mark.parametrize("eighth", range(8) if LONG else (1, 5))
def test_a_leaders_daemon_that_ends_at_any_step_of_a_save_costs_its_own_link_alone(leader, eighth):
    name, events = leader
    job = Job()
    job.next_save(eighth * events // 8)
    job.world.nodes[name].kill()
    job.world.clock.after(3.0, job.world.nodes[name].start)
    job.completes()
    assert {pair for pair in job.downs if name not in pair} == set()


@pytest.mark.parametrize("seconds", [4.0, 8.0, 30.0] if LONG else [30.0])
@pytest.mark.parametrize("part", [0.1, 0.5] if LONG else [0.5])
def test_a_leader_that_stands_still_costs_no_other_link(leader, seconds, part):
    name, events = leader
    job = Job()
    job.next_save(int(part * events))
    job.world.nodes[name].freeze(seconds)
    job.completes()
    assert {pair for pair in job.downs if name not in pair} == set()


@pytest.mark.parametrize("seconds", [3.0, 5.5] if LONG else [5.5])
@pytest.mark.parametrize("some", [slice(1, None, 2), *([slice(6, None), slice(1, 7)] if LONG else [])])
def test_half_of_the_nodes_behind_a_cut_that_is_shorter_than_the_timeout(leader, seconds, some):
    _, events = leader
    job = Job()
    job.next_save(events // 3)
    names = frozenset(list(job.world.nodes)[some])
    job.world.network.partition(names, frozenset(job.world.nodes) - names, seconds)
    job.completes()
    assert job.downs == []


def test_half_of_the_nodes_behind_a_long_cut_come_back_to_their_leaders(leader):
    job = Job()
    job.next_save(leader[1] // 3)
    names = frozenset(list(job.world.nodes)[1::2])
    job.world.network.partition(names, frozenset(job.world.nodes) - names, 40.0)
    job.world.run(60.0)
    job.completes()


@pytest.mark.parametrize("after_s", [0.001, 0.01, 0.1, 1.0] if LONG else [0.01])
def test_a_coordinators_daemon_that_is_started_again_in_a_load(after_s):
    job = Job()
    job.next_save()
    job.session.crash(job.session.procs)
    before = job.session
    job.reach(lambda: job.session not in (None, before) and job.session.phase == "load", 3 * SOON_S)
    chief = job.chief
    job.world.run(after_s)
    chief.kill()
    job.world.clock.after(1.0, chief.start)
    job.reach(lambda: job.session.phase == "train", 3 * SOON_S)
    job.completes()


def test_a_session_on_other_nodes_while_a_save_is_under_way_has_other_groups(leader):
    job = Job()
    job.next_save(leader[1] // 2)
    groups, before = job.groups, job.session
    machines = list(job.world.nodes.values())
    job.world.launchers[0]._placement = lambda: [*machines[3:], *machines[:3]]
    job.session.crash(job.session.procs)
    job.reach(lambda: job.session not in (None, before) and job.session.phase == "train", 3 * SOON_S)
    assert job.chief.name != CHIEF
    job.completes()
    assert job.groups != groups


def test_the_same_nodes_with_another_leader_while_a_save_is_under_way(leader):
    job = Job()
    job.next_save(leader[1] // 2)
    groups, before = job.groups, job.session
    machines = list(job.world.nodes.values())
    job.world.launchers[0]._placement = lambda: [machines[0], *machines[:0:-1]]
    job.session.crash(job.session.procs)
    job.reach(lambda: job.session not in (None, before) and job.session.phase == "train", 3 * SOON_S)
    assert job.chief.name == CHIEF
    job.completes()
    assert job.groups.keys() & groups.keys()


def test_a_leader_that_is_lost_with_its_memory_is_replaced_in_the_next_session(leader):
    job = Job()
    job.next_save(leader[1] // 2)
    before, name = job.session, leader[0]
    lost = job.world.nodes[name]
    lost.wipe()
    job.world.clock.after(1.0, before.end, "a node was lost")
    job.world.clock.after(2.0, job.world.replace, lost)
    job.reach(lambda: job.session not in (None, before) and job.session.phase == "train", 3 * SOON_S)
    assert {pair for pair in job.downs if name not in pair} == set()
    job.world.run(20.0)
    job.completes()


def test_a_job_that_closes_is_forgotten_on_all_nodes_at_once():
    job = Job()
    job.completes()
    job.world.launchers[0].goal = "rest"
    job.session.close()
    job.reach(lambda: job.session is None)
    job.world.run(10.0)
    assert [machine.name for machine in job.world.nodes.values() if KEY in machine.catalogue.jobs] == []
