"""What the status says of the nodes of a job: who is in which set, and what is less safe than it was asked to be."""

from ckptd.core.coordinator.protection_view import view_of
from ckptd.shared.base.ids import SaveId
from ckptd.shared.format.schemes import Scheme
from ckptd.shared.protocol.topology import Peer, Topology
from tests.runs import RUN

SAVE = SaveId(1, 5, 50, RUN)


def topology(count, *, scheme=Scheme.XOR, set_size=4, ranks_each=2):
    peers = tuple(Peer(f"n{number}", "a", "", "k" * 40, f"rack{number % 4}") for number in range(count))
    return Topology(peers, tuple(rank // ranks_each for rank in range(count * ranks_each)), scheme, set_size)


def test_every_node_has_its_ranks_and_its_set():
    view = view_of(topology(8), encoded={"n3": SAVE}, protected=[SAVE])
    assert [node.ranks for node in view.nodes] == [[2 * n, 2 * n + 1] for n in range(8)]
    assert sorted(node.set_index for node in view.nodes) == [0] * 4 + [1] * 4
    assert [node.encoded_step for node in view.nodes] == [None, None, None, 50, None, None, None, None]
    assert (view.coordinator, view.protected, view.degraded) == ("n0", {SAVE}, ())


def test_a_lost_node_degrades_its_own_set_only():
    view = view_of(topology(8), unreachable={"n5"})
    (text,) = view.degraded
    assert text == f"set {view.nodes[5].set_index} makes no parity while it hears nothing of n5"
    assert [node.node for node in view.nodes if not node.reachable] == ["n5"]


def test_a_set_too_small_for_the_scheme_says_what_it_does_instead():
    (text,) = view_of(topology(2, scheme=Scheme.DOUBLE)).degraded
    what = "set 0 has 2 nodes: xor in place of double"
    assert text == f"{what}; run the job on 3 nodes or more, or connect(redundancy='xor')"
    (text,) = view_of(topology(8, set_size=2, scheme=Scheme.DOUBLE)).degraded
    assert text.startswith("sets 0, 1, 2, 3 have 2 nodes: xor in place of double; run the job on 3 nodes or more")
    assert view_of(topology(9, set_size=4, scheme=Scheme.DOUBLE)).degraded == ()
    assert view_of(topology(3, scheme=Scheme.DOUBLE)).degraded == ()


def test_a_problem_of_a_node_is_reported_with_its_name():
    view = view_of(topology(3), problems={"n1": "no memory for parity"})
    assert view.degraded == ("set 0: node n1: no memory for parity",)


def test_what_none_asked_for_is_not_missed():
    assert view_of(topology(8, scheme=Scheme.NONE), unreachable={"n5"}).degraded == ()
    assert view_of(topology(1)).degraded == (), "xor is asked for by default"


def test_a_thousand_nodes_are_seen_at_once():
    view = view_of(topology(1000, set_size=8, ranks_each=8), unreachable={f"n{n}" for n in range(1000)})
    assert len(view.nodes) == 1000
    assert len(view.degraded) == 125
