"""Saves of which replicas hold slices: a node lost, a coordinator that is new, and which segments a node gets."""

from msgspec.structs import replace

from ckptd.core import actions as act
from ckptd.core import events as ev
from ckptd.core.coordinator.save_record import Record
from ckptd.shared.format.replica_attestations import Attestation
from ckptd.shared.format.schemes import Scheme
from ckptd.shared.protocol.messages import Tier
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


def test_replicas_get_each_others_segments_and_no_more():
    job = cluster()
    job.stage(ONE)
    job.end_ranks()
    job.connect("abc")
    answers = job.load()
    assert {answer.save for answer in answers} == {ONE}
    for name in "abc":
        assert len(job.nodes[name].job.node.slots.holding(ONE)) == 3


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
        assert all((order.save, order.whole, order.tier) == (ONE, True, Tier.PEER) for order in orders), orders
        held.append([len(job.nodes[name].job.node.slots.holding(ONE)) for name in "abcd"])
        for rank, order in enumerate(orders):
            seqs[rank] = job.seq()
            report = ev.LoadReported(
                job=KEY, rank=rank, session=job.sid, request=seqs[rank], save=ONE, tier=order.tier,
                problem="others' are needed" if len(held) == 1 else "", reshape=len(held) == 1,
            )  # fmt: skip
            job.say(job.node(rank), report)
    job.settle()
    assert held == [[3] * 4, [4] * 4]  # its own that has moved, and two; all
    assert all(job.answer(rank, seqs[rank]).agreed for rank in range(4))


def test_what_cannot_be_copied_is_rebuilt():
    """A holder that died a moment ago, of which nobody has heard."""
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
    assert [(order.save, order.tier) for order in orders[:2]] == [(ONE, Tier.REBUILT)] * 2, orders


def test_needed_are_the_own_segments_and_those_of_who_shared():
    record = cluster_record({0: (b"x" * 8,), 1: (b"y" * 8,), 2: (b"x" * 8,), 3: (b"y" * 8,), 4: ()})
    assert record.needed_for([0]) == [0, 2]
    assert record.needed_for([1, 4]) == [1, 3, 4]
    assert record.needed_for([4]) == [4]


def test_who_saved_all_of_its_own_needs_none():
    record = cluster_record({0: (b"x" * 8,), 1: (b"x" * 8,)})
    record.attestations = {
        r: tuple(replace(attestation, only_told=True) for attestation in said)
        for r, said in record.attestations.items()
    }
    assert record.needed_for([0]) == [0]
    assert not record.shared
    assert not record.shared_by_all


def cluster_record(sets):

    record = Record(ONE, len(sets), 0.0)
    record.attestations = {r: tuple(Attestation(s, 2, b"c" * 8, b"w" * 8) for s in said) for r, said in sets.items()}
    return record
