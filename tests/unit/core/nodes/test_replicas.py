"""Saves of which replicas hold slices: a node lost, a coordinator that is new, and which segments a node gets."""

import os

import pytest
from msgspec.structs import replace

from ckptd.core import actions as act
from ckptd.core import events as ev
from ckptd.core.coordinator.save_record import Record
from ckptd.shared.base.ids import SaveId
from ckptd.shared.format.rank_members import members_of
from ckptd.shared.format.replica_attestations import Attestation
from ckptd.shared.format.schemes import Scheme
from ckptd.shared.protocol import node_messages
from ckptd.shared.protocol.messages import Tier
from tests.runs import RUN
from tests.seals import attestations_in
from tests.unit.core.nodes.a_cluster import KEY, ONE, ACluster


def cluster(names="abcd"):
    made = ACluster(names)
    made.replicas = 1
    made.connect("abc")
    return made


def test_a_coordinator_that_takes_over_after_a_loss_finds_the_save_whole_and_drains_it():
    job = cluster()
    job.held = {act.Drain}
    job.stage(ONE)
    job.end_ranks()
    job.lose("a")
    job.connect("dbc")
    answers = job.load()
    assert {answer.save for answer in answers} == {ONE}
    assert not job.nodes["d"].job.coordinator.facts.records[ONE].mismatched
    job.waiting = [(node, action) for node, action in job.waiting if node.name in job.nodes]
    job.release()
    record = job.nodes["d"].job.coordinator.facts.records[ONE]
    assert not record.mismatched
    assert ONE in job.store.committed


def report(job, orders, problem=""):
    """All ranks report on what they were sent to; the answers."""
    seqs = {rank: job.seq() for rank in orders}
    for rank, order in orders.items():
        event = ev.LoadReported(
            job=KEY, rank=rank, session=job.sid, request=seqs[rank], save=order.save, tier=order.tier, problem=problem
        )
        job.say(job.node(rank), event)
    job.settle()
    return {rank: job.answer(rank, seq) for rank, seq in seqs.items()}


def held(job):
    return [len(node.job.node.slots.holding(ONE)) for node in job.nodes.values()]


def messages_of(job):
    """The messages between nodes from here on, with the node that sends each."""
    seen = []
    perform = job.perform

    def watched(node, action):
        if isinstance(action, act.ToNode):
            seen.append((node.name, action.message))
        perform(node, action)

    job.perform = watched
    return seen


def test_replicas_get_each_others_segments_and_keep_them_for_the_load_alone():
    job = cluster("abc")
    job.stage(ONE)
    job.end_ranks()
    job.connect("abc")
    seqs = job.ask()
    orders = {rank: job.answer(rank, seq) for rank, seq in seqs.items()}
    assert {(order.save, order.whole, order.tier) for order in orders.values()} == {(ONE, True, Tier.PEER)}
    assert held(job) == [3, 3, 3]
    assert all(answer.agreed for answer in report(job, orders).values())
    assert held(job) == [1, 1, 1]


def test_what_was_copied_for_a_load_is_restored_when_its_own_node_is_lost_in_it():
    job = ACluster("abc", scheme=Scheme.NONE)
    job.replicas = 1
    job.held = {act.Drain}
    job.connect("abc")
    job.stage(ONE)
    job.end_ranks()
    job.connect("abc")
    job.ask()
    assert held(job) == [3, 3, 3]
    job.lose("c")
    job.end_ranks()
    job.add("d")
    job.connect("abd")
    assert {answer.save for answer in job.load()} == {ONE}
    assert held(job) == [1, 1, 1]
    where = job.nodes["a"].job.coordinator.facts.records[ONE].held
    assert where == {0: {"a"}, 1: {"b"}, 2: {"d"}}


def failed_load():
    job = cluster("abc")
    job.stage(ONE)
    job.end_ranks()
    job.connect("abc")
    job.ask()
    assert held(job) == [3, 3, 3]
    job.say(job.nodes["b"], ev.RankGone(job=KEY, rank=1, session=job.sid))
    job.settle()
    assert held(job) == [3, 3, 3]
    job.end_ranks()
    job.connect("abc")
    return job


def test_what_was_copied_for_a_load_that_failed_stays_until_the_next_one_is_agreed():
    job = failed_load()
    seen = messages_of(job)
    assert {answer.save for answer in job.load()} == {ONE}
    assert not [message for _, message in seen if isinstance(message, ev.SealAsked)], "it was there already"
    assert held(job) == [1, 1, 1]


def test_what_was_copied_for_a_load_that_failed_goes_when_something_newer_is_staged():
    job = failed_load()
    job.stage(SaveId(job.nodes["a"].job.node.incarnation, 1, 20, RUN))
    assert held(job) == [0, 0, 0]


def test_what_was_copied_for_a_load_that_failed_goes_where_memory_is_short():
    job = failed_load()
    failed = ev.SlotsFailed(job=KEY, rank=0, count=1, code="budget", message="full", hint="")
    job.say(job.nodes["a"], failed)
    job.settle()
    assert held(job) == [1, 3, 3]


@pytest.mark.seconds
@pytest.mark.parametrize("sets", [1, 3] if os.environ.get("FAULTS") == "long" else [3])
def test_replicas_restore_from_memory_at_any_number_of_nodes(sets):
    """66 nodes, above what was the limit: one order for all, one report of each, no order for a segment."""
    names = [f"n{number:03d}" for number in range(66)]
    job = ACluster(names, scheme=Scheme.NONE)
    job.held = {act.Drain}
    job.replicas = sets
    job.connect(names)
    job.stage(ONE)
    job.end_ranks()
    job.connect(names)
    seen = messages_of(job)
    orders = {rank: job.answer(rank, seq) for rank, seq in job.ask().items()}
    assert {(order.save, order.whole, order.tier) for order in orders.values()} == {(ONE, True, Tier.PEER)}
    assert set(held(job)) == {66 // sets}
    gathers = [message for _, message in seen if isinstance(message, ev.GatherOrdered)]
    assert len(gathers) == 65  # and its own
    assert len(set(gathers)) == 1
    assert len(node_messages.encode(gathers[0])) < 200
    assert not [message for _, message in seen if isinstance(message, ev.FetchOrdered)]
    reports = [message.event for _, message in seen if isinstance(message, ev.Report)]
    gathered = [event for event in reports if isinstance(event, ev.SegmentsGathered)]
    assert len(gathered) == 65
    assert {event.copied for event in gathered} == {66 // sets - 1}
    assert not [event for event in reports if isinstance(event, ev.SegmentFetched | ev.SegmentsReleased)]
    assert all(answer.agreed for answer in report(job, orders).values())
    assert not [
        event
        for _, m in seen
        if isinstance(m, ev.Report)
        for event in [m.event]
        if isinstance(event, ev.SegmentsReleased)
    ]
    assert set(held(job)) == {1}


def ranks_at(job, names):
    return {name: {slot.rank for slot in job.nodes[name].job.node.slots.holding(ONE)} for name in names}


STAGES = ((0, 1, 4), (2, 3), (5, 7), (4, 7))  # uneven; one node has two of a set, ranks 4 and 7 are in two, 6 in none


def stages(homes):
    job = ACluster("abcdef", scheme=Scheme.XOR)
    job.sets = STAGES
    job.held = {act.Drain}
    job.connect(homes)
    job.stage(ONE)
    assert not job.nodes["a"].job.coordinator.facts.records[ONE].mismatched
    job.end_ranks()
    return job


def test_a_node_gets_the_segments_of_its_ranks_own_sets_alone():
    job = stages("aabbcdde")
    job.connect("aabbcdde")
    orders = {rank: job.answer(rank, seq) for rank, seq in job.ask().items()}
    assert {(order.save, order.whole) for order in orders.values()} == {(ONE, True)}
    assert [orders[rank].tier for rank in (0, 2, 4)] == [Tier.PEER, Tier.ARENA, Tier.PEER]
    assert ranks_at(job, "abcde") == {"a": {0, 1, 4}, "b": {2, 3}, "c": {0, 1, 4, 7}, "d": {5, 6, 7}, "e": {4, 5, 7}}
    assert all(answer.agreed for answer in report(job, orders).values())


def test_ranks_that_moved_bring_the_names_of_their_sets_along():
    """The seal of a rank's segment comes to its new node before the others of its sets."""
    job = stages("aabbcdde")
    job.lose("e")
    job.connect("aabbcddf")
    orders = {rank: job.answer(rank, seq) for rank, seq in job.ask().items()}
    assert {(order.save, order.whole) for order in orders.values()} == {(ONE, True)}
    assert orders[7].tier is Tier.REBUILT
    assert ranks_at(job, "acdf") == {"a": {0, 1, 4}, "c": {0, 1, 4, 7}, "d": {5, 6, 7}, "f": {4, 5, 7}}


def test_a_rank_that_is_in_no_set_of_its_words_ends_the_save():
    job = ACluster("abc", scheme=Scheme.NONE)
    job.connect("abc")
    job.sets = ((0, 1),)
    job.attestations = lambda _world, rank: attestations_in(((0, 1),), min(rank, 1))
    job.stage(ONE)
    record = job.nodes["a"].job.coordinator.facts.records[ONE]
    assert record.mismatched
    assert record.reason == "rank 2 saved a slice of what it does not hold with the others"


def test_a_node_that_was_replaced_gets_its_own_segment_first():
    job = ACluster("abcde", scheme=Scheme.NONE)
    job.replicas = 1
    job.connect("abcd")
    job.held = {act.Drain}
    job.stage(ONE)
    job.end_ranks()
    job.connect("abed")  # rank 2 runs on another node, and c answers
    orders = {rank: job.answer(rank, seq) for rank, seq in job.ask().items()}
    assert {(order.save, order.whole, order.tier) for order in orders.values()} == {(ONE, True, Tier.PEER)}
    assert all(answer.agreed for answer in report(job, orders).values())
    assert [len(job.nodes[name].job.node.slots.holding(ONE)) for name in "abed"] == [1, 1, 1, 1]


def test_a_link_that_came_back_is_given_the_order_again():
    job = cluster("abc")
    job.stage(ONE)
    job.end_ranks()
    job.connect("abc")
    job.held = {act.FetchSegment}
    seqs = job.ask()
    job.waiting = [(node, action) for node, action in job.waiting if node.name != "b"]  # lost with its daemon
    job.nodes["b"].restart()
    job.settle()
    job.return_ranks("b", 2)
    seqs[1] = job.seq()
    job.say(job.nodes["b"], ev.LoadAsked(job=KEY, rank=1, session=job.sid, request=seqs[1]))
    job.settle()
    job.release()
    orders = {rank: job.answer(rank, seq) for rank, seq in seqs.items()}
    assert {(order.save, order.whole) for order in orders.values()} == {(ONE, True)}, orders


def test_what_does_not_come_in_time_is_read_from_the_store():
    job = cluster("abc")
    job.stage(ONE)
    assert ONE in job.store.committed
    job.end_ranks()
    job.connect("abc")
    job.held = {act.FetchSegment}
    seqs = job.ask()
    job.tick(3601)
    orders = {rank: job.answer(rank, seq) for rank, seq in seqs.items()}
    assert {(order.save, order.tier) for order in orders.values()} == {(ONE, Tier.PFS)}


def test_ranks_for_which_the_segments_of_their_replicas_are_not_enough_get_all():
    """Each of them was sharded and is replicated now, or the other way round."""
    job = ACluster("abcd", scheme=Scheme.NONE)
    job.replicas = 2
    job.connect("abcd")
    job.held = {act.Drain}
    job.stage(ONE)
    job.end_ranks()
    job.connect("badc")
    seqs = {rank: job.seq() for rank in range(4)}
    for rank in range(4):
        job.say(job.node(rank), ev.LoadAsked(job=KEY, rank=rank, session=job.sid, request=seqs[rank]))
    held = []
    for _ in range(2):
        job.settle()
        orders = [job.answer(rank, seqs[rank]) for rank in range(4)]
        assert all((order.save, order.tier) == (ONE, Tier.PEER) for order in orders), orders
        assert all((order.whole, order.saved_by) == ((False, 4) if held else (True, 0)) for order in orders), orders
        held.append([len(job.nodes[name].job.node.slots.holding(ONE)) for name in "abcd"])
        for rank, order in enumerate(orders):
            seqs[rank] = job.seq()
            report = ev.LoadReported(
                job=KEY, rank=rank, session=job.sid, request=seqs[rank], save=ONE, tier=order.tier,
                problem="others' are needed" if len(held) == 1 else "", reshape=len(held) == 1,
            )  # fmt: skip
            job.say(job.node(rank), report)
    job.settle()
    assert held == [[3] * 4] * 2  # its own that has moved, and two; what else it needs is pulled
    assert all(job.answer(rank, seqs[rank]).agreed for rank in range(4))


def test_what_cannot_be_copied_is_rebuilt():
    """A holder that the nodes that need it do not reach."""
    job = cluster("abc")
    job.held = {act.Drain}
    job.stage(ONE)
    job.end_ranks()
    job.connect("abc")
    job.held = {act.FetchSegment}
    seqs = {rank: job.seq() for rank in range(3)}
    for rank in range(3):
        job.say(job.node(rank), ev.LoadAsked(job=KEY, rank=rank, session=job.sid, request=seqs[rank]))
    job.settle()
    copies = [(node, fetch) for node, fetch in job.waiting if isinstance(fetch, act.FetchSegment) and fetch.rank == 2]
    assert {fetch.tier for _, fetch in copies} == {Tier.PEER}
    for node, fetch in copies:
        job.waiting.remove((node, fetch))
        job.say(node, ev.SegmentFetched(job=KEY, rank=2, save=ONE, tier=fetch.tier, problem="c does not answer"))
    job.settle()
    job.release()
    orders = [job.answer(rank, seqs[rank]) for rank in range(3)]
    assert [(order.save, order.tier) for order in orders] == [(ONE, Tier.REBUILT)] * 2 + [(ONE, Tier.PEER)], orders


def test_who_saved_all_of_its_own_needs_none():
    said = Attestation(members_of((0, 1)), b"c" * 8, b"w" * 8)
    record = Record(ONE, 2, 0.0, attestations=dict.fromkeys((0, 1), (said,)))
    record.attestations = dict.fromkeys((0, 1), (replace(said, only_told=True),))
    assert not record.shared
