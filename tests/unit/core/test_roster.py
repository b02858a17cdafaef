"""Which ranks are where, as nodes report it: a report counts as a whole or not at all."""

from ckptd.core import events as ev
from ckptd.core.coordinator.coordinator import Coordinator
from ckptd.core.placement import Roster
from ckptd.core.policy import Policy
from ckptd.shared.base.ids import JobKey
from ckptd.shared.protocol.topology import Peer
from tests.runs import RUN

KEY = JobKey("/store", "job")


def attached(node, *, world=3, **words):
    peer = Peer(node, f"arena-{node}", "tcp://10.0.0.1:4000", "k" * 40)
    return ev.NodeAttached(job=KEY, session="s", peer=peer, world_size=world, **words)


def arrivals(*ranks, world=3):
    return [ev.Arrival(rank, world) for rank in ranks]


def test_a_report_that_does_not_fit_changes_nothing():
    roster = Roster()
    roster.put("a", attached("a"), arrivals(0))
    for wrong in (arrivals(1, 0), arrivals(1, 3), arrivals(1, world=4), [*arrivals(1), *arrivals(2, world=4)]):
        assert roster.misfit("b", wrong, gone=set()) is not None
        assert (roster.ranks, roster.nodes, roster.world_size) == ({0: "a"}, ["a"], 3)
    assert roster.misfit("b", arrivals(1, 0), gone={"a"}) is None
    roster.put("b", attached("b"), arrivals(1, 0))
    assert (roster.ranks, roster.nodes) == ({1: "b", 0: "b"}, ["b"])


def test_the_first_report_of_a_session_that_does_not_fit_itself_is_refused():
    assert Roster().misfit("a", [*arrivals(0), *arrivals(1, world=4)], gone=set()) is not None


def test_a_rank_that_comes_back_at_another_node_does_not_keep_its_session_without_a_topology():
    """Its coordinator has restarted: nodes report which ranks are in, and the last report of a rank counts."""
    core = Coordinator(KEY, "a", Policy())
    for node, ranks in {"a": (0,), "b": (1,), "c": (1, 2)}.items():
        living = tuple(ev.Living(rank, "s", 1, node) for rank in ranks)
        fact = attached(node, members=ranks, incarnation=1, run=RUN, living=living)
        core.handle(ev.Report(job=KEY, node=node, event=fact), 0.0)
    assert core.sessions.topology is not None
    assert [core.sessions.topology.home(rank) for rank in range(3)] == ["a", "c", "c"]
