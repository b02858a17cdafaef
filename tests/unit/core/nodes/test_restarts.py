"""What a daemon that restarts, or a node that is lost or cannot be reached, must not make the others forget."""

import pytest
from msgspec.structs import replace

from ckptd.core import actions as act
from ckptd.core import events as ev
from ckptd.core.links import Links
from ckptd.core.node.parity import Protection
from ckptd.core.node.slot_retention import SlotRetention
from ckptd.core.node.standing import Standing
from ckptd.core.placement import Placement
from ckptd.shared.base.ids import SaveId
from ckptd.shared.format.schemes import Scheme
from ckptd.shared.protocol.messages import Attached, End, LoadFrom, Refused, Tier
from ckptd.shared.protocol.topology import Peer, Topology
from tests.runs import RUN, STORE_ID
from tests.unit.core.nodes.a_cluster import (
    KEY,
    ONE,
    TWO,
    ACluster,
    a_protected_job,
    close,
    saves_at,
)


def ask_load(cluster: ACluster) -> dict[int, int]:
    """All ranks; the request of each."""
    seqs = {rank: cluster.seq() for rank in range(len(cluster.homes))}
    for rank, seq in seqs.items():
        cluster.say(cluster.node(rank), ev.LoadAsked(job=KEY, rank=rank, session=cluster.sid, request=seq))
    cluster.settle()
    return seqs


def report(cluster: ACluster, rank: int, order: LoadFrom) -> int:
    """The rank has read what it was told to; the request."""
    seq = cluster.seq()
    words = {"session": cluster.sid, "request": seq, "save": order.save, "tier": order.tier}
    cluster.say(cluster.node(rank), ev.LoadReported(job=KEY, rank=rank, **words))
    cluster.settle()
    return seq


def in_the_end_of_a_load(homes: str) -> tuple[ACluster, dict[int, LoadFrom], dict[int, int]]:
    """All ranks but 0 have reported; what each was told to read, and its last request."""
    cluster = ACluster("abc")
    cluster.connect(homes)
    cluster.stage(ONE)
    cluster.end_ranks()
    cluster.connect(homes)
    orders = {rank: cluster.answer(rank, seq) for rank, seq in ask_load(cluster).items()}
    return cluster, orders, {rank: report(cluster, rank, orders[rank]) for rank in sorted(orders, reverse=True) if rank}


# --- loads that a node missed the end of


@pytest.mark.parametrize("first", "bc")
def test_a_rank_that_missed_the_end_of_a_load_receives_it_from_a_restarted_coordinator(first):
    cluster, orders, seqs = in_the_end_of_a_load("abc")
    for pair in (frozenset("ab"), frozenset("bc")):
        cluster.links.discard(pair)
        cluster.cut.add(pair)
    report(cluster, 0, orders[0])
    assert cluster.answer(2, seqs[2]).agreed
    cluster.cut = {frozenset("a" + ("c" if first == "b" else "b"))}
    cluster.nodes["a"].restart()
    cluster.settle()
    cluster.cut = set()
    cluster.settle()
    cluster.return_ranks("a", 3)
    assert cluster.answer(1, seqs[1]).agreed


@pytest.mark.parametrize("links_first", [True, False])
def test_ranks_whose_daemon_missed_the_end_of_a_load_come_back_to_the_next_one(links_first):
    cluster, orders, _ = in_the_end_of_a_load("aabb")
    cluster.links.clear()
    cluster.cut = {frozenset("ab")}
    seq = report(cluster, 0, orders[0])
    assert cluster.answer(0, seq).agreed
    node = cluster.nodes["b"]
    node.restart()
    for rank in (2, 3):
        if links_first:
            cluster.cut = set()
            cluster.settle()
        back = replace(cluster.attached[rank], request=cluster.seq(), incarnation=2, run=RUN)
        cluster.say(node, back)
        cluster.cut = set()
        cluster.settle()
        assert isinstance(cluster.answer(rank, back.request), Attached)


def test_the_end_of_a_load_that_found_nothing_is_reported_again():
    cluster = ACluster("ab")
    cluster.connect("ab")
    cluster.held = {act.ScanStore}
    seqs = ask_load(cluster)
    node, scan = cluster.waiting.pop()
    cluster.held = set()
    cluster.links.clear()
    cluster.say(node, ev.StoreScanned(job=KEY, store_id=STORE_ID, after=scan.after))
    cluster.settle()
    assert [cluster.answer(rank, seq).save for rank, seq in seqs.items()] == [None, None]


# --- what a coordinator forgets


@pytest.mark.parametrize("names", ["ab", "abc"])
def test_a_coordinator_that_restarts_before_its_topology_was_kept_protects_again(names):
    cluster = ACluster(names)
    cluster.connect(names)
    cluster.stage(ONE)
    cluster.end_ranks()
    kept = cluster.nodes["a"].kept
    cluster.connect(names)
    cluster.nodes["a"].kept = kept
    cluster.nodes["a"].restart()
    cluster.return_ranks("a", 2)
    save = SaveId(2, 1, 20, RUN)
    cluster.stage(save)
    assert "protected" in cluster.milestones(0, save)


@pytest.mark.parametrize("scheme", [Scheme.NONE, Scheme.XOR])
@pytest.mark.parametrize("homes", ["abca", "abab"])
def test_a_restarted_coordinator_knows_the_nodes_that_the_job_has_left(scheme, homes):
    cluster = ACluster("abcd", scheme=scheme)
    cluster.connect("abcd")
    cluster.stage(ONE)
    cluster.held = {act.Drain}
    cluster.stage(TWO)
    cluster.end_ranks()
    cluster.connect(homes)
    cluster.tick(5)
    cluster.waiting = [(node, action) for node, action in cluster.waiting if node.name != "a"]
    cluster.nodes["a"].restart()
    cluster.return_ranks("a", cluster.store.numbers)
    cluster.tick(1)
    assert {answer.save for answer in cluster.load()} == {TWO}


def test_who_has_said_what_it_has_before_the_session_was_known_again_is_not_waited_for():
    cluster = ACluster("ab")
    cluster.connect("ab")
    cluster.stage(ONE)
    cluster.nodes["a"].restart()
    cluster.return_ranks("a")
    for rank, name in enumerate(cluster.homes):
        left = ev.RankDetached(job=KEY, rank=rank, session=cluster.sid, request=cluster.seq())
        cluster.say(cluster.nodes[name], left)
    cluster.settle()
    cluster.tick(1)
    assert not any(node.slots for node in cluster.nodes.values())


def test_what_was_ordered_to_be_encoded_before_it_was_known_to_be_lost_holds_no_slot():
    peers = tuple(Peer(name, name, "", name * 40) for name in "ab")
    protection = Protection(KEY, "a", Links("a"))
    topology = Topology(peers, (0, 1), Scheme.XOR, 8)
    protection.moved(Placement(topology).place("a"), 1)
    protection.order(ev.EncodeOrdered(job=KEY, node="a", save=TWO, epoch=1))
    assert protection.wanted == {TWO}
    protection.obsolete(ev.SavesObsolete(job=KEY, node="a", chunks=(), saves=(TWO,), newest=ONE))
    assert protection.wanted == set()


def test_a_node_that_restarts_with_its_parity_sealed_offers_its_column_to_who_still_waits():
    cluster = ACluster("abc")
    cluster.connect("abc")
    cluster.held = {act.Encode}
    cluster.stage(ONE)
    waiting, cluster.held, cluster.waiting = cluster.waiting, set(), []
    for node, action in waiting:
        if node.name == "b":
            cluster.perform(node, action)
    cluster.settle()
    for name in "bc":
        cluster.nodes[name].restart()
        cluster.return_ranks(name)
    cluster.tick(120)
    assert (ONE, 1) in cluster.nodes["c"].chunks


# --- nodes that are lost, or out of reach


def test_a_drain_that_is_ordered_again_is_not_written_beside_itself():
    cluster = ACluster("abc")
    cluster.connect("abc")
    cluster.held = {act.Drain}
    cluster.stage(ONE)
    cluster.cut_off("c")
    cluster.heal("c")
    cluster.tick(30)
    assert sorted(node.name for node, _ in cluster.waiting) == ["a", "b", "c"]
    cluster.release()
    assert ONE in cluster.store.committed


def test_a_holder_that_a_node_cannot_reach_costs_a_load_seconds():
    cluster = ACluster("abd")
    cluster.connect("abd")
    cluster.stage(ONE)
    cluster.end_ranks()
    cluster.add("x")
    cluster.cut = {frozenset("dx")}
    cluster.connect("abx")
    cluster.tick(5)
    seqs = ask_load(cluster)
    for _ in range(5):  # for the holder, then for what the rebuild may take from that node
        cluster.tick(5)
    orders = [cluster.answer(rank, seq) for rank, seq in seqs.items()]
    assert [order.tier for order in orders] == [Tier.ARENA, Tier.ARENA, Tier.REBUILT]


def test_members_that_do_not_reach_each_other_are_reported_at_once():
    cluster = ACluster("abc")
    cluster.connect("abc")
    pair = frozenset("bc")
    cluster.cut.add(pair)
    cluster.links.discard(pair)
    for one, other in ("bc", "cb"):
        cluster.say(cluster.nodes[one], ev.PeerDown(job=KEY, node=other))
    cluster.settle()
    cluster.stage(ONE)
    problems = cluster.nodes["a"].job.coordinator.parity.problems
    assert problems == {"b": "node c does not answer", "c": "node b does not answer"}


@pytest.mark.parametrize("durable", [True, False])
def test_what_the_job_went_on_from_leaves_a_slot_where_a_newer_save_and_the_store_have_its_place(durable):
    slot_retention = SlotRetention(Standing(KEY, 2))
    slot_retention.staged(ev.SaveStaged(job=KEY, node="a", save=TWO))
    slot_retention.loaded(ev.LoadOrdered(job=KEY, node="a", incarnation=2, save=ONE, agreed=True))
    if durable:
        slot_retention.ended(ev.SaveEnded(job=KEY, node="a", save=ONE, end=End.DURABLE))
    assert slot_retention.wanted == ({TWO} if durable else {ONE, TWO})


def test_what_is_kept_was_staged_though_that_word_was_lost():
    slot_retention = SlotRetention(Standing(KEY, 2))
    slot_retention.pending.add(TWO)
    slot_retention.ended(ev.SaveEnded(job=KEY, node="a", save=TWO, end=End.KEPT, reason="not due for a drain"))
    assert slot_retention.wanted == {TWO}


def test_what_an_older_life_staged_and_too_much_is_lost_of_holds_no_slot():
    standing = Standing(KEY, 1)
    slot_retention = SlotRetention(standing)
    slot_retention.staged(ev.SaveStaged(job=KEY, node="a", save=TWO))
    order = ev.SaveEnded(job=KEY, node="a", save=TWO, end=End.ABANDONED, reason="incarnation 2 began")
    slot_retention.ended(order)
    assert slot_retention.wanted == {TWO}, "a node may still be silent"
    standing.incarnation = 2
    slot_retention.ended(order)
    assert slot_retention.wanted == set()


# --- encodes, drains and commits over a restart


@pytest.mark.parametrize("restarted", "ad")
def test_a_restarted_daemon_goes_on_with_the_encode(restarted):
    cluster = ACluster()
    cluster.connect("abcd")
    cluster.held = {act.Encode}
    cluster.stage(ONE)
    cluster.waiting = [(n, a) for n, a in cluster.waiting if n.name != restarted]
    cluster.nodes[restarted].restart()
    cluster.release()
    assert all(ONE in {key[0] for key in node.chunks} for node in cluster.nodes.values())
    rank = 1
    assert "protected" in cluster.milestones(rank, ONE)


def test_a_commit_is_finished_by_a_node_that_lost_its_coordinator():
    cluster = ACluster()
    cluster.connect("abcd")
    cluster.held = {act.Commit}
    cluster.stage(ONE)
    assert [n.name for n, _ in cluster.waiting] == ["a"]
    cluster.waiting, cluster.held = [], set()
    cluster.lose("a")
    cluster.tick(0.1)
    assert cluster.store.committed == {ONE: 4}
    assert all("durable" in cluster.milestones(rank, ONE) for rank in (1, 2, 3))


def test_a_commit_by_another_node_knows_the_sessions_that_take_nothing_over():
    """A number that the store gave late to a session that is over would mark the checkpoint as superseded."""
    cluster = ACluster()
    cluster.connect("abcd")
    cluster.end_ranks()
    cluster.connect("abcd")
    cluster.held = {act.Commit}
    cluster.stage(SaveId(2, 1, 10, RUN))
    ordered = [commit for _, commit in cluster.waiting]
    assert [commit.void for commit in ordered] == [("s1",)]
    cluster.waiting = []
    cluster.lose("a")
    cluster.tick(0.1)
    assert {commit.void for _, commit in cluster.waiting} == {("s1",)}


def test_a_rank_that_ends_gives_up_nothing_of_lives_before_its_own():
    cluster = ACluster()
    cluster.connect("abd")
    cluster.stage(ONE)
    cluster.held = {act.Drain, act.Encode}
    cluster.stage(TWO)
    cluster.cut_off("d")
    cluster.end_ranks()
    cluster.connect("aba")
    cluster.tick(10)
    answers = cluster.load()
    assert {answer.save for answer in answers} == {ONE}
    cluster.nodes["a"].restart()
    cluster.return_ranks("a", answers[0].incarnation)
    cluster.end_ranks()
    assert cluster.has("a", TWO, 0)
    assert cluster.has("b", TWO, 1)


def test_a_restarted_coordinator_learns_from_the_others_what_it_knew():
    cluster = a_protected_job("aabbccdd")
    cluster.nodes["a"].restart()
    cluster.return_ranks("a")
    cluster.release()
    cluster.stage(TWO)
    assert sorted(set(cluster.milestones(7, TWO))) == ["durable", "protected", "staged"]
    assert cluster.store.committed.keys() == {ONE, TWO}


def test_a_restarted_node_learns_what_became_of_its_saves():
    cluster = a_protected_job("aabbccdd")
    cluster.nodes["c"].restart()
    cluster.return_ranks("c")
    cluster.release()
    cluster.stage(TWO)
    assert cluster.store.committed.keys() == {ONE, TWO}
    assert {s.save for s in cluster.nodes["c"].slots.values()} == {TWO, None}
    assert [key[0] for key in cluster.nodes["c"].chunks] == [TWO]


def test_parity_that_was_half_made_before_all_daemons_restarted_holds_no_slot_for_ever():
    cluster = a_protected_job()
    cluster.failing = {"c"}
    cluster.stage(TWO)
    cluster.end_ranks()
    cluster.fail()
    for name in "abcd":
        cluster.nodes[name].restart()
    cluster.connect("abc")
    cluster.tick(5)
    newer = SaveId(cluster.store.numbers, 1, 30, RUN)
    cluster.stage(newer)
    assert saves_at(cluster, "a") == {ONE, newer}


def test_what_a_silent_node_may_complete_is_not_given_up_by_a_new_coordinator():
    cluster = ACluster()
    cluster.connect("abcd")
    cluster.held = {act.Encode, act.Drain}
    cluster.stage(ONE)
    assert "staged" in cluster.milestones(0, ONE)
    cluster.cut_off("a")
    cluster.end_ranks()
    cluster.connect("bcd")
    cluster.tick(5)
    cluster.nodes["d"].restart()
    assert saves_at(cluster, "d") == {ONE}
    cluster.tick(cluster.policy.stage_timeout_s)
    cluster.nodes["d"].restart()
    assert saves_at(cluster, "d") == {ONE}, "a is late, and nothing newer is staged"
    cluster.return_ranks("d", cluster.store.numbers)
    cluster.waiting, cluster.held = [], set()
    newer = SaveId(cluster.store.numbers, 1, 20, RUN)
    cluster.stage(newer)
    assert saves_at(cluster, "d") == {newer}


def a_staged_save_of_which_a_part_is_silent(homes: str = "abc") -> ACluster:
    """ONE is staged, neither encoded nor drained. Node c does not answer when a, which coordinated, has restarted."""
    cluster = ACluster("abcd")
    cluster.connect(homes)
    cluster.held = {act.Encode, act.Drain}
    cluster.stage(ONE)
    assert all("staged" in cluster.milestones(rank, ONE) for rank in range(len(homes)))
    cluster.cut_off("c")
    return cluster


def test_an_orphaned_save_is_not_given_up_while_a_node_is_silent_that_may_have_a_part():
    cluster = a_staged_save_of_which_a_part_is_silent()
    cluster.end_ranks()
    cluster.nodes["a"].restart()
    cluster.tick(3600)
    cluster.heal("c")
    assert [saves_at(cluster, name) for name in "abc"] == [{ONE}] * 3
    cluster.connect("abc")
    cluster.tick(5)
    assert {answer.save for answer in cluster.load()} == {ONE}


def test_a_save_of_the_present_session_is_not_given_up_while_a_node_of_it_is_silent():
    cluster = a_staged_save_of_which_a_part_is_silent()
    cluster.nodes["a"].restart()
    cluster.return_ranks("a")
    cluster.tick(5)
    cluster.tick(3600)
    cluster.heal("c")
    assert [saves_at(cluster, name) for name in "abc"] == [{ONE}] * 3
    assert "staged" in cluster.milestones(0, ONE)


def a_session_without_the_silent_node() -> ACluster:
    """The job went on without c, for longer than a node is waited for, and has staged nothing."""
    cluster = a_staged_save_of_which_a_part_is_silent()
    cluster.end_ranks()
    cluster.nodes["a"].restart()
    cluster.connect("abd")
    for _ in range(3):
        cluster.tick(cluster.policy.stage_timeout_s)
    return cluster


def test_a_session_that_has_staged_nothing_gives_up_nothing_of_the_one_before():
    cluster = a_session_without_the_silent_node()
    cluster.heal("c")
    cluster.end_ranks()
    cluster.connect("abc")
    cluster.tick(5)
    assert {answer.save for answer in cluster.load()} == {ONE}


@pytest.mark.parametrize("word", ["skipped", "closed"])
def test_what_a_silent_node_may_complete_goes_when_its_room_is_needed_or_the_job_is_closed(word):
    cluster = a_session_without_the_silent_node()
    assert saves_at(cluster, "b") == {ONE}
    if word == "closed":
        close(cluster)
    else:
        newer = SaveId(cluster.store.numbers, 1, 20, RUN)
        skipped = ev.SaveSkipped(
            job=KEY, rank=1, session=cluster.sid, request=cluster.seq(), save=newer, reason="no slot"
        )
        cluster.say(cluster.nodes["b"], skipped)
        cluster.settle()
    assert saves_at(cluster, "b") == set()


def test_a_drain_that_a_lost_coordinator_had_ordered_holds_no_slot_for_ever():
    cluster = a_protected_job()
    cluster.waiting, cluster.held = [], {act.Drain, act.WriteVote}
    node = cluster.nodes["d"].job.node
    assert node.drain.save == ONE
    cluster.cut_off("a")
    cluster.end_ranks()
    cluster.connect("bcd")
    cluster.tick(5)
    assert node.coordinator == "b"
    assert node.drain.save == ONE, "the worker may still read its slots"
    cluster.say(cluster.nodes["d"], ev.Drained(job=KEY, save=ONE))
    cluster.settle()
    assert node.drain.save is None


def test_a_rank_of_the_session_before_is_refused_by_a_daemon_that_restarted():
    cluster = ACluster()
    cluster.connect("ab")
    before = cluster.attached[0]
    cluster.end_ranks()
    cluster.connect("aab")
    cluster.cut_off("b")
    cluster.nodes["a"].restart()
    cluster.say(cluster.nodes["a"], replace(before, request=cluster.seq(), incarnation=1, run=RUN))
    cluster.settle()
    (answer,) = [m for _, m in cluster.nodes["a"].told if getattr(m, "reply_to", 0) == cluster._seq]
    assert isinstance(answer, Refused)
    assert answer.code == "stale"


@pytest.mark.parametrize("readable", [True, False])
def test_what_is_to_be_copied_is_waited_for_until_its_digests_are_taken(readable):
    """Whoever was told that there is no such segment would go on with an older save."""
    cluster = ACluster("abc", scheme=Scheme.NONE)
    cluster.connect("abc")
    cluster.held = {act.TakeDigests, act.Drain}
    cluster.stage(ONE)
    cluster.end_ranks()
    cluster.connect("bca")
    seqs = ask_load(cluster)
    assert not any(cluster.answer(rank, seq) for rank, seq in seqs.items())
    if not readable:
        node, digests = next((n, a) for n, a in cluster.waiting if isinstance(a, act.TakeDigests))
        cluster.waiting.remove((node, digests))
        failed = ev.DigestsFailed(job=KEY, slot=digests.slot, save=ONE, problem="EIO")
        cluster.say(node, failed)
    cluster.release()
    orders = [cluster.answer(rank, seq) for rank, seq in seqs.items()]
    assert [getattr(order, "tier", None) for order in orders] == [Tier.PEER if readable else None] * 3


# --- what is known of ranks, and of what can be rebuilt, is incomplete too


def test_a_job_is_not_closed_while_a_rank_lives_that_has_not_come_back_to_a_restarted_daemon():
    cluster = ACluster("ab")
    cluster.connect("aab")
    cluster.stage(ONE)
    assert ONE in cluster.store.committed
    cluster.nodes["a"].restart()
    back = replace(cluster.attached[0], request=cluster.seq(), incarnation=1, run=RUN)
    cluster.say(cluster.nodes["a"], back)
    cluster.settle()
    for rank, name in ((0, "a"), (2, "b")):
        left = ev.RankDetached(job=KEY, rank=rank, session=cluster.sid, request=cluster.seq())
        cluster.say(cluster.nodes[name], left)
    cluster.settle()
    cluster.tick(5)
    assert [saves_at(cluster, name) for name in "ab"] == [{ONE}] * 2, "rank 1 may still save, and load"
    cluster.say(cluster.nodes["a"], ev.RankGone(job=KEY, rank=1, session=cluster.sid))
    cluster.settle()
    cluster.tick(5)
    assert [saves_at(cluster, name) for name in "ab"] == [set()] * 2


def test_what_could_not_be_rebuilt_once_is_not_given_up_while_its_parity_is_there():
    cluster = ACluster("abc")
    cluster.connect("abc")
    cluster.stage(ONE)
    cluster.held = {act.Drain}
    cluster.stage(TWO)
    assert "protected" in cluster.milestones(0, TWO)
    cluster.end_ranks()
    cluster.lose("a")
    cluster.add("a")
    cluster.connect("abc")
    cluster.tick(5)
    cluster.held |= {act.FetchSegment}
    seqs = ask_load(cluster)
    fetches, cluster.waiting = [w for w in cluster.waiting if isinstance(w[1], act.FetchSegment)], []
    assert fetches
    for node, fetch in fetches:
        failed = ev.SegmentFetched(job=KEY, rank=fetch.rank, save=TWO, tier=fetch.tier, problem="EIO")
        cluster.say(node, failed)
    cluster.settle()
    orders = {rank: cluster.answer(rank, seq) for rank, seq in seqs.items()}
    assert {order.save for order in orders.values()} == {ONE}
    for rank, order in orders.items():
        report(cluster, rank, order)
    cluster.held, cluster.waiting = {act.Drain}, []
    cluster.end_ranks()
    cluster.connect("abc")
    cluster.tick(5)
    assert {answer.save for answer in cluster.load()} == {TWO}


def test_a_node_two_sessions_back_may_have_a_part_while_nothing_newer_is_safe():
    cluster = ACluster("abc")
    cluster.connect("abc")
    cluster.held = {act.Encode, act.Drain}
    cluster.stage(ONE)
    cluster.end_ranks()
    cluster.cut_off("c")
    cluster.connect("ab")
    cluster.tick(5)
    cluster.end_ranks()
    cluster.nodes["a"].restart()
    cluster.connect("ba")
    cluster.tick(5)
    cluster.end_ranks()
    cluster.heal("c")
    assert [saves_at(cluster, name) for name in "abc"] == [{ONE}] * 3


def test_a_node_of_the_session_before_is_known_to_a_coordinator_that_restarts_before_its_session_is_known():
    cluster = ACluster("abc")
    cluster.connect("abc")
    cluster.held = {act.Encode, act.Drain}
    cluster.stage(ONE)
    cluster.end_ranks()
    cluster.cut_off("c")
    cluster.connect("ab")
    cluster.end_ranks()
    cluster.cut_off("b")  # nobody else tells whom the job ran on
    cluster.nodes["a"].restart()
    cluster.nodes["b"].restart()
    cluster.heal("b")
    cluster.cut_off("c")
    cluster.connect("ab")
    cluster.tick(5)
    cluster.end_ranks()
    cluster.heal("c")
    assert [saves_at(cluster, name) for name in "abc"] == [{ONE}] * 3


def test_a_commit_that_fails_gives_up_nothing_of_which_a_silent_node_may_have_a_part():
    """A restarted coordinator finds all votes on the store, before a node has said what it has."""
    cluster = ACluster("abc")
    cluster.connect("abc")
    cluster.held = {act.Encode, act.Commit}
    cluster.stage(ONE)
    assert sorted(cluster.store.votes[ONE]) == ["a", "b", "c"]
    cluster.cut_off("c")
    cluster.nodes["a"].restart()
    cluster.return_ranks("a")
    for _ in range(4):
        cluster.tick(5)
        commits = [node for node, action in cluster.waiting if isinstance(action, act.Commit)]
        cluster.waiting = []
        for node in commits:
            cluster.say(node, ev.CommitEnded(job=KEY, save=ONE, problem="EIO"))
        cluster.settle()
    assert [saves_at(cluster, name) for name in "abc"] == [{ONE}] * 3
    cluster.held = set()
    cluster.heal("c")
    cluster.tick(60)
    assert ONE in cluster.store.committed
