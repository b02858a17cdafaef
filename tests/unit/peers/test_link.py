"""The link's promises on a network that loses, repeats, delays and reorders, with restarts of either side."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from ckptd.peers import link as link_module
from ckptd.peers.link import Down, Got, Link, Up
from tests.links import give_up

TIMEOUT_S = 10.0


class Side:
    """A daemon's end: one Link per life, and what was sent and got in each period between two Ups."""

    def __init__(self, name, numbers):
        self.name = name
        self.numbers = numbers
        self.instance = 0
        self.sent = []  # per period: (life, [bodies])
        self.got = []  # per period: (life, fresh, [bodies])
        self.downs = 0
        self.restart()

    def restart(self):
        self.instance += 1
        instance = next(self.numbers)
        self.link = Link(instance=instance, timeout_s=TIMEOUT_S, new_end=lambda: next(self.numbers))
        self.up = False

    def say(self, number):
        body = f"{self.name}{self.instance}.{number}".encode()
        if self.link.send(body):
            self.sent[-1][1].append(body)

    def say_next(self, number, now):
        """In short, where that is possible: the packet."""
        body = f"{self.name}{self.instance}.{number}".encode()
        packet = self.link.send_next(body, now)
        if packet is not None:
            self.sent[-1][1].append(body)
        return packet

    def takes_next(self, packet, now):
        """In short, where that is possible."""
        if not self.link.take_next(packet, packet.body, now):
            return False
        if packet.body:
            self.got[-1][2].append(packet.body)
        return True

    def hear(self):
        for update in self.link.take_updates():
            match update:
                case Up():
                    self.up = True
                    self.sent.append((self.instance, []))
                    self.got.append((self.instance, update.fresh, []))
                case Down():
                    assert self.up
                    self.up = False
                    self.downs += 1
                case Got():
                    assert self.up
                    self.got[-1][2].append(update.body)


class World:
    """Two sides, a clock, and all packets under way."""

    def __init__(self):
        numbers = itertools.count(1)
        self.sides = [Side("a", numbers), Side("b", numbers)]
        self.now = 100.0
        self.air = []  # (to, packet)
        self.words = itertools.count()

    def step(self, i):
        side = self.sides[i]
        for packet in side.link.step(self.now):
            self.air.append((1 - i, packet))
        side.hear()

    def arrive(self, index, *, keep=False, short=False):
        to, packet = self.air[index] if keep else self.air.pop(index)
        if not (short and self.sides[to].takes_next(packet, self.now)):
            self.sides[to].link.receive(packet, self.now)
        self.sides[to].hear()
        self.step(to)

    def say_next(self, i):
        packet = self.sides[i].say_next(next(self.words), self.now)
        if packet is None:
            self.say(i)
        else:
            self.air.append((1 - i, packet))

    def say(self, i):
        self.sides[i].say(next(self.words))
        self.sides[i].hear()
        self.step(i)

    def calm(self, seconds):
        """A network without faults for a while."""
        end = self.now + seconds
        while self.now < end:
            for i in (0, 1):
                self.step(i)
            while self.air:
                self.arrive(0)
            self.now += 0.05

    def check(self):
        """Each period's bodies are the beginning of one period of the other side, never of two, never older ones."""
        for me, other in (self.sides, self.sides[::-1]):
            sources = []
            lives = []
            for _, _, got in me.got:
                if not got:
                    continue
                periods = [i for i, (_, sent) in enumerate(other.sent) if sent[: len(got)] == got]
                assert periods, (got, other.sent)
                sources.append(periods[0])
                lives.append(other.sent[periods[0]][0])
            assert len(set(sources)) == len(sources)
            assert lives == sorted(lives)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["say", "say", "say_next", "say_next", "step"]), st.integers(0, 1)),
        st.tuples(
            st.sampled_from(["arrive", "arrive", "take_next", "take_next", "repeat", "lose"]), st.integers(0, 200)
        ),
        st.tuples(st.just("wait"), st.sampled_from([1, 3, 10, 30, 110, 300])),
        st.tuples(st.just("restart"), st.integers(0, 1)),
        st.tuples(st.just("give_up"), st.integers(0, 1)),
        st.tuples(st.just("calm"), st.sampled_from([1, 5, 20])),
    ),
    max_size=120,
)


def disturb(world, what, n):
    side = world.sides[n % 2]
    match what:
        case "say":
            world.say(n)
        case "say_next":
            world.say_next(n)
        case "step":
            world.step(n)
        case "wait":
            world.now += n / 10
        case "restart":
            side.restart()
        case "give_up":
            give_up(side.link)
            side.hear()
        case "calm":
            world.calm(n / 10)
        case "lose" if world.air:
            world.air.pop(n % len(world.air))
        case "arrive" | "repeat" | "take_next" if world.air:
            world.arrive(n % len(world.air), keep=what == "repeat", short=what == "take_next")


@settings(max_examples=max(100, settings.default.max_examples))
@given(STEPS)
def test_in_order_once_or_up_again(steps):
    world = World()
    for what, n in steps:
        disturb(world, what, n)
        world.check()
    world.calm(2 * TIMEOUT_S)
    world.check()
    for me, other in (world.sides, world.sides[::-1]):
        assert me.up
        assert me.got[-1][2] == other.sent[-1][1], "a period that lasts delivers all that was sent in it"
    downs = [side.downs for side in world.sides]
    world.calm(3 * TIMEOUT_S)
    assert [side.downs for side in world.sides] == downs
    assert not world.sides[0].link.queued


@settings(max_examples=60)
@given(st.lists(st.integers(0, 1), max_size=200), st.integers(0, 30), st.integers(0, 1 << 30))
def test_loss_alone_costs_nothing_but_time(words, percent, seed):
    """While both live and most packets get through, everything arrives in one period."""
    world = up_world()
    dice = random.Random(seed)
    for i in words:
        world.say(i)
        world.now += 0.01
    for _ in range(400):
        for i in (0, 1):
            world.step(i)
        while world.air:
            if dice.randrange(100) < percent:
                world.air.pop(0)
            else:
                world.arrive(0)
        world.now += 0.05
    for me, other in (world.sides, world.sides[::-1]):
        assert len(me.got) == 1
        assert me.got[0][2] == other.sent[0][1]


def up_world():
    world = World()
    world.calm(1)
    assert all(side.link.up for side in world.sides)
    return world


def test_first_contact_is_fresh_on_both_sides():
    world = up_world()
    assert [[fresh for _, fresh, _ in side.got] for side in world.sides] == [[True], [True]]


def test_a_restart_is_fresh_for_the_one_who_stayed():
    world = up_world()
    world.sides[1].restart()
    world.calm(1)
    assert [fresh for _, fresh, _ in world.sides[0].got] == [True, True]
    assert world.sides[0].downs == 0  # the news is there sooner than the timeout


def test_silence_is_down_and_the_same_process_is_not_fresh():
    world = up_world()
    for _ in range(30):
        world.now += 0.5
        world.step(0)
        world.air.clear()
    assert world.sides[0].downs == 1
    assert not world.sides[0].link.send(b"x")
    world.calm(2)
    assert [fresh for _, fresh, _ in world.sides[0].got] == [True, False]
    assert [fresh for _, fresh, _ in world.sides[1].got] == [True, False]


def test_a_full_queue_is_given_up_not_grown(monkeypatch):
    world = up_world()
    monkeypatch.setattr(link_module, "MAX_QUEUED", 10)
    link = world.sides[0].link
    assert all(link.send(b"x") for _ in range(10))
    assert not link.send(b"x")
    assert (link.up, link.queued) == (False, 0)
    assert [type(update) for update in link.take_updates()] == [Down]
    world.sides[0].up = False
    world.calm(1)
    assert [len(side.got) for side in world.sides] == [2, 2]


def test_large_bodies_are_bound_by_bytes():
    world = up_world()
    link = world.sides[0].link
    for _ in range(link_module.MAX_QUEUED_NBYTES >> 22):
        assert link.send(bytes(1 << 22))
    assert not link.send(b"x")


def test_a_window_is_kept():
    world = up_world()
    for _ in range(300):
        world.sides[0].link.send(b"x")
    assert len(world.sides[0].link.step(world.now)) == link_module._WINDOW
    assert world.sides[0].link.step(world.now) == []


def test_one_large_body_passes_alone():
    world = up_world()
    link = world.sides[0].link
    for _ in range(2):
        link.send(bytes(link_module._WINDOW_NBYTES + 1))
    assert len(link.step(world.now)) == 1


def test_late_packets_of_a_dead_life_change_nothing():
    world = World()
    kept = []
    for _ in range(40):  # everything that the first life says is kept
        for i in (0, 1):
            world.step(i)
        kept += [letter for letter in world.air if letter[0] == 0]
        while world.air:
            world.arrive(0)
        world.now += 0.05
    world.sides[1].say(next(world.words))
    world.step(1)
    kept += [letter for letter in world.air if letter[0] == 0]
    world.sides[1].restart()
    world.air.clear()
    world.calm(1)
    before = [(side.downs, len(side.got)) for side in world.sides]
    for _, packet in kept:
        world.sides[0].link.receive(packet, world.now)
        world.sides[0].hear()
    world.calm(3 * TIMEOUT_S)
    assert [(side.downs, len(side.got)) for side in world.sides] == before
    assert world.sides[0].got[-1][2] == []


@pytest.mark.parametrize("idle", [5.0, 60.0])
def test_an_idle_link_stays_up_and_says_little(idle):
    world = up_world()
    count = 0
    end = world.now + idle
    while world.now < end:
        world.now = max(world.now + 1e-6, min(side.link.next_deadline() for side in world.sides))
        for i in (0, 1):
            world.step(i)
        count += len(world.air)
        while world.air:
            world.arrive(0)
    assert all(side.downs == 0 for side in world.sides)
    assert count <= 2 * (idle / (TIMEOUT_S / 4) + 2)


def test_an_unanswered_link_says_hello_about_once_a_second():
    world = World()
    for _ in range(2000):
        world.now += 0.05
        world.step(0)
    assert 90 <= len(world.air) <= 120


# --- what is sent again: what was lost, and nothing because the other side is busy


def bodies(world, to=1):
    return [packet.body for end, packet in world.air if end == to and packet.body]


def pass_time(world, seconds, *sides):
    """These sides are at work, and nothing arrives."""
    end = world.now + seconds
    while world.now < end - 1e-9:
        world.now += 0.05
        for i in sides:
            world.step(i)


def deliver(world):
    while world.air:
        world.arrive(0)


def said(world, count):
    for _ in range(count):
        world.say(0)
    return world.sides[0].sent[-1][1]


def acks(world):
    return [packet.ack for end, packet in world.air if end == 0]


def test_an_acknowledgement_travels_with_an_answer():
    world = up_world()
    said(world, 3)
    for _ in range(3):
        world.arrive(0)
    world.say(1)
    assert acks(world) == [3]
    world.arrive(0)
    pass_time(world, 1.0, 1)
    assert acks(world) == [], "nothing is left to acknowledge"


def test_an_acknowledgement_leaves_alone_soon():
    world = up_world()
    said(world, 3)
    for _ in range(3):
        world.arrive(0)
    assert acks(world) == []
    assert world.sides[1].link.next_deadline() <= world.now + link_module.ACK_S
    pass_time(world, link_module.ACK_S, 1)
    assert acks(world) == [3]


def test_links_acknowledge_at_the_same_moments():
    deadlines = set()
    for later in (0.0, 0.013, 0.03, 0.049):
        world = up_world()
        world.now += 0.1 - world.now % 0.1 + later
        said(world, 1)
        world.arrive(0)
        deadlines.add(round(world.sides[1].link.next_deadline(), 6))
    assert len(deadlines) == 1


def test_a_sender_never_waits_for_its_window():
    """What it may have under way is acknowledged when a quarter of it has come."""
    world = up_world()
    words = said(world, 500)
    while world.air:
        world.arrive(0)
    assert world.sides[1].got[-1][2] == words


def test_a_large_body_behind_a_small_one_does_not_wait_for_the_delay_of_its_acknowledgement():
    world = up_world()
    link = world.sides[0].link
    large = bytes(link_module._WINDOW_NBYTES)
    for body in (b"small", large, large, b"last"):
        link.send(body)
    world.step(0)
    assert bodies(world) == [b"small"]
    pass_time(world, link_module.ACK_S, 0)
    assert len(world.air) == 2, "it asks once in a round trip"
    deliver(world)
    assert [len(body) for body in world.sides[1].got[-1][2]] == [5, len(large), len(large), 4]


def test_who_waits_for_room_asks_again_when_what_was_lost_is_under_way_again():
    world = up_world()
    for body in (b"small", bytes(link_module._WINDOW_NBYTES)):
        world.sides[0].link.send(body)
    world.step(0)
    world.air.pop(0)
    deliver(world)
    assert [len(body) for body in world.sides[1].got[-1][2]] == [5, link_module._WINDOW_NBYTES]


def test_who_waits_for_room_does_not_ask_for_an_acknowledgement_that_comes_at_once():
    world = up_world()
    for _ in range(3):
        world.sides[0].link.send(bytes(link_module._WINDOW_NBYTES // 2 + 1))
    world.step(0)
    assert len(world.air) == 1
    deliver(world)
    assert len(world.sides[1].got[-1][2]) == 3


def test_a_busy_receiver_gets_nothing_twice():
    world = up_world()
    words = said(world, 30)
    pass_time(world, 5.0, 0)
    assert bodies(world) == words
    assert len(world.air) <= len(words) + 5.0 / link_module.PROBE_S, "little else waits for it"
    deliver(world)
    assert world.sides[1].got[-1][2] == words
    pass_time(world, 5.0, 0, 1)
    assert bodies(world) == []


def test_what_was_lost_before_another_packet_is_sent_again_once_and_at_once():
    world = up_world()
    words = said(world, 10)
    del world.air[3:5]
    again = []
    while world.air:
        again += bodies(world)[:1] if world.air[0][0] == 1 else []
        world.arrive(0)
    assert world.sides[1].got[-1][2] == words
    assert again == words[:3] + words[5:] + words[3:], "from the first lost one, once"


def test_the_last_packet_is_missed_when_its_sender_probes():
    world = up_world()
    words = said(world, 3)
    world.air.clear()
    end = world.now + link_module.PROBE_S + 0.1
    while world.now < end:
        pass_time(world, 0.05, 0, 1)
        deliver(world)
    assert world.sides[1].got[-1][2] == words


def test_an_acknowledgement_that_was_lost_is_had_by_a_probe():
    world = up_world()
    words = said(world, 3)
    for _ in words:
        world.arrive(0)
    world.air.clear()
    pass_time(world, link_module.PROBE_S, 0)
    assert bodies(world) == []
    deliver(world)
    assert world.sides[0].link.queued == 0
    assert world.sides[1].got[-1][2] == words


def test_a_side_that_answers_all_the_time_still_probes():
    """What it says in between acknowledges, and does not tell what was lost."""
    world = up_world()
    words = said(world, 1)
    world.air.clear()
    for _ in range(int(2 * link_module.PROBE_S / 0.05)):
        world.now += 0.05
        world.say(1)
        deliver(world)
        world.step(0)
    deliver(world)
    assert world.sides[1].got[-1][2] == words


def test_what_the_connection_does_not_take_is_sent_soon_after_it_is_open():
    world = up_world()
    words = said(world, 3)
    world.air.clear()
    link = world.sides[0].link
    for _ in range(10):  # there is no connection
        link.dropped(world.now)
        world.now = link.next_deadline()
        assert link.step(world.now)
    link.dropped(world.now)
    before = world.now
    world.now = link.next_deadline()
    assert world.now - before <= 0.2001
    world.step(0)
    assert bodies(world) == []
    deliver(world)
    assert world.sides[1].got[-1][2] == words


def test_what_was_lost_is_said_again_when_the_packet_that_says_it_is_not_taken():
    world = up_world()
    words = said(world, 2)
    del world.air[0]  # the first body is lost, and the second shows it
    b = world.sides[1].link
    (_, packet), *rest = world.air
    assert not rest
    b.receive(packet, world.now)
    for _ in range(3):
        (answer,) = b.step(world.now)
        assert answer.lost == packet.attempt
        b.dropped(world.now)
        assert b.next_deadline() == pytest.approx(world.now + 0.2)
        assert b.step(world.now) == [], "not at once: there is no connection"
        world.now = b.next_deadline()
    world.air.clear()
    world.step(1)
    deliver(world)
    assert world.sides[1].got[-1][2] == words


def test_a_packet_that_is_late_does_not_hide_a_later_loss():
    world = up_world()
    said(world, 2)
    _, packet = world.air[1]
    link = world.sides[1].link
    link.receive(replace(packet, attempt=3), world.now)
    link.receive(packet, world.now)
    assert [answer.lost for answer in link.step(world.now)] == [3]


def twins(seed):
    """Two pairs of links in the same state, after the same words and losses; and the time."""
    worlds = [up_world(), up_world()]
    for world in worlds:
        dice = random.Random(seed)
        for _ in range(dice.randrange(12)):
            disturb(world, dice.choice(["say", "say", "arrive", "lose", "wait"]), dice.randrange(2))
    return worlds


@pytest.mark.parametrize("seed", range(200))
def test_what_is_done_in_short_is_what_is_done_step_by_step(seed):
    short, long = twins(seed)
    for me in (0, 1):
        one, other = short.sides[me].link, long.sides[me].link
        packet = one.send_next(b"next", short.now)
        if packet is not None:
            assert other.send(b"next")
            assert other.step(long.now) == [packet]
        for to, waiting in list(short.air):
            if to == me and one.take_next(waiting, waiting.body, short.now):
                other.receive(waiting, long.now)
                assert other.take_updates() == ([Got(waiting.body)] if waiting.body else [])
        for link in (one, other):
            link._new_end = None
        assert vars(one) == vars(other)


@pytest.mark.parametrize("seed", range(200))
def test_a_sign_of_life_in_short_is_what_is_sent_step_by_step(seed):
    short, long = twins(seed)
    for me in (0, 1):
        one, other = short.sides[me].link, long.sides[me].link
        for after_s in (0.0, 0.7, 1.3, 2.6, 11.0):
            packet = one.sign_next(short.now + after_s)
            if packet is not None:
                assert other.step(long.now + after_s) == [packet]
                assert not packet.body
                assert other.take_updates() == []
            assert {**vars(one), "_new_end": None} == {**vars(other), "_new_end": None}


def test_an_idle_link_says_all_in_short():
    world = up_world()
    a, b = (side.link for side in world.sides)
    world.calm(1.0)
    for count in range(1, 9):
        now = world.now + 2.5 * count
        signs = [(b, a.sign_next(now)), (a, b.sign_next(now))]
        assert all(packet is not None and to.take_next(packet, b"", now) for to, packet in signs)


def test_most_of_what_is_said_is_said_in_short():
    world = up_world()
    a, b = (side.link for side in world.sides)
    for number in range(100):
        packet = a.send_next(b"%d" % number, world.now)
        assert packet is not None
        assert b.take_next(packet, packet.body, world.now)
        world.now += 0.01
        for answer in b.step(world.now):
            assert a.take_next(answer, answer.body, world.now)


def test_a_hello_that_comes_again_does_not_begin_the_answers_again():
    """The connection to its sender is being made: an answer to each would be refused by ZeroMQ each time."""
    numbers = itertools.count(1)
    link = Link(instance=1, timeout_s=TIMEOUT_S, new_end=lambda: next(numbers))
    first = link.step(0.0)[0]
    answers = []
    for count in range(1, 101):
        now = count / 100
        link.receive(replace(first, instance=2, end=99), now)
        answers += link.step(now)
    assert len(answers) <= 7, "0.02 s after the first, and each time twice as late"
    link.receive(replace(first, instance=3, end=100), 1.01)
    assert [packet.to for packet in link.step(1.01)] == [100], "a newer one is answered at once"
