"""Daemons that come with the ticket of a session, and those that come without, over real connections."""

import os

import msgspec
import pytest
import zmq

from ckptd.core import events as ev
from ckptd.peers import packets
from ckptd.peers.keys import make_keys
from ckptd.peers.meetings import session_keys
from ckptd.shared.base.ids import JobKey
from ckptd.shared.protocol.topology import Rendezvous
from tests.unit.peers.planes import JOB, OTHER, TIMEOUT_S, staged

TICKET = bytes(range(32))


def rendezvous(world, ticket=TICKET):
    return Rendezvous(world.planes["a"].peer, ticket)


@pytest.fixture(name="pair")
def fixture_pair(world):
    for node in "ab":
        world.start(node)
    return world


def all_meet(world, session="s", ticket=TICKET):
    for plane in world.planes.values():
        plane.meet_at(JOB, session, rendezvous(world, ticket))


def test_a_daemon_with_the_ticket_is_accepted_whichever_comes_first(world):
    for node in "abc":
        world.start(node)
    world.planes["b"].meet_at(JOB, "s", rendezvous(world))
    world.spend(0.3)
    assert world.ups("b") == []
    for node in "ac":
        world.planes[node].meet_at(JOB, "s", rendezvous(world))
    world.until(lambda: world.ups("b") and world.ups("c") and len(world.ups("a")) == 2)
    assert world.planes["b"].send(JOB, "a", staged("b", 7))
    world.until(lambda: world.counters("a") == [7])
    assert all(plane.problems() == [] for plane in world.planes.values())
    assert world.ups("b") == [True], "the two that came know nothing of each other"


def test_a_daemon_without_the_ticket_is_never_accepted(pair):
    a, b = pair.planes["a"], pair.planes["b"]
    a.meet_at(JOB, "s", rendezvous(pair))
    b.meet_at(JOB, "s", rendezvous(pair, bytes(32)))
    pair.spend(TIMEOUT_S)
    assert pair.ups("a") == pair.ups("b") == []
    assert a.views() == []
    assert sum(a.refused.values()) == 0, "its packets do not get in"
    assert any("was refused" in line for line in a.problems())


def presented(pair, *, job=JOB, session="s", key_of=("s", JOB), sender="b", peer=None, ticket=TICKET, heard=True):
    """What node a counts when a daemon says this under a session's key; or in a while, where it is not to be heard."""
    a = pair.planes["a"]

    def counts():
        return [view.node for view in a.views()], dict(a.refused)

    before = counts()
    keys = session_keys(key_of[1], key_of[0], ticket)
    body = packets.encode_body(packets.Present(job, session, peer or pair.planes["b"].peer))
    frame = packets.wrap(packets.Packet(0, 0, 0, hello=True, body=body), sender, "a", "")
    context = zmq.Context()
    with context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.curve_serverkey = a.peer.key.encode()
        socket.curve_publickey, socket.curve_secretkey = keys.public.encode(), keys.secret.encode()
        socket.connect(a.peer.endpoint)
        socket.send(frame)
        pair.until(lambda: counts() != before, 20.0) if heard else pair.spend(0.5)
    context.term()
    return counts()


def test_a_ticket_is_good_for_one_session_and_one_message(pair):
    pair.planes["a"].meet_at(JOB, "s", rendezvous(pair))
    other = msgspec.structs.replace(pair.planes["b"].peer, node="c")
    assert presented(pair, job=OTHER) == ([], {"sender": 1})
    assert presented(pair, session="t") == ([], {"sender": 2})
    assert presented(pair, peer=other) == ([], {"sender": 3}), "in another's name"
    assert presented(pair, key_of=("t", JOB), heard=False) == ([], {"sender": 3}), (
        "the key of another session does not get in"
    )
    assert presented(pair) == (["b"], {"sender": 3})


def test_what_is_no_presentation_is_dropped_under_a_tickets_key(pair, monkeypatch):
    pair.planes["a"].meet_at(JOB, "s", rendezvous(pair))
    message = ev.SaveStaged(job=JOB, node="b", save=staged("b", 1).save)
    monkeypatch.setattr(packets, "Present", lambda *_: packets.Message(packets._encoder.encode(message)))
    assert presented(pair) == ([], {"sender": 1})


def test_a_ticket_ends_with_its_session(pair):
    a, b = pair.planes["a"], pair.planes["b"]
    a.meet_at(JOB, "s", rendezvous(pair))
    a.meetings.end(JOB, "s")
    b.meet_at(JOB, "s", rendezvous(pair))
    pair.spend(1.0)
    assert pair.ups("a") == []
    a.meet_at(JOB, "s", rendezvous(pair))
    pair.until(lambda: pair.ups("a") and pair.ups("b"))
    a.forget(JOB)
    pair.spend(0.3)
    assert a.meetings.of(session_keys(JOB, "s", TICKET).public) is None


def test_who_came_with_a_ticket_stays_when_it_ends(pair):
    all_meet(pair)
    pair.until(lambda: pair.ups("a") and pair.ups("b"))
    for plane in pair.planes.values():
        plane.meetings.end(JOB, "s")
    assert pair.planes["b"].send(JOB, "a", staged("b", 9))
    pair.until(lambda: pair.counters("a") == [9])


def test_a_second_daemon_of_one_name_is_not_accepted_and_is_reported(pair):
    all_meet(pair)
    pair.until(lambda: pair.ups("a") and pair.ups("b"))
    twin = msgspec.structs.replace(pair.planes["b"].peer, key=make_keys().public, arena="another")
    _, refused = presented(pair, peer=twin)
    assert refused == {"sender": 1}
    (told,) = pair.planes["a"].problems()
    assert "a second daemon calls itself node 'b'" in told
    assert "CKPTD_NODE" in told


def test_nothing_is_due_while_the_other_daemon_answers(pair):
    all_meet(pair)
    pair.until(lambda: pair.ups("a") and pair.ups("b"))
    b = pair.planes["b"].meetings
    pair.until(lambda: b.next_deadline() is None)
    pair.stop("a")
    pair.until(lambda: b.next_deadline() is not None, 2 * TIMEOUT_S + 5.0)


def test_a_daemon_that_lost_its_topology_and_its_peers_meets_them_again_by_the_ticket(pair):
    all_meet(pair)
    pair.until(lambda: pair.ups("a") and pair.ups("b"))
    pair.stop("a")
    a = pair.start("a")  # the same arena: key and port are what they were
    a.meet_at(JOB, "s", rendezvous(pair))
    pair.until(lambda: pair.ups("a") and len(pair.ups("b")) == 2, 30.0)


def test_keys_of_a_session_depend_on_job_session_and_ticket():
    made = {
        session_keys(JOB, "s", TICKET).public,
        session_keys(JOB, "t", TICKET).public,
        session_keys(JobKey(JOB.store, "another"), "s", TICKET).public,
        session_keys(JOB, "s", os.urandom(32)).public,
    }
    assert len(made) == 4
    assert session_keys(JOB, "s", TICKET) == session_keys(JOB, "s", TICKET)
