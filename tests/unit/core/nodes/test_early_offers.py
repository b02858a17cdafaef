"""A member's column that is here before this node has the topology of which it is: it is not offered again for long."""

from ckptd.core import events as ev
from ckptd.core.actions import Encode
from ckptd.core.links import Links
from ckptd.core.node.parity import Protection
from ckptd.core.placement import Placement
from ckptd.shared.base.ids import JobKey, SaveId
from ckptd.shared.format.schemes import Scheme
from ckptd.shared.protocol.parity_types import DataColumn
from ckptd.shared.protocol.topology import Peer, Topology
from tests.runs import RUN
from tests.seals import a_seal

JOB, SAVE = JobKey("/store", "demo"), SaveId(1, 7, 7, RUN)


def opened(epoch, names="ab"):
    """This node's place in a topology, and when that began."""
    peers = tuple(Peer(name, f"{name}.host", "", name * 40) for name in names)
    return Placement(Topology(peers, tuple(range(len(names))), Scheme.XOR, 8)).place("b"), epoch


def offer_of(node, rank, epoch):
    column = DataColumn(node, (a_seal(JOB, SAVE, rank),))
    return ev.ColumnOffered(job=JOB, node=node, save=SAVE, epoch=epoch, column=column)


def ordered(protection, epoch):
    protection.order(ev.EncodeOrdered(job=JOB, node="a", save=SAVE, epoch=epoch))
    return [type(a) for a in protection.offer(DataColumn("b", (a_seal(JOB, SAVE, 1),))) if isinstance(a, Encode)]


def test_it_is_kept_for_the_topology_that_comes():
    protection = Protection(JOB, "b", Links("b"))
    protection.moved(*opened(1))
    assert protection.offered(offer_of("a", 0, 2)) == []
    protection.moved(*opened(2))
    assert ordered(protection, 2) == [Encode]


def test_it_is_kept_over_a_topology_that_comes_before_its_own():
    protection = Protection(JOB, "b", Links("b"))
    protection.moved(*opened(1))
    protection.offered(offer_of("a", 0, 3))
    protection.moved(*opened(2, "bc"))
    protection.moved(*opened(3))
    assert ordered(protection, 3) == [Encode]


def test_one_of_an_earlier_topology_is_of_no_use():
    protection = Protection(JOB, "b", Links("b"))
    protection.moved(*opened(1))
    protection.offered(offer_of("a", 0, 1))
    protection.moved(*opened(2))
    assert ordered(protection, 2) == []


def test_one_of_a_node_that_is_in_no_set_with_this_one_is_of_no_use():
    protection = Protection(JOB, "b", Links("b"))
    protection.moved(*opened(1))
    protection.offered(offer_of("c", 0, 2))
    protection.offered(offer_of("a", 0, 2))
    protection.moved(*opened(2))
    assert set(protection._offers[SAVE, 2]) == {"a"}
    assert ordered(protection, 2) == [Encode]
