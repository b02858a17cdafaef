"""Packets in bundles: when they leave, each body once, none too large."""

import pytest

from ckptd.peers.bundles import Bundles, Hop, opened
from ckptd.peers.packets import (
    MAX_BODY_NBYTES,
    MAX_LETTERS,
    Forward,
    Forwarded,
    Letter,
    Packet,
    decode_body,
    encode_body,
)
from ckptd.shared.base.ids import JobKey

JOB = JobKey("/store", "job")
UP = Hop("chief", "key", JOB, Forwarded)
DOWN = Hop("leader", "key", JOB, Forward)


def letter(node, body=b"", seq=0):
    return Letter(node, 1, Packet(1, 2, 3, False, seq, 0, body))


def packets(bundle):
    """As the receiver has them, after a way over the wire."""
    back = decode_body(encode_body(bundle))
    return [(one.node, opened(one, back.bodies)) for one in back.letters]


def test_letters_of_one_turn_leave_together_by_daemon_and_kind():
    bundles = Bundles()
    for node in ("a", "b"):
        bundles.add(UP, letter(node), 5.0)
        bundles.add(DOWN, letter(node), 6.0)
    assert bundles.next == 5.0
    assert bundles.take(4.9) == []
    assert bundles.take(5.0) == [(UP, Forwarded(JOB, (letter("a"), letter("b"))))]
    assert bundles.take(6.0) == [(DOWN, Forward(JOB, (letter("a"), letter("b"))))]
    assert (bundles.take(7.0), bundles.next) == ([], None)


def test_the_letter_that_is_due_first_takes_all_others_with_it():
    bundles = Bundles()
    bundles.add(UP, letter("a"), 9.0)
    bundles.add(UP, letter("b"), 1.0)
    bundles.add(UP, letter("c"), 9.0)
    ((_, bundle),) = bundles.take(1.0)
    assert [one.node for one in bundle.letters] == ["a", "b", "c"]


def test_a_body_for_many_is_written_once_and_each_packet_has_it():
    bundles, order, other = Bundles(), bytes(1000), b"another"
    sent = [letter("a", order, 1), letter("b", order, 7), letter("c", other, 2), letter("d"), letter("e", order, 9)]
    for one in sent:
        bundles.add(DOWN, one, 1.0)
    ((_, bundle),) = bundles.take(1.0)
    assert bundle.bodies == (order, other)
    assert len(encode_body(bundle)) < 1500
    assert packets(bundle) == [(one.node, one.packet) for one in sent]


def test_a_body_of_any_legal_size_fits_and_bundles_are_cut_in_order():
    bundles, whole = Bundles(), MAX_BODY_NBYTES
    sizes = [whole, 400_000, 400_000, 400_000, 10, whole, 20]
    for number, nbytes in enumerate(sizes):
        bundles.add(UP, letter(f"n{number}", bytes(nbytes), 1), 1.0)
    taken = [bundle for _, bundle in bundles.take(1.0)]
    assert [len(bundle.letters) for bundle in taken] == [1, 2, 2, 1, 1]
    found = [(node, len(packet.body)) for bundle in taken for node, packet in packets(bundle)]
    assert found == [(f"n{number}", nbytes) for number, nbytes in enumerate(sizes)]


def test_a_bundle_has_so_many_letters_at_most():
    bundles = Bundles()
    for number in range(MAX_LETTERS + 1):
        bundles.add(UP, letter(f"n{number}"), 1.0)
    assert bundles.next == 0.0
    assert [len(bundle.letters) for _, bundle in bundles.take(1.0)] == [MAX_LETTERS, 1]


def test_all_that_waits_for_one_daemon_can_be_taken_and_nothing_else():
    bundles = Bundles()
    for hop in (UP, DOWN, UP._replace(kind=Forward)):
        bundles.add(hop, letter("a"), 9.0)
    for number in range(MAX_LETTERS):
        bundles.add(UP, letter(f"n{number}"), 9.0)
    taken = [(hop.kind, len(bundle.letters)) for hop, bundle in bundles.take_all(("chief", "key"))]
    assert taken == [(Forwarded, MAX_LETTERS), (Forwarded, 1), (Forward, 1)]
    assert [hop for hop, _ in bundles.take(9.0)] == [DOWN]
    assert bundles.take_all(("chief", "key")) == []


@pytest.mark.parametrize("place", [1, 2, MAX_LETTERS])
def test_a_letter_whose_body_is_not_there_has_no_packet(place):
    assert opened(Letter("a", 1, Packet(1, 2, 3), place), (b"",) * (place - 1)) is None
