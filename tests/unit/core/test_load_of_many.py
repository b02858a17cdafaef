"""What a load costs the coordinator's core: a few messages for each node, and time that grows with the ranks alone."""

import time

import pytest

from ckptd.core import events as ev
from ckptd.core.actions import TakeIncarnation, ToNode
from ckptd.core.coordinator.coordinator import Coordinator
from ckptd.core.policy import Policy
from ckptd.shared.base.ids import JobKey, SaveId
from ckptd.shared.protocol import node_messages
from ckptd.shared.protocol.messages import Tier
from ckptd.shared.protocol.topology import Peer
from tests.runs import RUN, STORE_ID
from tests.seals import attestations_of

KEY = JobKey("/store", "job")
SAVE = SaveId(1, 1, 10, RUN)
RANKS = 8  # of a node
GROWTH = 8  # times as many nodes
LINEAR = 3 * GROWTH  # at most so many times the time; what grows with the square takes 64 times


PAIRS = "pairs"  # as many sets as there are pairs of ranks


class Many:
    """The coordinator of a job of many nodes, all of which have the newest save."""

    def __init__(self, nodes, sets=0):
        self.names = [f"n{number:04d}" for number in range(nodes)]
        self.core = Coordinator(KEY, self.names[0], Policy())
        self.world = nodes * RANKS
        peers = [Peer(name, f"arena-{name}", "tcp://10.0.0.1:4000", "k" * 40) for name in self.names]
        self.longest, self.spent = 0.0, 0.0
        for node, peer in enumerate(peers):
            ranks = tuple(self.ranks(node))
            self.say(node, ev.NodeAttached(
                job=KEY, session="s", peer=peer, members=ranks, incarnation=1, run=RUN, world_size=self.world,
                living=tuple(ev.Living(rank, "s", 1, "h") for rank in ranks),
            ))  # fmt: skip
        for node in range(1, nodes):
            self.core.handle(ev.PeerUp(job=KEY, node=self.names[node]), 0.0)
        segments = {
            node: tuple(
                ev.HeldSegment(SAVE, rank, self.world, 10, attestations_of(self.world, rank, sets) if sets else ())
                for rank in self.ranks(node)
            )
            for node in range(nodes)
        }
        for node in range(nodes):
            living = tuple(ev.Living(rank, "s", 1, "h") for rank in self.ranks(node))
            has = ev.NodeHas(job=KEY, incarnation=1, run=RUN, session="s", living=living, segments=segments[node])
            self.say(node, has)
        self.longest, self.spent = 0.0, 0.0

    def ranks(self, node):
        return range(node * RANKS, (node + 1) * RANKS)

    def handle(self, event):
        began = time.process_time()
        actions = self.core.handle(event, 0.0)
        took = time.process_time() - began
        self.longest, self.spent = max(self.longest, took), self.spent + took
        return actions

    def say(self, node, fact):
        return self.handle(ev.Report(job=KEY, node=self.names[node], event=fact))

    def ask(self):
        """All nodes ask; what the core orders at last."""
        took = []
        for node in range(len(self.names)):
            first, *others = self.ranks(node)
            took += self.say(node, ev.LoadsAsked(job=KEY, rank=first, others=tuple(others), session="s"))
        assert [type(action) for action in took if isinstance(action, TakeIncarnation)] == [TakeIncarnation]
        self.handle(ev.IncarnationTaken(job=KEY, session="s", number=2, run=RUN, store_id=STORE_ID))
        return self.handle(ev.StoreScanned(job=KEY, store_id=STORE_ID, after=2))

    def report(self, order):
        found = []
        for node in range(len(self.names)):
            first, *others = self.ranks(node)
            read = ev.LoadsReported(job=KEY, rank=first, others=tuple(others), session="s", save=order.save)
            found += self.say(node, read)
        return found


def orders(actions, kind):
    return [action.message for action in actions if isinstance(action, ToNode) and isinstance(action.message, kind)]


def load(nodes, sets):
    """The processor's time of a load, and its longest turn."""
    many = Many(nodes, nodes * RANKS // 2 if sets == PAIRS else sets)
    actions = many.ask()
    if sets:
        (gather,) = orders(actions, ev.GatherOrdered)
        assert len(node_messages.encode(gather)) < 300
        actions = []
        for node in range(nodes):
            done = ev.SegmentsGathered(job=KEY, save=SAVE, attempt=gather.attempt, copied=1)
            actions += many.say(node, done)
    (order,) = orders(actions, ev.LoadOrdered)
    assert (order.save, order.tiers.usual, order.tiers.others) == (SAVE, Tier.PEER if sets else Tier.ARENA, ())
    assert len(node_messages.encode(order)) < 250
    (agreed,) = orders(many.report(order), ev.LoadOrdered)
    assert agreed.agreed
    return many.spent, many.longest


@pytest.mark.seconds
@pytest.mark.parametrize("sets", [0, 4, PAIRS])
def test_a_load_from_memory_is_linear(sets):
    """sets: of replicas, each of which needs the segments of the others."""
    load(8, sets)  # what the first one alone costs
    few, many = (min(load(nodes, sets) for _ in range(3)) for nodes in (25, 25 * GROWTH))
    assert many[0] < LINEAR * few[0] + 0.05, (few, many)
    assert many[1] < 0.5, many
