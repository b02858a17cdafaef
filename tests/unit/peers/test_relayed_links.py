"""Links whose packets go by a leader, with real sockets: the way moves, the link does not notice."""

import time

import msgspec
import pytest

from ckptd.core import events as ev
from ckptd.peers import relayed_links
from ckptd.peers.group import SIGN
from ckptd.peers.packets import MAX_LETTERS, Forward, Forwarded, Letter, decode_body, encode_body
from ckptd.peers.plane import PeerPlane
from ckptd.shared.base.ids import SaveId
from tests.runs import RUN
from tests.unit.peers.planes import JOB, OTHER, TIMEOUT_S, staged

MEMBERS = ("m1", "m2")
PATIENCE_S = TIMEOUT_S / 2  # with a relayed path


@pytest.fixture
def group(world):
    """A coordinator, a leader and two members, which keep the links that the core wants."""
    for node in ("chief", "leader", *MEMBERS):
        world.start(node)
    begin(world)
    world.until(lambda: all(len(world.ups(node)) == 3 for node in ("chief", "leader")))
    world.until(lambda: all(len(world.ups(node)) == 2 for node in MEMBERS))
    return world


def begin(world, leader="leader", members=MEMBERS):
    peers = [plane.peer for plane in world.planes.values()]
    for node, plane in world.planes.items():
        PeerPlane.meet(plane, JOB, peers)
        keep(world, node, leader, members)


def keep(world, node, leader="leader", members=MEMBERS):
    plane = world.planes[node]
    if node == "chief":
        plane.keep_links(JOB, None, [(member, leader) for member in members if member in world.planes])
    elif node in members:
        plane.keep_links(JOB, ["chief", leader], [("chief", leader)])
    else:
        plane.keep_links(JOB, ["chief"], [])


def remote(world, node, other):
    return next(one for one in world.planes[node]._remotes.values() if one.peer.node == other)


def by(world, node, other):
    """By which leader the node's packets for the other go; None: directly."""
    via = remote(world, node, other).path.via
    return via.node if via is not None else None


def relayed(world, leader="leader", members=MEMBERS):
    """Whether all members and the coordinator have gone over to the leader, and have no socket to each other."""
    pairs = [pair for member in members for pair in ((member, "chief"), ("chief", member))]
    return all(by(world, *pair) == leader and remote(world, *pair)._socket is None for pair in pairs)


def downs(world, *nodes):
    return [(node, event.node) for node in nodes or world.planes for event in world.of(node, ev.PeerDown)]


def exchange(world, number, members=MEMBERS):
    for member in members:
        assert world.planes["chief"].send(JOB, member, staged("chief", number))
        assert world.planes[member].send(JOB, "chief", staged(member, number))
    world.until(lambda: all(number in world.counters(node) for node in members))
    world.until(lambda: world.counters("chief").count(number) == len(members))


def test_members_and_coordinator_go_over_to_the_leader_and_close_their_sockets(group):
    exchange(group, 1)
    group.until(lambda: relayed(group))
    exchange(group, 2)
    assert downs(group) == []
    assert [len(group.ups(node)) for node in MEMBERS] == [2, 2]
    assert all(plane.problems() == [] and not +plane.refused for plane in group.planes.values())
    group.spend(3.0)
    assert relayed(group)
    exchange(group, 3)
    assert downs(group) == []


# --- the way changes, the link stays


@pytest.fixture
def over(group):
    """All have gone over to the leader."""
    exchange(group, 1)
    group.until(lambda: relayed(group))
    return group


def freeze(world, *nodes):
    """They do nothing from here on, and their sockets stay open, as after SIGSTOP."""
    return {node: world.planes.pop(node) for node in nodes}


def kill(world, node):
    world.stop(node)


def direct(world, members=MEMBERS):
    pairs = [pair for member in members for pair in ((member, "chief"), ("chief", member))]
    return all(by(world, *pair) is None for pair in pairs)


def test_a_leader_that_is_killed_costs_no_link_but_its_own(over):
    kill(over, "leader")
    over.until(lambda: direct(over))
    exchange(over, 2)
    over.until(lambda: downs(over, "chief"))
    over.spend(1.0)
    assert set(downs(over)) <= {(node, "leader") for node in ("chief", *MEMBERS)}
    exchange(over, 3)


def test_messages_that_wait_for_a_lost_leader_arrive_once_and_in_order(over):
    chief = over.planes["chief"]
    kill(over, "leader")
    for number in range(10, 30):
        assert chief.send(JOB, "m1", staged("chief", number))
        assert over.planes["m1"].send(JOB, "chief", staged("m1", number))
        over.spend(0.01)
    over.until(lambda: over.counters("m1")[-20:] == over.counters("chief")[-20:] == list(range(10, 30)))
    assert (over.counters("m1").count(10), over.counters("chief").count(10)) == (1, 1)
    assert [pair for pair in downs(over) if "leader" not in pair] == []


def test_a_leader_that_is_stopped_for_a_while_has_its_members_again(over):
    stopped = freeze(over, "leader")
    over.until(lambda: direct(over))
    exchange(over, 2)
    over.planes |= stopped
    over.until(lambda: relayed(over))
    exchange(over, 3)
    assert [pair for pair in downs(over) if "leader" not in pair] == []


def test_a_leader_that_lives_and_does_not_pass_on_is_left_by_both_sides(over, monkeypatch):
    monkeypatch.setattr(over.planes["leader"], "_pass_on", lambda *_: None)
    over.until(lambda: direct(over))
    exchange(over, 2)
    assert downs(over) == []


@pytest.mark.parametrize("way", ["up", "down"])
def test_a_leader_that_passes_on_in_one_direction_alone_is_left(over, monkeypatch, way):
    leader = over.planes["leader"]
    pass_on = leader._pass_on

    def half(remote, bundle):
        if (remote.peer.node == "chief") == (way == "down"):
            pass_on(remote, bundle)

    monkeypatch.setattr(leader, "_pass_on", half)
    over.until(lambda: direct(over))
    exchange(over, 2)
    assert downs(over) == []


def test_a_leader_that_comes_back_as_another_process_leads_again(over):
    kill(over, "leader")
    over.until(lambda: direct(over))
    over.start("leader")
    begin(over)
    over.until(lambda: relayed(over))
    exchange(over, 2)
    assert [pair for pair in downs(over) if "leader" not in pair] == []


def test_a_leader_that_leaves_the_job_is_left_at_once(over):
    over.planes["leader"].forget(JOB)
    began = time.monotonic()
    over.until(lambda: direct(over))
    assert time.monotonic() - began < PATIENCE_S / 2
    exchange(over, 2)
    assert [pair for pair in downs(over) if "leader" not in pair] == []


def test_what_has_arrived_and_waits_is_no_silence(over, monkeypatch):
    chief = over.planes["chief"]
    monkeypatch.setattr(chief, "receive", list)
    over.spend(1.3 * PATIENCE_S)
    assert {by(over, "chief", node) for node in MEMBERS} == {"leader"}
    monkeypatch.undo()
    over.until(lambda: relayed(over))
    exchange(over, 2)
    assert downs(over) == []


def test_until_a_member_knows_of_another_leader_the_earlier_one_passes_its_packets_on(over):
    over.start("second")
    PeerPlane.meet(over.planes["second"], JOB, [plane.peer for plane in over.planes.values()])
    keep(over, "chief", leader="second")
    exchange(over, 2)
    over.spend(0.3)
    assert relayed(over)
    assert refused(over) == 0


def test_a_packet_of_no_connection_moves_no_path(over):
    chief = over.planes["chief"]
    late = msgspec.structs.replace(sign(over, "m1", "chief"), end=77)
    chief._heard(remote(over, "chief", "m1"), late, 4, time.monotonic())
    assert remote(over, "chief", "m1").path.number == 1


def test_another_leader_is_gone_over_to_without_a_direct_path(over):
    dialled = {node: remote(over, node, "chief").woken_at for node in MEMBERS}
    over.start("second")
    begin(over, leader="second")
    over.until(lambda: relayed(over, leader="second"))
    exchange(over, 2)
    assert dialled == {node: remote(over, node, "chief").woken_at for node in MEMBERS}
    assert all(remote(over, node, "chief").path.number % 2 for node in MEMBERS)
    assert [pair for pair in downs(over) if "leader" not in pair] == []


def test_without_a_leader_the_way_is_direct_again(over):
    for node in over.planes:
        keep(over, node, members=())
    over.planes["chief"].keep_links(JOB, None, [])
    for node in MEMBERS:
        over.planes[node].keep_links(JOB, ["chief"], [])
    over.until(lambda: direct(over))
    exchange(over, 2)
    assert [pair for pair in downs(over) if "leader" not in pair] == []


def test_a_coordinator_that_is_started_again_is_met_directly_and_then_by_the_leader(over):
    kill(over, "chief")
    over.spend(0.5)
    over.start("chief")
    over.heard["chief"] = []
    begin(over)
    over.until(lambda: relayed(over))
    exchange(over, 2)
    assert [over.ups(node, of="chief")[-1] for node in MEMBERS] == [True, True]


def test_a_member_that_is_started_again_is_met_directly_and_then_by_the_leader(over):
    kill(over, "m1")
    over.spend(0.5)
    over.start("m1")
    begin(over)
    over.until(lambda: relayed(over))
    exchange(over, 2)
    assert over.ups("chief", of="m1") == [True, True]
    assert over.ups("chief", of="m2") == [True]


def test_a_member_that_ended_is_noticed_within_the_timeout_and_nothing_else(over):
    kill(over, "m1")
    began = time.monotonic()
    over.until(lambda: ("chief", "m1") in downs(over))
    assert time.monotonic() - began < TIMEOUT_S * 1.2
    exchange(over, 2, members=("m2",))
    assert ("chief", "m2") not in downs(over)


def test_a_long_turn_of_the_coordinator_costs_no_link(over):
    chief = over.planes["chief"]
    stopped, until = freeze(over, "chief"), time.monotonic() + 1.5 * TIMEOUT_S
    chief.turn_begins()
    while time.monotonic() < until:
        over.turn()
    chief.turn_ends()
    over.planes |= stopped
    over.spend(0.5)
    assert downs(over) == []
    over.until(lambda: relayed(over))
    exchange(over, 2)


def test_a_long_turn_of_the_leader_costs_no_link(over):
    leader = over.planes["leader"]
    stopped, until = freeze(over, "leader"), time.monotonic() + 1.5 * TIMEOUT_S
    leader.turn_begins()
    while time.monotonic() < until:
        over.turn()
    leader.turn_ends()
    assert direct(over), "the leader's thread sends signs of its own life, and passes nothing on"
    over.planes |= stopped
    over.until(lambda: relayed(over))
    exchange(over, 2)
    assert downs(over) == []


def test_what_one_turn_orders_leaves_as_one_bundle_with_each_body_once(over, monkeypatch):
    chief, sent = over.planes["chief"], []
    transmit = chief._transmit
    monkeypatch.setattr(
        chief, "_transmit", lambda to, packet: (sent.append((to.peer.node, packet)), transmit(to, packet))
    )
    chief.turn_begins()
    order = staged("chief", 5)
    for node in MEMBERS:
        assert chief.send(JOB, node, order)
    chief.turn_ends()
    (to, packet) = sent[-1]
    bundle = decode_body(packet.body)
    assert to == "leader"
    assert {letter.node for letter in bundle.letters} == set(MEMBERS)
    assert len(bundle.bodies) == 1
    over.until(lambda: all(5 in over.counters(node) for node in MEMBERS))


# --- reports of how far a save is wait for those of the group


def report(node, number):
    save = SaveId(1, number, number, RUN)
    return ev.Report(job=JOB, node=node, event=ev.VoteWritten(job=JOB, save=save))


def reported(world):
    """What the coordinator received of them."""
    some = [report for event in world.heard["chief"] for report in getattr(event, "reports", (event,))]
    return [(one.node, one.event.save.counter) for one in some if isinstance(one, ev.Report)]


@pytest.fixture
def patient(over, monkeypatch):
    """A leader that waits for the whole group, when all that was said is acknowledged."""
    monkeypatch.setattr(relayed_links, "GROUP_S", 60.0)
    for group in over.planes["leader"]._groups.values():
        group._patience_s = 60.0
    exchange(over, 2)  # so that the leader has heard all members since
    links = [remote(over, *pair).link for node in MEMBERS for pair in ((node, "chief"), ("chief", node))]
    over.until(lambda: all(link._ack_at is None and not link.queued for link in links))
    for link in links:
        link._probe_s = 60.0  # nor does an end ask what has become of what it said
    monkeypatch.setattr(relayed_links, "_CALM_ON", 0.001)  # nor does a sign of life take them along
    over.until(lambda: not over.planes["leader"]._bundles)
    return over


def of_leader(over, monkeypatch):
    """Bundles that it passes on to the coordinator from here on: who says something in each."""
    leader, passed = over.planes["leader"], []
    send = leader._send_bundle

    def sent(hop, bundle, now):
        if hop.node == "chief" and any(letter.body for letter in bundle.letters):
            passed.append([letter.node for letter in bundle.letters if letter.body])
        send(hop, bundle, now)

    monkeypatch.setattr(leader, "_send_bundle", sent)
    return passed


def test_reports_of_a_group_leave_together_when_the_last_is_there(patient, monkeypatch):
    over = patient
    passed = of_leader(over, monkeypatch)
    assert over.planes["m1"].send(JOB, "chief", report("m1", 7))
    over.until(lambda: any(group._reported for group in over.planes["leader"]._groups.values()))
    assert reported(over) == []
    assert over.planes["m2"].send(JOB, "chief", report("m2", 7))
    over.until(lambda: sorted(reported(over)) == [("m1", 7), ("m2", 7)])
    assert passed == [["m1", "m2"]]
    assert [type(event) for event in over.heard["chief"][-1:]] == [ev.Reports]


def test_a_report_waits_for_no_other_for_long(over):
    assert over.planes["m1"].send(JOB, "chief", report("m1", 7))
    over.until(lambda: reported(over) == [("m1", 7)])


def test_what_does_not_wait_takes_earlier_reports_along_in_order(patient):
    over = patient
    assert over.planes["m1"].send(JOB, "chief", report("m1", 7))
    over.spend(0.1)
    assert over.planes["m1"].send(JOB, "chief", staged("m1", 8))
    over.until(lambda: 8 in over.counters("chief"))
    assert reported(over) == [("m1", 7)]
    kinds = [type(event) for event in over.heard["chief"]]
    assert kinds.index(ev.Report) < len(kinds) - 1 - kinds[::-1].index(ev.SaveStaged)


def said_to_wait(world, node, monkeypatch):
    """Of each body that the node hands to its leader from here on: to whom, and whether it waits there."""
    bundles, letters = world.planes[node]._bundles, []
    add = bundles.add

    def added(hop, letter, due):
        if letter.packet.body:
            letters.append((letter.node, letter.waits > SIGN))
        add(hop, letter, due)

    monkeypatch.setattr(bundles, "add", added)
    return letters


def test_what_leaves_with_a_report_does_not_wait_with_it(over, monkeypatch):
    """Bodies that were queued before, as after a loss; here one that nothing was flushed after."""
    plane = over.planes["m1"]
    link = remote(over, "m1", "chief").link
    letters = said_to_wait(over, "m1", monkeypatch)
    failed = ev.Report(
        job=JOB, node="m1", event=ev.VoteWritten(job=JOB, save=report("m1", 6).event.save, problem="EIO")
    )
    assert link.send(plane._once.of(failed))
    assert plane.send(JOB, "chief", report("m1", 7))
    assert letters == [("chief", False), ("chief", False)]
    assert plane.send(JOB, "chief", report("m1", 8))
    assert letters[2:] == [("chief", True)]
    over.until(lambda: reported(over) == [("m1", 6), ("m1", 7), ("m1", 8)])


def test_reports_that_wait_at_a_leader_that_is_killed_arrive_once_and_in_order(over, monkeypatch):
    monkeypatch.setattr(over.planes["leader"], "send_bundles", lambda: None)
    for number in (7, 8):
        assert over.planes["m1"].send(JOB, "chief", report("m1", number))
    over.spend(0.2)
    assert reported(over) == []
    kill(over, "leader")
    over.until(lambda: reported(over) == [("m1", 7), ("m1", 8)])
    exchange(over, 2)
    assert reported(over) == [("m1", 7), ("m1", 8)]
    assert [pair for pair in downs(over) if "leader" not in pair] == []


# --- what is refused


def bundle(world, sender, to, kind, *letters, bodies=()):
    """The daemon sends it over its link, whatever it is worth."""
    at = remote(world, sender, to)
    world.planes[sender]._transmit(at, at.link.aside(encode_body(kind(JOB, letters, bodies))))


def sign(world, node, other):
    return remote(world, node, other).link.keepalive


@pytest.fixture
def with_a_third(over):
    """A node that leads nobody, whose link to the coordinator is direct."""
    over.start("third")
    begin(over)
    over.until(lambda: over.ups("third", of="chief") and over.ups("chief", of="third"))
    return over


def refused(world, reason="relay", node="chief"):
    return world.planes[node].refused[reason]


@pytest.mark.parametrize(
    ("sender", "name", "path", "body"),
    [
        ("third", "m2", 1, 0),  # that leads nobody
        ("leader", "third", 1, 0),  # of a node that has no leader
        ("leader", "leader", 1, 0),
        ("leader", "nobody", 1, 0),
        ("leader", "m2", 2, 0),  # the number of a direct path
        ("leader", "m2", 1, 1),  # a body that is not there
    ],
)
def test_a_packet_in_a_members_name_is_taken_from_the_leader_that_was_named_alone(
    with_a_third, sender, name, path, body
):
    world = with_a_third
    before = refused(world)
    bundle(world, sender, "chief", Forwarded, Letter(name, path, sign(world, "m2", "chief"), body))
    world.until(lambda: refused(world) == before + 1)
    assert relayed(world)
    assert downs(world) == []


def test_a_member_takes_packets_of_its_coordinator_from_its_leader_alone(with_a_third):
    world = with_a_third
    world.planes["m1"].keep_links(JOB, ["chief", "leader", "third"], [("chief", "leader")])
    world.until(lambda: world.ups("third", of="m1"))
    bundle(world, "third", "m1", Forwarded, Letter("chief", 3, sign(world, "chief", "m1")))
    world.until(lambda: refused(world, node="m1") == 1)
    assert by(world, "m1", "chief") == "leader"


def test_a_late_bundle_of_an_earlier_leader_moves_nothing(over):
    late = Letter("m1", 1, sign(over, "m1", "chief"))
    over.start("second")
    begin(over, leader="second")
    over.until(lambda: relayed(over, leader="second"))
    before = refused(over)
    bundle(over, "leader", "chief", Forwarded, late)
    over.until(lambda: refused(over) > before)
    bundle(over, "second", "chief", Forwarded, late)
    over.spend(0.3)
    assert relayed(over, leader="second")
    assert by(over, "chief", "m1") == "second"
    exchange(over, 2)


def test_a_bundle_within_a_bundle_and_of_another_job_are_refused(over):
    inner = encode_body(Forward(JOB, (Letter("m2", 1, sign(over, "m1", "chief")),)))
    packet = msgspec.structs.replace(sign(over, "m1", "chief"), body=inner)
    before = refused(over, "job")
    bundle(over, "leader", "chief", Forwarded, Letter("m1", 1, sign(over, "m1", "chief"), 1), bodies=(inner,))
    over.until(lambda: refused(over, "job") == before + 1)
    at = remote(over, "leader", "chief")
    of_another = Forwarded(OTHER, (Letter("m1", 1, packet),))
    over.planes["leader"]._transmit(at, at.link.aside(encode_body(of_another)))
    over.until(lambda: refused(over, "job") == before + 2)
    assert relayed(over)


def test_a_leader_passes_nothing_on_to_a_node_that_it_has_no_link_to(over):
    bundle(over, "m1", "leader", Forward, Letter("nobody", 1, sign(over, "m1", "chief")))
    bundle(over, "m1", "leader", Forward, Letter("leader", 1, sign(over, "m1", "chief")))
    bundle(over, "m1", "leader", Forward, Letter("m1", 1, sign(over, "m1", "chief")))
    over.spend(0.3)
    exchange(over, 2)
    assert not +over.planes["leader"].refused


@pytest.mark.parametrize("bad", ["no letter", "too many letters", "a path of no number", "no job"])
def test_what_is_no_bundle_is_counted_and_the_link_stays(over, bad):
    letter = ["m1", 1, [1, 2, 3, False, 0, 0, b""], 0, False]
    job = [JOB.store, JOB.job]
    raw = {
        "no letter": ["forwarded", job, [], []],
        "too many letters": ["forwarded", job, [letter] * (MAX_LETTERS + 1), []],
        "a path of no number": ["forwarded", job, [[letter[0], -1, *letter[2:]]], []],
        "no job": ["forwarded", ["", ""], [letter], []],
    }[bad]
    at = remote(over, "leader", "chief")
    before = refused(over, "malformed")
    over.planes["leader"]._transmit(at, at.link.aside(msgspec.msgpack.encode(raw)))
    over.until(lambda: refused(over, "malformed") == before + 1)
    exchange(over, 2)
    assert downs(over) == []


# --- last words


@pytest.mark.parametrize("first", ["leader", "m1"])
def test_what_a_coordinator_says_last_reaches_members_though_their_leader_forgets_the_job_at_once(over, first):
    chief = over.planes["chief"]
    exchange(over, 2)
    over.planes["leader"]._passed_at.update({hop: time.monotonic() + 5.0 for hop in over.planes["leader"]._passed_at})
    forgotten = set()

    def all_have_received():
        for node in {"leader", *MEMBERS} - forgotten:
            if 9 in over.counters(node):
                over.planes[node].forget(JOB)
                forgotten.add(node)
        return forgotten == {"leader", *MEMBERS}

    for node in sorted(("leader", *MEMBERS), key=lambda node: node != first):
        assert chief.send(JOB, node, staged("chief", 9))
    in_its_turn, until = freeze(over, "chief"), time.monotonic() + 0.3
    while time.monotonic() < until:
        over.turn()
        all_have_received()
    chief.forget(JOB)
    chief.turn_ends()
    over.planes |= in_its_turn
    over.until(all_have_received)
