"""A node's share of a drain: who ordered it may coordinate no more, and a successor may order it again."""

import pytest

from ckptd.core import actions as act
from ckptd.core import events as ev
from ckptd.core.links import Links
from ckptd.core.node.drain import DrainShare
from ckptd.core.node.membership import Membership
from ckptd.core.node.parity import Protection
from ckptd.core.node.parity_share import ParityShare
from ckptd.core.node.ranks import LocalRanks
from ckptd.core.node.slots import SlotTable
from ckptd.core.node.standing import Standing
from ckptd.shared.base.ids import JobKey, SaveId
from tests.runs import RUN, STORE_ID
from tests.seals import a_seal

KEY = JobKey("/store", "job")
SAVE = SaveId(1, 1, 10, RUN)
SLOT = "r00000-000001.slot"
ORDER = ev.DrainOrdered(job=KEY, node="a", store_id=STORE_ID, save=SAVE, ranks=(0,))


def a_share() -> DrainShare:
    slots = SlotTable(KEY, 2)
    seal = a_seal(job=KEY, save=SAVE, rank=0, world_size=1)
    slots.adopt(
        ev.SlotAdopted(
            job=KEY, slot=SLOT, capacity=4096, rank=0, world_size=1, save=SAVE, nbytes=seal.image_nbytes, seal=seal
        )
    )
    links = Links("a")
    parity = ParityShare(KEY, Protection(KEY, "a", links), on=False, wait_s=1.0)
    membership = Membership(KEY, "a", LocalRanks(KEY, slots), Standing(KEY, 1), links)
    return DrainShare(KEY, slots, membership, parity)


def kinds(actions: list[act.Action]) -> list[type[act.Action]]:
    return [type(action) for action in actions]


DRAINED = ev.Drained(job=KEY, save=SAVE, problem="")


@pytest.mark.parametrize("again", [True, False])
def test_an_orphaned_drain_goes_on_to_its_vote_once_a_successor_orders_it(again):
    share = a_share()
    assert kinds(share.order(ORDER)) == [act.Drain]
    share.orphaned()
    if again:
        assert share.order(ORDER) == []
    assert kinds(share.drained(DRAINED)) == ([act.WriteVote] if again else [])
    assert share.save == (SAVE if again else None)


def test_its_progress_stays_on_the_node():
    share = a_share()
    share.order(ORDER)
    assert share.moved(ev.DrainMoved(job=KEY, save=SAVE, by_rank=((0, 7),))) == []
    assert share.done == {0: 7}


def test_what_was_written_for_none_is_written_again_for_the_successor():
    share = a_share()
    share.order(ORDER)
    share.orphaned()
    share.drained(DRAINED)
    assert kinds(share.order(ORDER)) == [act.Drain]
