"""What the daemons of a job do together: protect, drain, lose a node, come back elsewhere."""

import pytest

from ckptd.core import actions as act
from ckptd.core import events as ev
from ckptd.shared.base.ids import SaveId
from ckptd.shared.format.schemes import Scheme
from ckptd.shared.protocol.messages import Tier
from ckptd.shared.protocol.segments import Wanted
from tests.runs import RUN
from tests.unit.core.nodes.a_cluster import (
    KEY,
    ONE,
    THREE,
    TWO,
    ACluster,
    a_protected_job,
    refused,
    saves_at,
)


def test_a_save_is_staged_then_protected_then_durable_on_all_ranks():
    cluster = ACluster()
    cluster.connect("aabbccdd")
    cluster.stage(ONE)
    for rank in range(8):
        told = cluster.milestones(rank, ONE)
        assert told[0] == "staged"
        assert sorted(told) == ["durable", "durable", "protected", "staged"]  # durable: the milestone and the end
    assert cluster.store.committed == {ONE: 8}
    assert {name: sorted(node.chunks) for name, node in cluster.nodes.items()} == {name: [(ONE, 1)] for name in "abcd"}


@pytest.mark.parametrize("lost", "abcd")
def test_a_lost_node_is_rebuilt_on_the_one_that_replaces_it(lost):
    cluster = a_protected_job()
    assert "protected" in cluster.milestones(0, ONE)
    cluster.end_ranks()
    cluster.lose(lost)
    cluster.add("x")
    cluster.connect("abcd".replace(lost, "x"))
    answers = cluster.load()
    assert not refused(answers)
    assert [a.save for a in answers] == [ONE] * 4
    rank = "abcd".index(lost)
    assert cluster.tiers == {r: Tier.REBUILT if r == rank else Tier.ARENA for r in range(4)}
    assert {len(node.chunks) for node in cluster.nodes.values()} == {1}, "the sets are encoded anew"
    assert {key[1] for node in cluster.nodes.values() for key in node.chunks} == {2}


def test_ranks_in_another_order_read_from_peers():
    cluster = a_protected_job()
    cluster.end_ranks()
    cluster.connect("bcda")
    assert [a.save for a in cluster.load()] == [ONE] * 4
    assert set(cluster.tiers.values()) == {Tier.PEER}


def test_two_lost_nodes_are_rebuilt_under_double_only():
    for scheme in (Scheme.DOUBLE, Scheme.XOR):
        cluster = a_protected_job(scheme=scheme)
        cluster.end_ranks()
        cluster.lose("b")
        cluster.lose("c")
        cluster.add("x")
        cluster.add("y")
        cluster.connect("axyd")
        answers = cluster.load()
        if scheme is Scheme.DOUBLE:
            assert [a.save for a in answers] == [ONE] * 4
            assert cluster.tiers[1] == cluster.tiers[2] == Tier.REBUILT
        else:
            assert all(getattr(a, "save", None) is None for a in answers)
            (why,) = set(refused(answers))
            assert "ranks 1-2 " in why


def test_the_newest_protected_stays_until_a_newer_one_is_protected():
    cluster = a_protected_job()
    cluster.held |= {act.Encode}
    cluster.stage(TWO)
    assert "staged" in cluster.milestones(0, TWO)
    for node in cluster.nodes.values():
        assert {s.save for s in node.slots.values()} == {ONE, TWO, None}
    cluster.release()
    for node in cluster.nodes.values():
        assert {s.save for s in node.slots.values()} == {TWO, None}
        assert [key[0] for key in node.chunks] == [TWO]


def copies(cluster, save):
    """How many slots of the job hold a segment of it, by rank."""
    slots = [slot for node in cluster.nodes.values() for slot in node.slots.values() if slot.save == save]
    return {rank: sum(slot.rank == rank for slot in slots) for rank in sorted({slot.rank for slot in slots})}


def a_smaller_world(**policy):
    """Four ranks saved it; one of their nodes is lost, and three ranks run on the others."""
    cluster = a_protected_job(**policy)
    cluster.end_ranks()
    cluster.lose("c")
    return cluster


def test_a_smaller_world_pulls_what_it_needs_from_where_it_lies():
    cluster = a_smaller_world()
    cluster.connect("abd")
    answers = cluster.load()
    assert [a.save for a in answers] == [ONE] * 3
    assert set(cluster.tiers.values()) == {Tier.REBUILT}
    assert not cluster.store.committed
    assert copies(cluster, ONE) == {0: 1, 1: 1, 2: 1, 3: 1}, "what was lost is rebuilt once, and nothing is copied"
    for rank, name in enumerate("abd"):
        own = {slot.rank for slot in cluster.nodes[name].slots.values() if slot.save == ONE}
        files = cluster.here[rank]
        assert {old for old, file in files.items() if file.endswith(".slot")} == own
        assert {old for old, file in files.items() if file.endswith(".part")} == {0, 1, 2, 3} - own
        assert set(cluster.nodes[name].pulled) == {(ONE, old) for old in {0, 1, 2, 3} - own}
    cluster.drop(ONE)
    assert not any(node.pulled for node in cluster.nodes.values())
    cluster.stage(SaveId(3, 1, 20, RUN))
    for node in cluster.nodes.values():
        assert {s.save for s in node.slots.values()} <= {SaveId(3, 1, 20, RUN), None}


def test_ranks_of_one_node_share_what_is_pulled_until_the_last_has_read_it():
    cluster = a_smaller_world()
    cluster.connect("aab")
    cluster.load()
    node, session = cluster.nodes["a"], cluster.sid
    assert (ONE, 1) in node.pulled
    dropped = ev.SegmentsDropped(job=KEY, rank=0, session=session, request=cluster.seq(), save=ONE)
    cluster.say(node, dropped)
    cluster.settle()
    assert (ONE, 1) in node.pulled, "rank 1 reads"
    cluster.say(node, ev.RankGone(job=KEY, rank=1, session=session))
    cluster.settle()
    assert not node.pulled


def test_what_is_damaged_at_the_node_that_has_it_is_rebuilt_from_parity():
    cluster = a_protected_job()
    cluster.end_ranks()
    cluster.damaged = {("b", 1)}
    cluster.connect("abc")
    answers = cluster.load()
    assert [a.save for a in answers] == [ONE] * 3
    assert set(cluster.tiers.values()) == {Tier.REBUILT}
    assert any("rank 1" in note or "does not match" in note for note in answers[0].notes), answers[0].notes


def test_what_is_damaged_and_cannot_be_rebuilt_is_not_loaded_from_memory():
    cluster = a_protected_job(scheme=Scheme.NONE)
    cluster.end_ranks()
    cluster.damaged = {("b", 1)}
    cluster.fail()
    cluster.connect("abc")
    cluster.load()
    assert set(cluster.tiers.values()) == {Tier.PEER, Tier.PFS} or set(cluster.tiers.values()) == {Tier.PFS}


def test_a_node_that_is_lost_while_ranks_pull_from_it_is_one_whose_segments_lack():
    cluster = a_protected_job()
    cluster.end_ranks()
    cluster.connect("abc")
    cluster.held = {act.PullSegments}
    seqs = cluster.ask()
    orders = {rank: cluster.answer(rank, seq) for rank, seq in seqs.items()}
    assert all(order.saved_by == 4 for order in orders.values())
    asked = {}
    for rank, order in orders.items():
        asked[rank] = cluster.seq()
        wanted = (Wanted(3),)
        cluster.say(cluster.node(rank), ev.SegmentsWanted(
            job=KEY, rank=rank, session=cluster.sid, request=asked[rank], save=order.save, wanted=wanted
        ))  # fmt: skip
    cluster.settle()
    cluster.lose("d")
    cluster.release()
    for rank, seq in asked.items():
        (lacks,) = cluster.answer(rank, seq).lacks
        assert lacks.rank == 3


def test_a_rank_that_waits_for_seals_gets_an_answer_when_the_load_is_refused():
    """It waits without a deadline: another rank's error ends the load meanwhile."""
    cluster = a_protected_job()
    cluster.end_ranks()
    cluster.connect("abc")
    seqs = cluster.ask()
    assert all(cluster.answer(rank, seq).saved_by == 4 for rank, seq in seqs.items())
    cluster.cut_off("d")
    seq = cluster.seq()
    wanted = ev.SegmentsWanted(job=KEY, rank=0, session=cluster.sid, request=seq, save=ONE, wanted=(Wanted(3),))
    cluster.say(cluster.nodes["a"], wanted)
    cluster.settle()
    assert cluster.answer(0, seq) is None
    cluster.say(cluster.nodes["a"], ev.LoadRefused(job=KEY, node="a", code="mismatch", message="another shape"))
    cluster.settle()
    assert cluster.answer(0, seq).refused


def test_a_rank_that_asks_for_segments_of_no_load_is_refused():
    cluster = a_protected_job()
    seq = cluster.seq()
    wanted = ev.SegmentsWanted(job=KEY, rank=0, session=cluster.sid, request=seq, save=ONE, wanted=(Wanted(1),))
    cluster.say(cluster.nodes["a"], wanted)
    cluster.settle()
    assert "is not being loaded here" in cluster.answer(0, seq).refused


def test_a_smaller_world_without_room_to_pull_has_it_drained_and_reads_the_store():
    cluster = a_smaller_world()
    cluster.fail()
    cluster.full = True
    cluster.connect("abd")
    answers = cluster.load()
    assert not refused(answers)
    assert [a.save for a in answers] == [ONE] * 3
    assert set(cluster.tiers.values()) == {Tier.PFS}
    assert cluster.store.committed == {ONE: 4}


def test_a_damaged_segment_is_rebuilt_where_it_lies():
    cluster = a_protected_job()
    cluster.end_ranks()
    cluster.connect("abcd")
    answers = cluster.load(damaged={(2, Tier.ARENA)})
    assert [a.save for a in answers] == [ONE] * 4
    assert cluster.tiers[2] is Tier.REBUILT
    assert len([s for s in cluster.nodes["c"].slots.values() if s.save == ONE]) == 1, "the damaged copy is free"


def test_a_cut_link_delays_protection_and_a_newer_save_takes_its_turn():
    cluster = ACluster()
    cluster.connect("abcd")
    cluster.cut_off("d")
    cluster.stage(ONE, [0, 1, 2, 3])
    assert cluster.milestones(0, ONE) == [], "d's rank is not heard of"
    cluster.heal("d")
    assert "protected" in cluster.milestones(0, ONE)


def test_what_a_rank_delivered_before_it_ended_counts_though_its_node_was_cut_off():
    cluster = a_protected_job()
    cluster.cut_off("d")
    cluster.stage(TWO)
    cluster.say(cluster.nodes["d"], ev.RankGone(job=KEY, rank=3, session=cluster.sid))
    cluster.settle()
    cluster.heal("d")
    assert "staged" in cluster.milestones(0, TWO)
    assert "abandoned" not in cluster.milestones(0, TWO)


def test_an_encode_that_fails_is_tried_again():
    cluster = ACluster()
    cluster.connect("abcd")
    cluster.failing = {"c"}
    cluster.stage(ONE)
    assert "protected" not in cluster.milestones(0, ONE)
    cluster.failing = set()
    cluster.tick(5)
    assert "protected" in cluster.milestones(0, ONE)


def test_an_encode_that_cannot_end_gives_way_to_a_newer_save():
    cluster = ACluster()
    cluster.connect("abcd")
    cluster.failing = {"c"}
    cluster.stage(ONE)
    cluster.failing = set()
    cluster.stage(TWO)
    assert "protected" in cluster.milestones(0, TWO)
    for node in cluster.nodes.values():
        assert {s.save for s in node.slots.values()} == {TWO, None}


def test_a_drain_waits_for_a_node_that_does_not_answer():
    cluster = ACluster()
    cluster.connect("abcd")
    cluster.held = {act.Drain}
    cluster.stage(ONE)
    cluster.cut_off("d")
    cluster.release()
    assert not cluster.store.committed
    cluster.heal("d")
    cluster.tick(2)
    assert cluster.store.committed == {ONE: 4}


def test_a_lone_node_receives_nothing_of_protection():
    cluster = ACluster("a")
    cluster.connect("aa")
    cluster.stage(ONE)
    assert set(cluster.milestones(0, ONE)) == {"staged", "durable"}


def test_without_a_scheme_nothing_is_encoded():
    cluster = ACluster(scheme=Scheme.NONE)
    cluster.connect("abcd")
    cluster.stage(ONE)
    assert set(cluster.milestones(0, ONE)) == {"staged", "durable"}
    assert not any(node.chunks for node in cluster.nodes.values())


def test_ranks_of_an_old_session_keep_a_new_one_out_wherever_they_live():
    cluster = a_protected_job()
    old = cluster.homes
    cluster.connect("abc", expect=False)
    assert cluster.refusals == []
    cluster.tick(31)
    assert len(cluster.refusals) == 3
    assert "rank 3" in cluster.refusals[0]
    assert old == list("abcd")


def test_a_refusal_names_what_is_missing_of_the_newest():
    cluster = a_protected_job()
    cluster.end_ranks()
    cluster.lose("b")
    cluster.lose("c")
    cluster.add("x")
    cluster.add("y")
    cluster.connect("axyd")
    (why, *_) = refused(cluster.load())
    assert f"{ONE}: no node that answers has what ranks 1-2 saved in its memory" in why
    assert "xor makes good for one node of a set" in why


def test_an_encode_that_keeps_failing_leaves_a_slot_for_the_next_save():
    cluster = a_protected_job()
    cluster.held, cluster.failing = set(), {"c"}
    cluster.release()
    cluster.stage(TWO)
    cluster.stage(THREE)
    for name in "abcd":
        assert saves_at(cluster, name) == {ONE, THREE}
    assert "protected" not in cluster.milestones(0, TWO)


def test_a_drain_ends_that_was_tried_again_on_a_node_that_has_lost_its_memory():
    cluster = ACluster()
    cluster.connect("abcd")
    cluster.stage(ONE)
    cluster.held = {act.Drain, act.Encode}
    cluster.stage(TWO)
    cluster.lose("b")
    cluster.end_ranks()
    cluster.waiting = [(n, a) for n, a in cluster.waiting if n.name != "b" and isinstance(a, act.Drain)]
    cluster.held = {act.TakeIncarnation}
    cluster.add("b")
    cluster.connect("abcd", expect=False)
    cluster.tick(2)  # the new daemon of b is asked for its part, of a job that it has not heard of
    cluster.release()
    cluster.ask_slots()
    answers = cluster.load()
    assert [a.save for a in answers] == [ONE] * 4
    three = SaveId(answers[0].incarnation, 1, 20, RUN)
    cluster.stage(three)
    cluster.tick(10)
    assert cluster.store.committed.keys() == {ONE, three}


def test_a_rank_found_before_its_session_was_known_keeps_none_out_once_it_has_ended():
    cluster = ACluster()
    for rank, name in enumerate("abcd"):  # a daemon sees the process before it hears of a topology
        found = ev.RankFound(job=KEY, rank=rank, session="s1", pid=1, host=name)
        cluster.say(cluster.nodes[name], found)
    cluster.connect("abcd")
    cluster.stage(ONE)
    cluster.end_ranks()
    cluster.connect("badc")
    cluster.tick(31)
    assert cluster.refusals == []
    assert [a.save for a in cluster.load()] == [ONE] * 4


def test_a_lost_segment_is_rebuilt_on_a_node_whose_own_parity_is_of_another_set():
    cluster = ACluster("abcd", set_size=2)
    cluster.connect("abcd")
    cluster.held = {act.Drain}
    cluster.stage(ONE)
    sets = {node.chunks[ONE, 1].columns for node in cluster.nodes.values()}
    (pair,) = [{column.node for column in columns} for columns in sets if "b" not in {c.node for c in columns}]
    assert len(sets) == 2
    cluster.end_ranks()
    cluster.lose("b")
    other = min(pair - {"a"})
    cluster.connect("acd".replace(other, f"{other}{other}"))  # rank 1, which ran on b, runs on a node of the other set
    answers = cluster.load()
    assert not refused(answers)


def test_a_load_ends_when_the_node_of_some_ranks_is_lost():
    cluster = a_protected_job()
    cluster.end_ranks()
    cluster.connect("abcd")
    seqs = {rank: cluster.seq() for rank in (0, 1, 2)}
    for rank, seq in seqs.items():
        asked = ev.LoadAsked(job=KEY, rank=rank, session=cluster.sid, request=seq)
        cluster.say(cluster.node(rank), asked)
    cluster.settle()
    cluster.lose("d")
    assert all("node d does not answer" in cluster.answer(rank, seq).message for rank, seq in seqs.items())
