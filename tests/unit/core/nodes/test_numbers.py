"""One number for one life of a job, as far as its nodes can know: while the store is silent it is the clock's."""

import pytest

from ckptd.core import actions as act
from ckptd.core import events as ev
from ckptd.shared.base.ids import SaveId, clocked_from, not_behind
from ckptd.shared.protocol.messages import Attached
from tests.runs import RUN
from tests.unit.core.nodes.a_cluster import KEY, ACluster, close

CLOCK = 8_193_600


def a_silent_store(names: str) -> ACluster:
    cluster = ACluster(names)
    cluster.store.clock = CLOCK
    return cluster


def number(cluster: ACluster) -> int:
    """What the ranks of the present session were let in with."""
    answers = [cluster.answer(rank, attached.request) for rank, attached in cluster.attached.items()]
    assert all(isinstance(answer, Attached) for answer in answers)
    (found,) = {answer.incarnation for answer in answers}
    return found


def lives(cluster: ACluster, homes: str, count: int, *, restart: str = "") -> list[int]:
    """So many starts of the job within one tick of the clock, each of which leaves nothing behind."""
    found = []
    for _ in range(count):
        cluster.connect(homes, expect=False)
        found.append(number(cluster))
        cluster.end_ranks()
        cluster.tick(cluster.policy.empty_ttl_s)
        for name in restart:
            cluster.nodes[name].restart()
    return found


@pytest.mark.parametrize("restart", ["", "a", "ab"])
@pytest.mark.parametrize("homes", ["a", "ab"])
def test_starts_within_a_tick_of_the_clock_have_numbers_of_their_own_though_nothing_is_left_of_them(homes, restart):
    cluster = a_silent_store("ab")
    assert lives(cluster, homes, 3, restart=restart) == [CLOCK, CLOCK + 1, CLOCK + 2]


@pytest.mark.parametrize("restart", [False, True])
def test_a_life_elsewhere_receives_the_number_of_a_node_that_it_shares_with_the_one_before(restart):
    cluster = a_silent_store("abc")
    lives(cluster, "ab", 1)
    if restart:
        cluster.nodes["b"].restart()
    assert lives(cluster, "cb", 1) == [CLOCK + 1]


def test_the_number_that_a_load_began_is_not_given_to_the_next_life():
    cluster = a_silent_store("ab")
    cluster.connect("ab")
    cluster.held = {act.Encode, act.Drain}
    cluster.stage(SaveId(CLOCK, 1, 10, RUN))
    answers = cluster.load()
    assert {answer.incarnation for answer in answers} == {CLOCK + 1}
    cluster.end_ranks()
    cluster.cut_off("a")  # neither tells the other what it knows before it restarts too
    for name in "ab":
        cluster.nodes[name].restart()
    cluster.heal("a")
    cluster.connect("ab")
    assert number(cluster) == CLOCK + 2


def test_a_number_is_kept_before_any_rank_or_node_receives_it():
    cluster = a_silent_store("ab")
    order: list[tuple[str, str]] = []
    perform = cluster.perform

    def note(node, action):
        message = getattr(action, "message", None)
        if isinstance(action, act.KeepNumber):
            order.append((node.name, "kept"))
        elif isinstance(message, Attached | ev.SessionOpened):
            order.append((node.name, "told"))
        perform(node, action)

    cluster.perform = note
    cluster.connect("ab")
    assert {name for name, _ in order} == {"a", "b"}
    for name in "ab":
        words = [word for node, word in order if node == name]
        assert words[0] == "kept"
        assert "told" in words


def test_a_number_of_the_store_is_taken_again_when_a_larger_one_has_become_known():
    """A node that had it of the clock has spoken while the store was asked."""
    cluster = ACluster("ab")
    cluster.held = {act.TakeIncarnation}
    cluster.connect("a", expect=False)
    coordinator = cluster.nodes["a"].job.coordinator
    attached = ev.NodeAttached(job=KEY, session="another", peer=cluster.nodes["b"].peer, known=CLOCK)
    cluster.say(cluster.nodes["a"], ev.Report(job=KEY, node="b", event=attached))
    cluster.settle()
    cluster.release()
    assert number(cluster) > CLOCK
    assert cluster.store.numbers == coordinator.sessions.incarnation
    close(cluster)


def test_a_store_that_counts_among_the_clocks_numbers_gives_none_that_the_clock_has_passed():
    """One of them may have been given while the store was silent, and forgotten since."""
    now = clocked_from(CLOCK + 20)
    assert not_behind(57, now) == 57
    assert not_behind(CLOCK, now) == CLOCK + 20
    assert not_behind(CLOCK + 30, now) == CLOCK + 30
