"""The table of slots: never more than a rank's share, nothing held twice, nothing too small granted."""

from ckptd.core.actions import AllocateSlots, FreeSlot, UnlinkSlot
from ckptd.core.events import SegmentFetched, SegmentStaged, SlotAdopted
from ckptd.core.node.slots import SlotTable
from ckptd.shared.base.ids import JobKey, SaveId
from ckptd.shared.protocol.messages import Tier
from tests.runs import RUN
from tests.seals import a_seal

KEY = JobKey("/store", "job")
SAVE = SaveId(1, 1, 10, RUN)
NEXT = SaveId(1, 2, 20, RUN)


def a_table(ready=0, per_rank=3, capacity=4096):
    table = SlotTable(KEY, per_rank)
    if ready:
        table.demand(0, capacity)
    for serial in range(1, ready + 1):
        table.ready(name(serial), 0, capacity)
    return table


def name(serial, rank=0):
    return f"r{rank:05d}-{serial:06d}.slot"


def staged(serial, save=SAVE, rank=0):
    return SegmentStaged(job=KEY, rank=rank, world_size=1, slot=name(serial, rank), save=save, nbytes=10)


def asked(actions):
    return sum(a.count for a in actions if isinstance(a, AllocateSlots))


def instead(actions):
    return {name for a in actions if isinstance(a, AllocateSlots) for name in a.instead}


def unlinked(actions):
    return [a.slot for a in actions if isinstance(a, UnlinkSlot)]


def test_a_demand_asks_for_the_share_once():
    table = a_table()
    assert asked(table.demand(0, 4096)) == 3
    assert asked(table.demand(0, 4096)) == 0
    table.ready(name(1), 0, 4096)
    table.failed(0, 2)
    assert asked(table.demand(0, 4096)) == 2


def test_a_new_rank_waits_for_what_is_being_allocated_for_the_old_one():
    table = a_table()
    first = asked(table.demand(0, 4096))
    table.rank_left(0, writer_gone=True)
    second = asked(table.demand(0, 4096))
    assert first + second == 3
    for serial in range(1, 4):
        assert not unlinked(table.ready(name(serial), 0, 4096))
    assert len(table.grantable(0)) == 3


def test_an_allocation_that_comes_when_none_wants_it_is_unlinked():
    table = a_table()
    table.demand(0, 4096)
    table.rank_left(0, writer_gone=True)
    assert unlinked(table.ready(name(1), 0, 4096)) == [name(1)]
    assert not table
    table.failed(0, 2)
    assert asked(table.demand(0, 4096)) == 3


def test_small_slots_are_replaced_when_they_are_idle():
    table = a_table(ready=3)
    table.grantable(0)
    assert table.hold(staged(1)) == ""
    actions = table.demand(0, 8192)
    assert asked(actions) == 2
    assert instead(actions) == {name(2), name(3)}
    assert unlinked(actions) == []
    assert set(unlinked(table.fit(0))) == {name(2), name(3)}
    slot = table.holding(SAVE)[0]
    assert table.free(slot) == [FreeSlot(job=KEY, slot=name(1))]
    actions = table.provision(0)
    assert (asked(actions), instead(actions)) == (1, {name(1)})


def test_small_slots_stay_while_larger_ones_do_not_fit_and_fit_again():
    table = a_table(ready=3)
    table.grantable(0)
    assert table.hold(staged(1)) == ""
    for _ in range(2):
        actions = table.demand(0, 8192)
        assert (asked(actions), instead(actions), unlinked(actions)) == (2, {name(2), name(3)}, [])
        table.failed(0, 2)
        assert table.grantable(0) == []
        assert table.demand(0, 4096) == []
        assert {s.name for s in table.grantable(0)} == {name(2), name(3)}
        table.demand(0, 4096)


def test_memory_of_a_small_slot_is_counted_for_one_allocation_at_a_time():
    table = a_table(ready=2)
    assert instead(table.demand(0, 8192)) == {name(1), name(2)}
    table.ready(name(3), 0, 8192)
    table.fit(0)
    table.ready(name(4), 0, 8192)
    table.ready(name(5), 0, 8192)
    assert table.fitting(0) == 3


def test_larger_slots_that_come_when_the_smaller_ones_do_again_are_unlinked():
    table = a_table(ready=3)
    table.demand(0, 8192)
    assert table.demand(0, 4096) == []
    assert len(table.grantable(0)) == 3
    assert table.fit(0) == []
    assert [unlinked(table.ready(name(serial), 0, 8192)) for serial in (4, 5, 6)] == [[name(4)], [name(5)], [name(6)]]


def test_small_slots_that_stayed_after_all_count_as_room_for_the_next_larger_ones():
    table = a_table(ready=3)
    names = {name(1), name(2), name(3)}
    assert instead(table.demand(0, 8192)) == names
    table.demand(0, 4096)
    assert table.fit(0) == []
    for serial in (4, 5, 6):
        table.ready(name(serial), 0, 8192)
    assert instead(table.demand(0, 8192)) == names


def test_larger_slots_that_are_all_there_replace_what_is_idle():
    table = a_table(ready=3)
    table.demand(0, 8192)
    for serial in (4, 5):
        assert table.ready(name(serial), 0, 8192) == []
    assert set(unlinked(table.ready(name(6), 0, 8192))) == {name(1), name(2), name(3)}


def test_an_allocation_of_the_former_size_is_replaced_when_it_comes():
    table = a_table()
    table.demand(0, 4096)
    table.demand(0, 8192)
    actions = table.ready(name(1), 0, 4096)
    assert (asked(actions), instead(actions)) == (1, {name(1)})
    assert unlinked(table.fit(0)) == [name(1)]


def test_what_a_slot_may_not_hold():
    table = a_table(ready=2)
    assert "does not belong" in table.hold(staged(9))
    assert "does not belong" in table.hold(staged(1, rank=1))
    assert table.hold(staged(1)) == ""
    assert table.hold(staged(1)) == ""
    assert "still holds" in table.hold(staged(1, NEXT))
    assert "another slot" in table.hold(staged(2, SAVE))


def test_held_slots_are_not_granted_and_not_trimmed():
    table = a_table(ready=2)
    table.hold(staged(1))
    assert [s.name for s in table.grantable(0)] == [name(2)]
    assert table.grantable(0) == []
    table.rank_left(0, writer_gone=True)
    assert unlinked(table.trim()) == [name(2)]
    assert [s.name for s in table.holding(SAVE)] == [name(1)]


def test_a_writer_that_may_live_loses_its_slots():
    table = a_table(ready=2)
    table.grantable(0)
    table.hold(staged(1))
    assert unlinked(table.rank_left(0, writer_gone=False)) == [name(2)]


def test_digests_of_what_a_slot_holds_no_more_are_not_noted():
    table = a_table(ready=1)
    table.hold(staged(1))
    assert [a.slot for a in table.digests_due()] == [name(1)]
    assert table.digested(name(1), SAVE, a_seal(KEY, SAVE))
    assert not table.digests_due()
    table.free(table.holding(SAVE)[0])
    assert not table.digested(name(1), SAVE, a_seal(KEY, SAVE))
    assert not table.digested(name(7), SAVE, a_seal(KEY, SAVE))


def test_adopted_slots_count_for_the_share():
    table = a_table()
    table.adopt(SlotAdopted(job=KEY, rank=0, slot=name(4), capacity=4096, save=SAVE, nbytes=3, seal=a_seal(KEY, SAVE)))
    table.adopt(SlotAdopted(job=KEY, rank=0, slot=name(5), capacity=4096))
    assert asked(table.demand(0, 4096)) == 1
    assert table.coming(0) == 2
    assert not table.digests_due()


def test_slots_of_ranks_that_are_no_more_are_trimmed():
    table = a_table(per_rank=1)
    for rank in range(3):
        table.demand(rank, 4096)
        table.ready(name(1, rank), rank, 4096)
        table.rank_left(rank, writer_gone=True)
    assert unlinked(table.trim(1)) == [name(1, 1), name(1, 2)]


def test_a_segment_that_is_fetched_into_the_slot_where_it_lies_stays_there():
    table, seal = a_table(), a_seal(KEY, SAVE, 1)
    came = SegmentFetched(
        job=KEY, rank=1, save=SAVE, tier=Tier.PEER, slot="r00001-000001.slot", capacity=4096, seal=seal
    )
    assert table.fetched(came, seal, copied=True) == []
    assert table.fetched(came, seal) == []
    (held,) = table.holding(SAVE)
    assert (held.name, held.copied) == (came.slot, False)
