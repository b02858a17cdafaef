"""A save has the ranks below its world size, the same at all nodes: what says otherwise is refused, and named."""

import msgspec
import pytest

from ckptd.core import events as ev
from ckptd.shared.base.errors import ProtocolError
from ckptd.shared.protocol import node_messages
from ckptd.shared.protocol.messages import Refused
from ckptd.shared.protocol.node_facts import HeldSegment, StagedSegment
from tests.unit.core.nodes.a_cluster import KEY, ONE, ACluster


@pytest.fixture
def job():
    cluster = ACluster("ab", set_size=2)
    cluster.connect("ab")
    return cluster


def staged(rank, world_size):
    segments = (StagedSegment(rank, 10),)
    return ev.SegmentsStaged(job=KEY, session="s1", save=ONE, world_size=world_size, segments=segments)


def held(rank, world_size):
    return ev.NodeHas(job=KEY, incarnation=1, segments=(HeldSegment(ONE, rank, world_size, 10),))


@pytest.mark.parametrize("make", [staged, held])
def test_a_rank_that_the_save_does_not_have_is_refused_as_bytes(make):
    raw = node_messages.encode(ev.Report(job=KEY, node="b", event=make(1, 9)))
    nine = msgspec.msgpack.encode(9)
    assert raw.count(nine) >= 1
    forged = [raw[:at] + b"\x01" + raw[at + 1 :] for at in range(len(raw)) if raw[at : at + 1] == nine]
    refused = 0
    for one in forged:
        try:
            node_messages.decode(one)
        except ProtocolError as error:
            refused += "rank 1 of 1" in str(error)
    assert refused == 1


def test_a_node_that_has_the_save_with_another_world_size_is_named_and_counts_for_nothing(job):
    job.stage(ONE, [0])
    coordinator = job.nodes["a"]
    job.say(coordinator, ev.Report(job=KEY, node="b", event=staged(1, 3)))
    job.settle()
    record = coordinator.job.coordinator.facts.records[ONE]
    assert not record.staged
    assert 1 not in record.held
    assert job.milestones(0, ONE) == ["failed"]
    assert any("save of 2 ranks, and node b has it as one of 3" in note for note in coordinator.notes)
    job.say(coordinator, ev.Report(job=KEY, node="b", event=held(1, 3)))
    job.settle()
    assert 1 not in record.held


@pytest.mark.parametrize(("world", "why"), [(1, "is of rank 1, and says"), (3, "rank 0 says")])
def test_a_rank_whose_slot_has_another_world_size_is_refused(world, why):
    job = ACluster("a")
    job.connect("aa")
    job.stage(ONE, [0])
    node = job.node(1)
    slot = next(s.name for s in node.job.node.slots.of_rank(1) if s.granted)
    request = job.seq()
    handed = ev.SegmentStaged(
        job=KEY, rank=1, session=job.sid, request=request, world_size=world, slot=slot, save=ONE, nbytes=10
    )
    job.say(node, handed)
    job.settle()
    answer = job.answer(1, request)
    assert isinstance(answer, Refused)
    assert why in answer.message


def test_a_slot_that_was_found_with_a_rank_beyond_its_job_is_no_segment(job):
    job.stage(ONE, [0])
    job.nodes["b"].slots["r00001-000009.slot"] = type(next(iter(job.nodes["b"].slots.values())))(1, 99, ONE, 1, False)
    job.nodes["b"].restart()
    assert not job.nodes["b"].job.node.slots.holding(ONE)
