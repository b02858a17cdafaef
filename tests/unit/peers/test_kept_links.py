"""Which links there are: those that one of the ends has use for, and a link for a message; the others rest."""

import time

import pytest
from msgspec.structs import replace

from ckptd.core import events as ev
from ckptd.peers import links as links_module
from ckptd.peers import shared_jobs
from ckptd.peers.address_book import AddressBook
from ckptd.peers.plane import PeerPlane
from ckptd.shared.format.schemes import Scheme
from ckptd.shared.protocol.topology import Peer, Topology
from tests.links import give_up
from tests.unit.peers.planes import JOB, OTHER, Kept, staged


@pytest.fixture
def trio(world, monkeypatch):
    """Three daemons that know each other, and keep no link."""
    monkeypatch.setattr(shared_jobs, "LINGER_S", 0.2)
    monkeypatch.setattr(links_module, "LINGER_S", 0.2)
    for node in "abc":
        world.start(node)
    meet(world)
    return world


def meet(world, *jobs):
    peers = [plane.peer for plane in world.planes.values()]
    for plane in world.planes.values():
        for job in jobs or (JOB,):
            PeerPlane.meet(plane, job, peers)


def linked(world):
    return {node: [view.node for view in plane.views() if view.up] for node, plane in world.planes.items()}


def downs(world, node):
    return [(event.node, event.rests) for event in world.of(node, ev.PeerDown)]


def test_peers_that_are_only_known_have_no_link(trio):
    trio.spend(0.3)
    assert linked(trio) == {"a": [], "b": [], "c": []}
    assert [plane.problems() for plane in trio.planes.values()] == [[]] * 3
    assert not any(trio.heard.values())


def test_a_link_that_one_end_keeps_is_up_at_both_and_no_other_is(trio):
    trio.planes["b"].keep_links(JOB, ["a"])
    trio.until(lambda: trio.ups("a") and trio.ups("b"))
    trio.spend(0.5)
    assert linked(trio) == {"a": ["b"], "b": ["a"], "c": []}
    assert trio.planes["a"].send(JOB, "b", staged("a", 1))
    assert trio.planes["b"].send(JOB, "a", staged("b", 2))
    trio.until(lambda: trio.counters("a") == [2] and trio.counters("b") == [1])
    assert downs(trio, "a") == downs(trio, "b") == []


def test_a_link_that_no_end_has_use_for_rests_and_can_be_had_again(trio, monkeypatch):
    monkeypatch.setattr(links_module, "_ASIDE_S", 0.3)
    trio.planes["b"].keep_links(JOB, ["a"])
    trio.until(lambda: trio.ups("a") and trio.ups("b"))
    trio.planes["b"].keep_links(JOB, [])
    trio.until(lambda: downs(trio, "a") and downs(trio, "b"))
    assert (downs(trio, "a"), downs(trio, "b")) == ([("b", True)], [("a", True)])
    trio.spend(0.5)
    assert linked(trio) == {"a": [], "b": [], "c": []}
    trio.planes["a"].keep_links(JOB, ["b"])
    trio.until(lambda: len(trio.ups("a")) == 2 and len(trio.ups("b")) == 2)
    assert trio.planes["b"].send(JOB, "a", staged("b", 3))
    trio.until(lambda: trio.counters("a") == [3])


def test_a_message_to_a_node_without_a_link_makes_one_for_a_while(trio, monkeypatch):
    monkeypatch.setattr(links_module, "_ASIDE_S", 0.5)
    assert not trio.planes["c"].send(JOB, "a", staged("c", 1)), "PeerUp says when it can be sent again"
    trio.until(lambda: trio.ups("c") and trio.ups("a"))
    assert trio.planes["c"].send(JOB, "a", staged("c", 2))
    trio.until(lambda: trio.counters("a") == [2])
    trio.until(lambda: downs(trio, "c") and downs(trio, "a"))
    assert downs(trio, "c") == [("a", True)]
    assert not trio.planes["c"].send(OTHER, "a", staged("c", 4, OTHER)), "it is in no such job"
    trio.spend(0.3)
    assert linked(trio) == {"a": [], "b": [], "c": []}


def test_a_link_rests_only_when_no_job_has_use_for_it(trio):
    meet(trio, JOB, OTHER)
    for job in (JOB, OTHER):
        trio.planes["b"].keep_links(job, ["a"])
    trio.until(lambda: trio.ups("a") and trio.ups("a", job=OTHER))
    trio.planes["b"].keep_links(JOB, [])
    trio.spend(0.6)
    assert (linked(trio)["b"], downs(trio, "a")) == (["a"], [])
    trio.planes["b"].keep_links(OTHER, [])
    trio.until(lambda: len(downs(trio, "a")) == 2 and len(downs(trio, "b")) == 2)


def test_an_end_that_has_use_for_it_after_all_has_it_again(trio):
    """The other end was about to let it rest."""
    a, b = trio.planes["a"], trio.planes["b"]
    b.keep_links(JOB, ["a"])
    trio.until(lambda: trio.ups("a") and trio.ups("b"))
    b.keep_links(JOB, [])
    remote = a._remote_of(JOB, "b")
    a._rest(remote, a._clock())
    b.keep_links(JOB, ["a"])
    trio.until(lambda: len(trio.ups("b")) == 2 and len(trio.ups("a")) == 2)
    assert b.send(JOB, "a", staged("b", 9))
    trio.until(lambda: trio.counters("a") == [9])


def test_the_end_that_has_no_use_for_it_does_not_dial_a_daemon_that_is_gone(trio):
    trio.planes["b"].keep_links(JOB, ["a"])
    trio.until(lambda: trio.ups("a") and trio.ups("b"))
    trio.stop("b")
    trio.until(lambda: downs(trio, "a"))
    assert downs(trio, "a") == [("b", False)]
    assert trio.planes["a"].views() == []
    b = trio.start("b")
    b.keep_links(JOB, ["a"])
    PeerPlane.meet(b, JOB, [trio.planes["a"].peer])
    trio.until(lambda: len(trio.ups("a")) == 2)


def test_redials_of_a_lost_node_are_spread_by_the_size_of_the_job(world, monkeypatch):
    a, b = world.start("a", timeout_s=0.5), world.start("b", timeout_s=0.5)
    others = [Peer(f"n{number}", "x", "tcp://127.0.0.1:1", b.peer.key) for number in range(1000)]
    waits = []
    monkeypatch.setattr(links_module.random, "uniform", lambda least, most: waits.append((least, most)) or most)
    a.keep_links(JOB, ["b"])
    PeerPlane.meet(a, JOB, [b.peer, *others])
    PeerPlane.meet(b, JOB, [a.peer])
    world.until(lambda: world.ups("a") and world.ups("b"))
    world.stop("b")
    world.until(lambda: downs(world, "a"))
    assert waits == [(0.0, pytest.approx(1.001))]


def break_off(world, node, other):
    """The link goes down at this end, and the other end does not know."""
    plane = world.planes[node]
    remote = plane._remote_of(JOB, other)
    give_up(remote.link)
    plane._flush(remote)
    return remote


def test_a_link_that_breaks_at_the_end_that_does_not_need_it_comes_back(trio):
    trio.planes["b"].keep_links(JOB, ["a"])
    trio.until(lambda: trio.ups("a") and trio.ups("b"))
    break_off(trio, "a", "b")
    trio.until(lambda: len(trio.ups("a")) == len(trio.ups("b")) == 2)
    assert downs(trio, "b") == []
    assert trio.planes["b"].send(JOB, "a", staged("b", 1))
    trio.until(lambda: trio.counters("a") == [1])


def test_ends_that_let_a_link_rest_at_one_moment_do_not_make_it_again(trio):
    for node, other in ("ab", "ba"):
        trio.planes[node].keep_links(JOB, [other])
    trio.until(lambda: trio.ups("a") and trio.ups("b"))
    for node in "ab":
        trio.planes[node].keep_links(JOB, [])
    for node, other in ("ab", "ba"):
        remote = trio.planes[node]._remote_of(JOB, other)
        remote.shared.needed.clear()
        trio.planes[node]._rest(remote, trio.planes[node]._clock())
    trio.spend(1.0)
    assert linked(trio) == {"a": [], "b": [], "c": []}
    assert (len(trio.ups("a")), len(trio.ups("b"))) == (1, 1)


def test_a_link_that_came_up_before_it_was_redialled_keeps_its_connection(trio, monkeypatch):
    monkeypatch.setattr(links_module.random, "uniform", lambda least, most: 0.5)
    trio.planes["b"].keep_links(JOB, ["a"])
    trio.until(lambda: trio.ups("a") and trio.ups("b"))
    remote = break_off(trio, "b", "a")
    socket = remote._socket
    trio.until(lambda: len(trio.ups("b")) == 2)
    trio.spend(0.7)
    assert remote._socket is socket


def test_a_use_that_is_said_again_never_ends_sooner():
    shared = shared_jobs.SharedJobs("b", 10.0)
    assert shared.needs(JOB, 60.0)
    assert not shared.needs(JOB, 5.0)
    assert (shared.expired(59.0), shared.expired(60.0)) == ([], [JOB])
    shared.needs(JOB, float("inf"))
    shared.kept_until(JOB, 5.0)
    assert shared.expired(5.0) == [JOB]


def test_a_job_that_is_over_costs_the_book_what_it_has():
    """At once for each peer: not all others are looked at."""
    book = AddressBook()
    for number in range(20_000):
        book.add(JOB, Peer(f"n{number}", "a", "tcp://10.0.0.1:1", f"{number:040}"))
    began = time.process_time()
    book.forget(JOB)
    assert time.process_time() - began < 1.0
    assert not book.knows(f"{7:040}")


def test_a_node_that_the_job_has_left_leaves_the_book(trio, monkeypatch):
    """Unless it holds something of the job, or has a link."""
    monkeypatch.setattr(Kept, "meet", PeerPlane.meet)
    a, peers = trio.planes["a"], {node: plane.peer for node, plane in trio.planes.items()}

    def keep(nodes, outside=""):
        topology = Topology(tuple(peers[n] for n in nodes), tuple(range(len(nodes))), Scheme.XOR, 2)
        a.keep(JOB, topology, tuple(peers[n] for n in outside))
        return [n for n in "bc" if a._book.peer(JOB, n) is not None]

    assert keep("abc") == ["b", "c"]
    assert keep("ab", outside="c") == ["b", "c"]
    a.keep_links(JOB, ["c"])
    assert keep("ab") == ["b", "c"], "it has a link"
    trio.until(lambda: trio.ups("a"))
    a.keep_links(JOB, [])
    trio.until(lambda: downs(trio, "a"))
    assert keep("ab") == ["b"]
    assert keep("a") == []
    assert not a._book.knows(peers["c"].key)
    assert keep("abc") == ["b", "c"]


def test_the_book_has_one_peer_of_each_node():
    book = AddressBook()
    peers = [Peer(f"n{number}", f"a{number}", f"tcp://10.0.0.1:{number}", "k" * 40) for number in range(10)]
    for peer in peers:
        assert book.add(JOB, peer) is None
    assert book.kept(JOB) == []
    moved = Peer("n5", "a5", "tcp://10.0.0.9:5", "k" * 40)
    book.moved(("n5", "k" * 40), "tcp://10.0.0.7:7")
    assert book.at(("n5", "k" * 40)).endpoint == "tcp://10.0.0.7:7", "its own word counts for more"
    assert book.add(JOB, moved) == peers[5]
    assert book.at(("n5", "k" * 40)).endpoint == moved.endpoint, "it was named anew"
    other = Peer("n5", "a5", "tcp://10.0.0.9:5", "l" * 40)
    assert book.add(JOB, other) == moved
    assert (book.jobs(("n5", "k" * 40)), book.jobs(("n5", "l" * 40))) == ([], [JOB])
    book.forget(JOB)
    assert not book.knows("k" * 40)
    assert not book.knows("l" * 40)


def test_the_book_has_the_table_of_its_topology_and_no_copy_as_long_as_both_say_the_same():
    peers = [Peer(f"n{number}", f"a{number}", f"tcp://10.0.0.1:{number}", f"{number:040}") for number in range(10)]
    topology = Topology(tuple(peers), tuple(range(10)), Scheme.XOR, 2)
    book, own, other = AddressBook("n0"), peers[0], replace(peers[5], key="k" * 40)

    def keep(job=JOB, *outside):
        for peer in (*topology.peers[1:], *outside):
            book.add(job, peer)
        left = book.present(job, topology, outside)
        book.settle(job)
        return left

    assert keep() == []
    assert book._peers[JOB] is topology.by_name
    assert (book.peer(JOB, "n0"), book.count(JOB), len(book._keys)) == (None, 9, 0)
    assert [book.knows(peer.key) for peer in peers[1:]] == [True] * 9
    assert book.jobs((own.node, own.key)) == []
    book.keep(JOB, None)
    assert book.kept(JOB) == peers[1:]

    assert book.add(JOB, other) == peers[5]
    assert topology.by_name["n5"] == peers[5], "no other job has another peer there"
    assert (book.knows(peers[5].key), book.knows(other.key), book.count(JOB)) == (False, True, 9)
    assert book.jobs(("n5", peers[5].key)) == []
    assert keep() == []
    assert (book.knows(peers[5].key), book.knows(other.key)) == (True, False)
    assert book._peers[JOB] is topology.by_name

    guest = replace(peers[5], node="guest", key="g" * 40)
    assert keep(JOB, guest) == []
    assert (book.peer(JOB, "guest"), book.count(JOB)) == (guest, 10)
    assert keep() == [guest]
    book.remove(JOB, "guest")
    book.settle(JOB)
    assert book._peers[JOB] is topology.by_name
    assert [peer.node for peer in book.forget(JOB)] == [peer.node for peer in peers[1:]]
    assert (book._keys, book._same, book.knows(peers[1].key)) == ({}, {}, False)
