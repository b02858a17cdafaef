"""Which nodes have a leader, and which one."""

import math
from collections import Counter

import pytest

from ckptd.core.groups import RELAYED_FROM, leaders
from ckptd.core.redundancy_sets import redundancy_sets
from ckptd.shared.protocol.topology import Peer, Topology


def a_topology(nodes, set_size=8, domains=0, first=0):
    peers = tuple(
        Peer(f"n{number:05d}", "arena", "tcp://10.0.0.1:4000", "k" * 40, f"rack{number % domains}" if domains else "")
        for number in range(nodes)
    )
    homes = (*range(first, nodes), *range(first))
    return Topology(peers, homes, set_size=set_size)


@pytest.mark.parametrize("nodes", [1, 2, 8, RELAYED_FROM - 1])
def test_a_small_job_has_none(nodes):
    assert leaders(a_topology(nodes)) == {}


@pytest.mark.parametrize("nodes", [64, 65, 100, 256, 1000, 2500])
@pytest.mark.parametrize("domains", [0, 7])
@pytest.mark.parametrize("set_size", [2, 8, 16])
def test_groups_are_whole_sets_and_about_as_many_as_their_nodes(nodes, domains, set_size):
    topology = a_topology(nodes, set_size, domains, first=nodes // 3)
    found, sets = leaders(topology), redundancy_sets(topology.peers, set_size)
    groups = Counter(found.values())
    own = next(one for one in sets if topology.coordinator in one)
    assert not {*found, *found.values()} & {*own}, "the coordinator's own set has links to it"
    assert not found.keys() & groups.keys(), "a leader has none"
    assert found.keys() | groups.keys() | {*own} == {*topology.nodes}
    assert all(len({found.get(node, node) for node in one}) == 1 for one in sets if one != own), "whole sets"
    side = math.isqrt(nodes)
    assert max(groups.values()) <= 2 * max(side, set_size)
    assert len(groups) <= 2 * side


def test_ten_thousand_nodes_have_about_a_hundred_leaders():
    groups = Counter(leaders(a_topology(10_000)).values())
    assert 90 <= len(groups) <= 110
    assert 90 <= max(groups.values()) <= 110


def test_all_nodes_find_the_same():
    topology = a_topology(300)
    assert leaders(topology) == leaders(Topology.unpacked(topology.packed))
