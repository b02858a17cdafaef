"""Nodes that a job ran on before: found once, with their addresses, whoever speaks first."""

import time

import pytest

from ckptd.core import events as ev
from ckptd.core.actions import MeetPeers, ToNode
from ckptd.core.coordinator.former_nodes import FormerNodes
from ckptd.core.coordinator.sessions import Sessions
from ckptd.core.policy import Policy
from ckptd.shared.base.ids import JobKey
from ckptd.shared.protocol.topology import Peer, Topology

KEY = JobKey("/store", "job")


def peer(node):
    return Peer(node, f"arena-{node}", f"tcp://{node}:4000", "k" * 40)


def topology(*nodes, set_size=4):
    return Topology(tuple(map(peer, nodes)), tuple(range(len(nodes))), set_size=set_size)


BEFORE, NOW = topology("a", "b", "c"), topology("a", "b")


def named(former, *nodes, silent=()):
    for node in nodes:
        former.named(node, ev.Former(BEFORE.digest, silent))


def met(actions):
    return [one.node for action in actions if isinstance(action, MeetPeers) for one in action.peers]


def announced(actions):
    orders = [a.message for a in actions if isinstance(a, ToNode) and isinstance(a.message, ev.AnnounceOrdered)]
    return {node for order in orders for node in order.nodes}


def test_a_former_node_that_reports_before_its_topology_is_known_has_an_address():
    former = FormerNodes(KEY, "a", "s")
    former.has_reported("c")
    named(former, "a", "b")
    assert not former.complete
    former.found(BEFORE)
    actions = former.review(NOW, peer("a"))
    assert former.outside == {"c": peer("c")}
    assert (met(actions), announced(actions)) == (["c"], set()), "it knows of the session"
    assert former.complete


def test_a_former_node_that_has_said_nothing_is_waited_for():
    former = FormerNodes(KEY, "a", "s")
    named(former, "a", "b")
    former.found(BEFORE)
    actions = former.review(NOW, peer("a"))
    assert (met(actions), announced(actions), former.complete) == (["c"], {"c"}, False)
    assert former.review(NOW, peer("a")) == []
    former.has_reported("c")
    assert former.complete


def test_a_node_that_answers_again_somewhere_is_no_lost_node():
    former = FormerNodes(KEY, "a", "s")
    named(former, "a", "b", silent=("c",))
    former.found(BEFORE)
    assert former.review(NOW, peer("a")) == []
    named(former, "b")
    assert met(former.review(NOW, peer("a"))) == ["c"]


def test_another_topology_of_the_session_is_weighed_again():
    former = FormerNodes(KEY, "a", "s")
    named(former, "a", "b")
    former.found(BEFORE)
    assert former.review(BEFORE, peer("a")) == []
    assert met(former.review(NOW, peer("a"))) == ["c"]


@pytest.mark.parametrize("reports", ["former", "present"])
def test_what_it_costs_grows_with_the_nodes_and_not_with_their_square(reports):
    def cost(nodes):
        names = [f"n{number:05d}" for number in range(nodes)]
        before = topology(*names)
        now = topology(*names[: nodes // 2])
        before.digest, now.digest  # noqa: B018 - made once
        former = FormerNodes(KEY, names[0], "s")
        began = time.process_time()
        for node in names[: nodes // 2]:
            former.named(node, ev.Former(before.digest))
        former.found(before)
        for node in names[nodes // 2 :] if reports == "former" else names[: nodes // 2]:
            former.review(now, peer(names[0]))
            if reports == "former":
                former.has_reported(node)
            else:
                former.named(node, ev.Former(before.digest))
            assert former.complete is (reports == "former" and node == names[-1])
        return time.process_time() - began

    few = min(cost(250) for _ in range(3))
    assert min(cost(2000) for _ in range(3)) <= 5 * 8 * few  # the square: 64


def test_a_topology_that_no_session_waits_for_is_not_decoded(monkeypatch):
    decoded = []
    monkeypatch.setattr(Topology, "unpacked", classmethod(lambda _, packed: decoded.append(packed)))
    sessions = Sessions(KEY, "a", Policy())
    sessions.topology_reported(ev.TopologyReported(job=KEY, node="b", packed=BEFORE.packed), 0.0)
    assert decoded == []
