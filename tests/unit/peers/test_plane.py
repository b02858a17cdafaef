"""Planes with real sockets: who is let in, what arrives, what each side is told."""

import errno
import itertools
import os
import time

import msgspec
import pytest
import zmq

from ckptd import __version__
from ckptd.core import events as ev
from ckptd.core.actions import ToNode
from ckptd.peers import links as links_module
from ckptd.peers import packets
from ckptd.peers import plane as plane_module
from ckptd.peers import remote as remote_module
from ckptd.peers.keys import make_keys, write_keys
from ckptd.peers.link import Link
from ckptd.shared.base.errors import ConfigError, ProtocolError
from ckptd.shared.base.ids import SaveId
from ckptd.shared.protocol import node_messages
from ckptd.shared.protocol.topology import Peer, Topology
from tests.links import give_up
from tests.runs import RUN
from tests.signals import resume, stop
from tests.unit.peers.planes import JOB, OTHER, TIMEOUT_S, Apart, World, a_plane, staged

NUMBERS = itertools.count(1_000_000, 2)  # of messages, unlike any that a test counts itself
NEXT = packets.VERSION + 1  # of the protocol between daemons


@pytest.fixture
def pair(world):
    for node in "ab":
        world.start(node)
    world.all_meet()
    world.until(lambda: world.ups("a") and world.ups("b"))
    return world


def exchange(world, a="a", b="b"):
    """A message each way arrives."""
    number = next(NUMBERS)
    assert world.planes[a].send(JOB, b, staged(a, number))
    assert world.planes[b].send(JOB, a, staged(b, number + 1))
    world.until(lambda: number in world.counters(b) and number + 1 in world.counters(a))


# --- messages


def test_two_planes_speak(pair):
    assert (pair.ups("a"), pair.ups("b")) == ([True], [True])
    exchange(pair)
    assert pair.planes["a"].problems() == []


def test_many_messages_arrive_in_order_once(pair):
    for number in range(2000):
        assert pair.planes["a"].send(JOB, "b", staged("a", number))
        assert pair.planes["b"].send(JOB, "a", staged("b", number))
    pair.until(lambda: len(pair.counters("a")) == len(pair.counters("b")) == 2000)
    assert pair.counters("a") == pair.counters("b") == list(range(2000))


def test_a_report_keeps_its_event(pair):
    event = ev.SegmentsStaged(job=JOB, save=SaveId(1, 2, 3, RUN), world_size=8, segments=(ev.StagedSegment(3, 7),))
    report = ev.Report(job=JOB, node="a", event=event)
    pair.planes["a"].carry(ToNode(job=JOB, node="b", message=report))
    pair.until(lambda: pair.of("b", ev.Report))
    assert pair.of("b", ev.Report) == [report]


def test_a_message_without_an_address_is_a_bug(pair):
    """The catalogue addresses an order to each node, so that a link is made to those without one."""
    with pytest.raises(ValueError, match="SaveStaged is addressed to no node"):
        pair.planes["a"].carry(ToNode(job=JOB, message=staged("a", 7)))


def test_a_message_that_is_too_large_is_refused_by_the_sender(pair):
    large = ev.SaveEnded(job=JOB, node="a", save=SaveId(1, 1, 1, RUN), end="failed", reason="x" * (9 << 20))
    with pytest.raises(ProtocolError, match="exceeds"):
        pair.planes["a"].send(JOB, "b", large)
    pair.planes["a"].carry(ToNode(job=JOB, node="b", message=large))
    exchange(pair)


def test_who_is_met_while_the_link_is_up_is_up_at_once(pair):
    pair.all_meet(OTHER)
    pair.until(lambda: pair.ups("a", job=OTHER) and pair.ups("b", job=OTHER))
    assert pair.planes["a"].send(OTHER, "b", staged("a", 5, OTHER))
    pair.until(lambda: pair.counters("b") == [5])


def test_one_that_meets_later_than_the_other_is_let_in(world):
    a, b = world.start("a"), world.start("b")
    a.meet(JOB, [b.peer])
    world.spend(0.5)
    assert world.heard == {"a": [], "b": []}
    b.meet(JOB, [a.peer])
    world.until(lambda: world.ups("a") and world.ups("b"))
    exchange(world)


# --- jobs


def test_up_only_for_jobs_that_both_name(pair):
    pair.planes["a"].meet(OTHER, [pair.planes["b"].peer])
    pair.spend(0.3)
    assert pair.ups("a", job=OTHER) == []
    assert not pair.planes["a"].send(OTHER, "b", staged("a", 5, OTHER))


@pytest.mark.parametrize("nested", [False, True])
def test_a_message_of_a_job_that_is_not_shared_is_dropped_and_counted(pair, nested):
    b = pair.planes["a"]._remote_of(JOB, "b")
    wrong = staged("a", 5, OTHER)
    if nested:
        wrong = ev.Report(job=JOB, node="a", event=ev.Drained(job=OTHER, save=SaveId(1, 1, 1, RUN)))
    pair.planes["a"]._say(b, packets.Message(node_messages.encode(wrong)))
    pair.planes["a"]._flush(b)
    pair.until(lambda: pair.planes["b"].refused["job"] == 1)
    assert pair.of("b", ev.NodeMessage) == []
    exchange(pair)


def test_a_message_in_anothers_name_is_dropped_and_counted(pair):
    assert pair.planes["a"].send(JOB, "b", staged("c", 5))
    pair.until(lambda: pair.planes["b"].refused["sender"] == 1)
    assert pair.counters("b") == []
    exchange(pair)


def test_what_no_daemon_said_is_dropped_and_counted(pair):
    b = pair.planes["a"]._remote_of(JOB, "b")
    b.link.send(b"\xc1")
    b.link.send(packets.encode_body(packets.Message(b"\x92\xa3Foo\x80")))
    pair.planes["a"]._flush(b)
    pair.until(lambda: pair.planes["b"].refused["malformed"] == 2)
    exchange(pair)
    assert pair.planes["b"].problems() == []


@pytest.mark.parametrize("body", [packets.encode_body(packets.Message(b"\x81\xa4type\xa3foo")), b"\x92\xa3foo\x01"])
def test_a_message_that_only_another_release_knows_is_refused_and_reported(pair, body):
    """With both sides: while the link is up, until the other daemon is another process."""
    remote = pair.planes["a"]._remote_of(JOB, "b")
    remote.link.send(body)
    pair.planes["a"]._flush(remote)
    pair.until(lambda: pair.planes["b"].refused["unknown"] == 1)
    exchange(pair)
    (told,) = pair.planes["b"].problems()
    assert told == (
        f"message 'foo' of node a (protocol {packets.VERSION}, ckptd {__version__}): "
        f"this daemon (protocol {packets.VERSION}, ckptd {__version__}) does not know it; "
        "install one version of ckptd on all nodes and restart the daemons"
    )
    pair.stop("a")
    pair.start("a")
    pair.all_meet()
    pair.until(lambda: pair.planes["b"].problems() == [] and len(pair.ups("b")) == 2)


def test_a_job_that_is_forgotten_is_down_for_the_other_and_comes_back(pair):
    a, b = pair.planes["a"], pair.planes["b"]
    pair.all_meet(OTHER)
    pair.until(lambda: pair.ups("b", job=OTHER) and pair.ups("a", job=OTHER))
    a.forget(OTHER)
    pair.until(lambda: [e.job for e in pair.of("b", ev.PeerDown)] == [OTHER])
    exchange(pair)
    a.meet(OTHER, [b.peer])
    pair.until(lambda: len(pair.ups("b", job=OTHER)) == 2 and len(pair.ups("a", job=OTHER)) == 2)
    assert pair.of("a", ev.PeerDown) == []


def test_who_shares_no_job_is_dropped(pair):
    a, b = pair.planes["a"], pair.planes["b"]
    a.forget(JOB)
    assert (a.views(), a._remotes, a._offers.guests, a._book.knows(b.peer.key)) == ([], {}, {}, False)
    pair.until(lambda: [e.node for e in pair.of("b", ev.PeerDown)] == ["a"])
    assert not b.send(JOB, "a", staged("b", 1))
    pair.spend(2 * TIMEOUT_S)
    assert b.problems() == []  # it said goodbye
    a.meet(JOB, [b.peer])
    pair.until(lambda: len(pair.ups("a")) == 2 and len(pair.ups("b")) == 2)
    exchange(pair)


def test_a_former_node_that_is_long_silent_is_dropped(world, monkeypatch):
    a = world.start("a")
    silent = [msgspec.structs.replace(a.peer, node=node, endpoint="tcp://127.0.0.1:1") for node in "bcd"]
    a.keep(JOB, Topology((a.peer, silent[0], silent[1]), (0, 1, 2)))
    a.keep(JOB, Topology((a.peer, silent[0]), (0, 1)))
    a.meet(OTHER, [silent[2]])
    assert len(a.views()) == 3
    monkeypatch.setattr(links_module, "_PATIENCE_S", 0.3)
    world.until(lambda: [view.node for view in a.views()] == ["b", "d"])
    world.spend(0.5)
    assert len(a.views()) == 2


# --- lives


def test_a_restart_with_the_same_arena_is_fresh_at_the_same_port(pair):
    before = pair.planes["b"].peer
    pair.stop("b")
    pair.spend(0.2)
    b = pair.start("b")
    assert b.peer == before
    b.meet(JOB, [pair.planes["a"].peer])
    pair.until(lambda: len(pair.ups("a")) == 2 and pair.ups("b"))
    assert pair.ups("a") == [True, True]
    exchange(pair)


def test_a_restart_faster_than_the_timeout_is_up_again_and_never_down(world):
    for node in "ab":
        world.start(node, timeout_s=10.0)
    world.all_meet()
    world.until(lambda: world.ups("a") and world.ups("b"))
    world.stop("b")
    world.start("b", timeout_s=10.0).meet(JOB, [world.planes["a"].peer])
    world.until(lambda: len(world.ups("a")) == 2 and world.ups("b"))
    assert world.of("a", ev.PeerDown) == []
    exchange(world)


def test_a_restart_that_does_not_know_the_job_any_more_is_down(pair):
    pair.stop("b")
    b = pair.start("b")
    b.meet(OTHER, [pair.planes["a"].peer])
    pair.until(lambda: pair.of("a", ev.PeerDown))
    assert pair.ups("a") == [True]


def test_a_restart_at_another_port_is_found(pair):
    pair.stop("b")
    holder = zmq.Context()
    taken = holder.socket(zmq.ROUTER)
    port = pair.planes["a"]._remote_of(JOB, "b").peer.endpoint
    taken.bind(port)
    try:
        b = pair.start("b")
        assert b.peer.endpoint != port
        b.meet(JOB, [pair.planes["a"].peer])
        pair.until(lambda: len(pair.ups("a")) == 2 and pair.ups("b"))
        exchange(pair)
    finally:
        taken.close(0)
        holder.term()


def test_an_arena_lost_is_another_peer_once_a_rank_names_it(pair):
    pair.stop("b")
    os.unlink(pair.base / "b" / "identity")
    b = pair.start("b")
    b.meet(JOB, [pair.planes["a"].peer])
    pair.spend(TIMEOUT_S + 2.0)
    assert pair.of("a", ev.PeerDown)
    assert pair.ups("b") == []
    assert "key" in "".join(pair.planes["a"].problems())
    assert any(b.peer.key in line and "was refused" in line for line in pair.planes["a"].problems())
    pair.planes["a"].meet(JOB, [b.peer])
    pair.until(lambda: len(pair.ups("a")) == 2 and pair.ups("b"))
    assert pair.ups("a") == [True, True]
    exchange(pair)
    pair.spend(0.1)
    assert pair.planes["a"].problems() == []


def test_a_process_that_is_stopped_is_down_and_up_again(world):
    a = world.start("a")
    apart = Apart(world.base / "b", "b", a.peer, timeout_s=TIMEOUT_S)
    try:
        a.meet(JOB, [apart.peer])
        world.until(lambda: world.ups("a"))
        for number in range(500):
            a.send(JOB, "b", staged("a", number))
        world.until(lambda: world.counters("a") == list(range(500)))
        stop(apart.process.pid)
        started = time.monotonic()
        world.until(lambda: world.of("a", ev.PeerDown))
        assert 0.5 * TIMEOUT_S < time.monotonic() - started < 3 * TIMEOUT_S
        assert not a.send(JOB, "b", staged("a", 1))
        resume(apart.process.pid)
        world.until(lambda: len(world.ups("a")) == 2)
        assert world.ups("a") == [True, False]
        assert a.send(JOB, "b", staged("a", 1000))
        world.until(lambda: world.counters("a")[-1] == 1000)
        assert len(world.counters("a")) == 501
    finally:
        apart.kill()


def test_a_process_that_is_killed_and_started_again(world):
    a = world.start("a")
    apart = Apart(world.base / "b", "b", a.peer, timeout_s=TIMEOUT_S)
    try:
        a.meet(JOB, [apart.peer])
        world.until(lambda: world.ups("a"))
        apart.kill()
        apart = Apart(world.base / "b", "b", a.peer, timeout_s=TIMEOUT_S)
        world.until(lambda: len(world.ups("a")) == 2)
        assert world.ups("a") == [True, True]
        a.send(JOB, "b", staged("a", 3))
        world.until(lambda: world.counters("a") == [3])
    finally:
        apart.kill()


# --- strangers


class Dealer:
    """A bare socket with keys of its choice."""

    def __init__(self, plane, keys, server_key=None):
        self.plane = plane
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.immediate = 1
        self.socket.sndtimeo = 0
        if keys is not None:
            self.socket.curve_publickey, self.socket.curve_secretkey = keys.public.encode(), keys.secret.encode()
            self.socket.curve_serverkey = (server_key or plane.peer.key).encode()
        self.socket.connect(plane.peer.endpoint)

    def try_to_send(self, frame):
        try:
            self.socket.send(frame)
        except zmq.Again:
            return False
        return True

    def close(self):
        self.socket.close(0)
        self.context.term()


@pytest.fixture
def dealer():
    made = []

    def make(*words, **more):
        made.append(Dealer(*words, **more))
        return made[-1]

    yield make
    for one in made:
        one.close()


def hello(sender="a", receiver="b", **changes):
    link = Link(instance=7, timeout_s=1.0, new_end=lambda: 8)
    envelope = packets.Envelope(packets.VERSION, sender, receiver, "", link.step(0.0)[0], "9.9")
    return packets.encode_envelope(msgspec.structs.replace(envelope, **changes))


def test_a_stranger_without_a_key_or_with_an_unknown_one_gets_nothing_in(world, dealer):
    b = world.start("b")
    b.meet(JOB, [a_peer_like(b)])
    strangers = [dealer(b, None), dealer(b, make_keys())]
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline:
        for stranger in strangers:
            stranger.try_to_send(hello())
        world.turn()
    assert world.heard["b"] == []
    assert b.refused.total() == 0  # it never came so far
    assert any("was refused" in line for line in b.problems())


def a_peer_like(plane, **changes):
    return msgspec.structs.replace(plane.peer, node="a", endpoint="tcp://127.0.0.1:1", **changes)


def test_a_wrong_server_key_is_seen_and_reported(world):
    a, b = world.start("a"), world.start("b")
    b.meet(JOB, [a.peer])
    a.meet(JOB, [msgspec.structs.replace(b.peer, key=make_keys().public)])
    named = "another key than the ranks named"
    world.until(lambda: any("node b" in line and named in line for line in a.problems()))
    assert world.heard == {"a": [], "b": []}
    a.meet(JOB, [b.peer])
    world.until(lambda: world.ups("a") and world.ups("b"))
    assert a.problems() == []


def test_an_absent_peer_is_reported(world):
    a = world.start("a")
    a.meet(JOB, [msgspec.structs.replace(a.peer, node="b", endpoint="tcp://127.0.0.1:1")])
    world.spend(1.5)
    assert any("node b at tcp://127.0.0.1:1 does not answer" in line for line in a.problems())


def test_a_former_node_is_no_problem_until_a_job_is_on_it_again(world):
    a = world.start("a")
    gone = msgspec.structs.replace(a.peer, node="b", endpoint="tcp://127.0.0.1:1")
    a.keep(JOB, Topology((a.peer, gone), (0, 1)))
    a.keep(JOB, Topology((a.peer,), (0,)))
    world.spend(1.5)
    assert ([view.node for view in a.views()], a.problems()) == (["b"], [])
    a.meet(OTHER, [gone])
    assert any("node b at tcp://127.0.0.1:1 does not answer" in line for line in a.problems())


def test_one_that_cannot_be_reached_is_reported(world):
    a = world.start("a")
    a.meet(JOB, [msgspec.structs.replace(a.peer, node="b", endpoint="")])
    world.spend(1.2)
    assert any("set peer_address there" in line for line in a.problems())


def known_dealer(world, dealer):
    """b knows a key under the name a; the socket has that key."""
    b, keys = world.start("b"), make_keys()
    b.meet(JOB, [a_peer_like(b, key=keys.public)])
    a = dealer(b, keys)
    world.until(lambda: a.try_to_send(hello(receiver="c")))
    world.until(lambda: b.refused["receiver"] == 1)
    return a, b


def test_a_known_key_speaks_in_no_other_name(world, dealer):
    a, b = known_dealer(world, dealer)
    b.meet(JOB, [msgspec.structs.replace(b.peer, node="c", endpoint="tcp://127.0.0.1:1", key=make_keys().public)])
    a.try_to_send(hello(sender="c"))
    world.until(lambda: b.refused["sender"] == 1)
    assert not b._remote_of(JOB, "c").link._heard_end


@pytest.mark.parametrize(
    ("frame", "release"),
    [
        (lambda: hello(version=NEXT), "ckptd 9.9"),
        (lambda: msgspec.msgpack.encode([NEXT, "a", {"to": "b"}, None, "no packet", "9.9", "more"]), "ckptd 9.9"),
        (lambda: msgspec.msgpack.encode([NEXT, "a", "b"]), "ckptd of unknown version"),
    ],
)
def test_another_version_is_refused_and_reported(world, dealer, frame, release):
    """Whatever its packets look like from the third item on."""
    a, b = known_dealer(world, dealer)
    a.try_to_send(frame())
    world.until(lambda: b.refused["malformed"] == 1)
    world.spend(1.0)
    (told,) = b.problems()
    ours = f"this daemon (protocol {packets.VERSION}, ckptd {__version__})"
    assert f"node a (protocol {NEXT}, {release}) cannot speak with {ours}" in told
    assert "install one version of ckptd on all nodes" in told


def test_garbage_is_counted_and_too_large_a_packet_ends_the_connection(world, dealer):
    a, b = known_dealer(world, dealer)
    a.try_to_send(b"\xc1\xff")
    world.until(lambda: b.refused["malformed"] == 1)
    a.try_to_send(bytes(packets.MAX_PACKET_NBYTES + 1))
    world.spend(0.5)
    assert b.refused["malformed"] == 1
    world.until(lambda: a.try_to_send(b"\xc1\xff"))
    world.until(lambda: b.refused["malformed"] == 2)


def test_a_replayed_packet_is_not_delivered_again(world, dealer):
    """Even from one who has the key: what was sent in a life that is over, or was received already, is nothing."""
    a, b = world.start("a"), world.start("b")
    world.all_meet()
    world.until(lambda: world.ups("a") and world.ups("b"))
    recorded = []
    remote = a._remote_of(JOB, "b")
    remote.transmit, transmit = lambda frame: (recorded.append(frame), transmit(frame)), remote.transmit
    a.send(JOB, "b", staged("a", 1))
    world.until(lambda: world.counters("b") == [1])
    again = dealer(b, a._identity.keys)
    world.until(lambda: again.try_to_send(recorded[0]))
    for frame in recorded:
        again.try_to_send(frame)
    world.spend(0.3)
    assert world.counters("b") == [1]
    world.stop("a")
    world.start("a").meet(JOB, [b.peer])
    world.until(lambda: len(world.ups("b")) == 2)
    for frame in recorded:
        again.try_to_send(frame)
    world.spend(0.3)
    assert world.counters("b") == [1]
    assert len(world.ups("b")) == 2
    exchange(world)


def test_one_key_file_for_all_nodes(world, tmp_path):
    path = str(tmp_path / "key.toml")
    write_keys(path, make_keys())
    for node in "abc":
        world.start(node, key_file=path)
    assert len({plane.peer.key for plane in world.planes.values()}) == 1
    world.all_meet()
    world.until(lambda: all(len(world.ups(node)) == 2 for node in "abc"))
    exchange(world)
    exchange(world, "b", "c")
    assert [event.node for event in world.of("c", ev.SaveStaged)] == ["b"]


# --- bulk


def test_bulk_is_offered_under_a_secret_of_each_link(pair):
    a, b = pair.planes["a"], pair.planes["b"]
    assert a.bulk_address(JOB, "b") is None
    b.offer_bulk(4321)
    pair.until(lambda: a.bulk_address(JOB, "b"))
    host, port, link_id, secret = a.bulk_address(JOB, "b")
    assert (host, port) == ("127.0.0.1", 4321)
    assert b.bulk_guest(link_id) == ("a", secret, frozenset([JOB]))
    assert b.bulk_address(JOB, "a") is None
    give_up(a._remote_of(JOB, "b").link)
    pair.until(lambda: len(pair.ups("a")) == 2 and len(pair.ups("b")) == 2)
    pair.until(lambda: a.bulk_address(JOB, "b"))
    assert b.bulk_guest(link_id) is None
    assert a.bulk_address(JOB, "b")[2:] != (link_id, secret)
    b.offer_bulk(0)
    pair.until(lambda: a.bulk_address(JOB, "b") is None)
    b.offer_bulk(4322)
    pair.until(lambda: a.bulk_address(JOB, "b") and a.bulk_address(JOB, "b")[1] == 4322)
    assert len(b._offers.guests) == 1
    b.forget(JOB)
    assert not b._offers.guests
    pair.until(lambda: a.bulk_address(JOB, "b") is None)


def test_a_port_that_is_taken_is_a_setting_to_change(world, tmp_path):
    a = world.start("a")
    port = int(a.peer.endpoint.rpartition(":")[2])
    with pytest.raises(ConfigError, match="cannot listen for other daemons") as caught:
        a_plane(tmp_path / "x", "x", peer_port=port)
    assert "peer_port" in caught.value.hint


# --- what cannot be connected to


def test_a_key_that_is_none_is_refused_where_a_peer_is_decoded():
    raw = msgspec.msgpack.encode(Peer("n", "arena", "tcp://127.0.0.1:1", '"' * 40))
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(raw, type=Peer)
    good = Peer("n", "arena", "tcp://127.0.0.1:1", make_keys().public)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(good), type=Peer) == good


def test_a_peer_whose_key_cannot_be_used_is_down_and_reported_and_harms_none(pair):
    a = pair.planes["a"]
    a.meet(JOB, [msgspec.structs.replace(a.peer, node="c", key="#" * 40)])  # in the alphabet, and no number
    pair.until(lambda: any("node c" in problem and "no connection" in problem for problem in a.problems()))
    exchange(pair)


def test_without_descriptors_a_peer_is_down_until_there_are_some(world, monkeypatch):
    a, _ = world.start("a"), world.start("b")
    monkeypatch.setattr(remote_module, "_AGAIN_S", 0.2)
    real, full = a._context.socket, [True]

    def socket(*args):
        if full[0]:
            raise zmq.ZMQError(errno.EMFILE)
        return real(*args)

    monkeypatch.setattr(a._context, "socket", socket)
    world.all_meet()
    world.until(lambda: any("Too many open files" in problem for problem in a.problems()))
    full[0] = False
    world.until(lambda: world.ups("a") and world.ups("b"))
    exchange(world)


def test_two_daemons_of_one_name_serve_each_its_own_job(tmp_path):
    with World(tmp_path) as world:
        a = world.start("a")
        for name, job in (("one", JOB), ("two", OTHER)):
            b = world.planes[name] = a_plane(tmp_path / name, "b")
            world.heard[name] = []
            a.meet(job, [b.peer])
            b.meet(job, [a.peer])
            b.offer_bulk(4000 + len(world.planes))
        world.until(lambda: all(a.bulk_address(job, "b") for job in (JOB, OTHER)))
        assert [a.bulk_address(job, "b")[1] for job in (JOB, OTHER)] == [4002, 4003]
        world.stop("two")
        world.until(lambda: a.bulk_address(OTHER, "b") is None)
        assert a.bulk_address(JOB, "b")[1] == 4002


# --- many


def test_a_turn_costs_what_is_due_however_many_peers_there_are(world, monkeypatch):
    """Links that are up, tied at different moments, with nothing to say but that they live."""
    now = [0.0]
    a = world.start("a")
    monkeypatch.setattr(a, "_clock", lambda: now[0])
    monkeypatch.setattr(plane_module.Remote, "connect", lambda _: None)
    keys = make_keys()
    count = 400
    for number in range(count):
        now[0] += TIMEOUT_S / count
        node = f"n{number}"
        a.meet(JOB, [msgspec.structs.replace(a.peer, node=node, key=keys.public)])
        link = a._remote_of(JOB, node).link
        link.receive(packets.Packet(7, 8, link._end, hello=False, seq=0, ack=0, body=b""), now[0])
        a._flush(a._remote_of(JOB, node))
    steps = [0]
    real = Link.step

    def step(link, at, _listened_at):
        steps[0] += 1
        link._heard_at = at  # they answer
        return real(link, at)

    monkeypatch.setattr(Link, "step", step)
    end = now[0] + 4 * TIMEOUT_S
    while now[0] < end:
        a.tick()
        now[0] = max(now[0] + 1e-4, a.next_deadline())
    assert all(view.up for view in a.views())
    assert count <= steps[0] / 4 <= 40 * count
