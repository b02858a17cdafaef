"""Steps of parity, of the session and of a load that take two faults: each by what happens."""

from ckptd.core import actions as act
from ckptd.core import events as ev
from ckptd.core.coordinator.protection_states import Encoding
from ckptd.core.coordinator.restore_states import Loading
from ckptd.core.coordinator.session_states import Presence
from tests.unit.core.a_job import AJob
from tests.unit.core.nodes.a_cluster import KEY, ONE, ACluster, close, nothing_is_left


def presence(cluster):
    return cluster.nodes["a"].job.coordinator.leave._state


def encoding(cluster, save):
    states = cluster.nodes["a"].job.coordinator.parity.states
    return next((state for key, state in states.items() if key[0] == save), None)


# --- parity


def test_an_encode_that_runs_when_the_job_is_over_ends_with_it():
    cluster = ACluster("ab")
    cluster.connect("ab")
    cluster.held = {act.Encode}
    cluster.stage(ONE)
    assert encoding(cluster, ONE) is Encoding.ENCODING
    close(cluster)
    cluster.release()
    nothing_is_left(cluster)


def test_parity_of_which_the_word_was_lost_is_found_though_a_node_had_failed():
    cluster = ACluster("abc")
    cluster.connect("abc")
    cluster.failing = {"c"}
    cluster.stage(ONE)
    assert encoding(cluster, ONE) is Encoding.STUCK
    cluster.failing = set()
    cluster.held = {act.Encode}
    cluster.tick(5)
    cluster.cut_off("c")
    cluster.release()
    assert encoding(cluster, ONE) is Encoding.STUCK
    cluster.heal("c")
    assert encoding(cluster, ONE) is Encoding.PROTECTED
    assert "protected" in cluster.milestones(2, ONE)


# --- the session


def test_a_session_that_comes_while_the_one_before_closes_has_the_memory():
    cluster = ACluster("ab")
    cluster.connect("ab")
    cluster.held = {act.Drain}
    cluster.stage(ONE)
    close(cluster)
    assert presence(cluster) is Presence.CLOSING
    cluster.connect("ab")
    assert presence(cluster) is Presence.OPEN
    cluster.release()
    assert {answer.save for answer in cluster.load()} == {ONE}


def test_memory_that_a_daemon_finds_after_the_death_of_its_ranks_is_orphaned_once():
    job = AJob(world=1, orphan_ttl_s=100)
    job.say(ev.SlotAdopted(job=KEY, rank=0, slot="r00000-000001.slot", capacity=4096, save=ONE, nbytes=10))
    job.gone(0)
    job.did += job.catalogue.adopted(KEY, job.now)
    job.scan(ONE)
    job.tick(99)
    assert job.node.slots.holding(ONE)
    job.tick(2)
    assert not job.catalogue.jobs


def test_a_node_that_is_said_twice_not_to_answer_is_lost_once():
    cluster = ACluster("ab")
    cluster.connect("ab")
    cluster.stage(ONE)
    cluster.say(cluster.nodes["a"], ev.RankGone(job=KEY, rank=0, session=cluster.sid))
    cluster.cut_off("b")
    assert presence(cluster) is Presence.ORPHANED
    cluster.say(cluster.nodes["a"], ev.PeerDown(job=KEY, node="b"))
    cluster.settle()
    assert presence(cluster) is Presence.ORPHANED
    assert cluster.nodes["a"].slots


# --- loads


def loading(cluster):
    return cluster.nodes["a"].job.coordinator.restores._round


def test_a_rank_that_ends_while_segments_are_on_their_way_ends_the_load():
    cluster = ACluster("abc")
    cluster.connect("abc")
    cluster.stage(ONE)
    cluster.end_ranks()
    cluster.connect("acb")
    cluster.held = {act.FetchSegment}
    seqs = cluster.ask()
    assert loading(cluster).state is Loading.FETCHING
    cluster.say(cluster.node(2), ev.RankGone(job=KEY, rank=2, session=cluster.sid))
    cluster.settle()
    assert loading(cluster) is None
    assert {cluster.answer(rank, seqs[rank]).code for rank in (0, 1)} == {"restore"}


def test_a_rank_that_asks_for_a_second_load_is_not_forgotten_when_the_first_is_reported():
    """Node b has restarted since the first, and does not know of it; the coordinator restarts in the second."""
    cluster = ACluster("abc")
    cluster.connect("abc")
    cluster.stage(ONE)
    cluster.end_ranks()
    cluster.connect("abc")
    cluster.load()
    number = cluster.nodes["a"].job.node.incarnation
    cluster.nodes["b"].restart()
    cluster.return_ranks("b", number)
    cluster.held = {act.TakeIncarnation}
    seqs = cluster.ask()
    cluster.held, cluster.waiting, cluster.cut = set(), [], {frozenset("ac")}
    cluster.nodes["a"].restart()
    cluster.cut = set()
    cluster.settle()
    cluster.return_ranks("a", number)
    cluster.say(cluster.node(0), ev.LoadAsked(job=KEY, rank=0, session=cluster.sid, request=cluster.seq()))
    cluster.settle()
    assert {cluster.answer(rank, seqs[rank]).save for rank in (1, 2)} == {ONE}


def test_a_rank_that_ends_while_the_load_waits_for_the_store_ends_it():
    job = AJob(world=2).start()
    job.stage_all(ONE)
    job.digest_all(ONE)
    for rank in range(2):
        job.ask_load(rank)
    job.number(2)
    job.scan()
    seqs = job.report_both(ONE, "not here", reshape=True)
    seqs = job.report_both(ONE, "no room here")
    assert job.facts.restore.awaited == ONE
    job.gone(1)
    assert job.facts.restore.awaited is None
    assert job.answer(seqs[0]).code == "restore"
