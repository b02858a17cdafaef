"""When something is due is asked for once after each change."""

import itertools

from ckptd.core import events as ev
from ckptd.core.deadline import Deadline
from ckptd.core.jobs import Catalogue
from ckptd.core.policy import Policy
from ckptd.shared.protocol.messages import Tier
from tests.unit.core.nodes.a_cluster import KEY, ONE


def test_it_is_asked_for_once_after_each_change():
    answers = itertools.count(5)
    due = Deadline(lambda: float(next(answers)))
    assert (due.at, due.at, due.by(4.9), due.by(5.0)) == (5.0, 5.0, False, True)
    due.changed()
    assert (due.at, due.by(5.9)) == (6.0, False)


def test_nothing_is_due():
    due = Deadline(lambda: None)
    assert due.at is None
    assert not due.by(1e9)


def test_a_link_that_rests_may_make_something_due():
    """A segment is on its way from a node to which there is no link any more."""
    catalogue = Catalogue("a", Policy())
    catalogue.handle(ev.RankFound(job=KEY, rank=0, session="s", pid=1, host="h"), 0.0)
    catalogue.handle(ev.PeerUp(job=KEY, node="c"), 0.0)
    catalogue.handle(ev.FetchOrdered(job=KEY, node="a", rank=0, save=ONE, tier=Tier.PEER, holder="c"), 0.0)
    catalogue.tick(1.0)
    assert catalogue.next_deadline() is None
    catalogue.handle(ev.PeerDown(job=KEY, node="c", rests=True), 1.0)
    assert catalogue.next_deadline() == 0.0
