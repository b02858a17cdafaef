"""What ranks of a DCP save have in common: told before the planner deals it out, also where DCP caches its plans."""

from dataclasses import replace

import pytest
import torch
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.planner import SavePlan

from ckptd_client.dcp._alike import UNKNOWN, Alike, answer, items_of, streams_of, tell


def plan_of(*names, rows=4):
    """Of a rank that has these tensors, and a plain value."""
    state = {name: torch.full((rows,), float(ord(name[0]))) for name in names} | {"step": 3}
    return tell(create_default_local_save_plan(state, is_coordinator=False), lambda name: name == "own")


def names_of(alike):
    items = items_of(alike)
    assert items is not None
    return {alike.sets[number]: [] for number in alike.of if number != 255} | {
        ranks: [item.index.fqn for item, at in zip(items, alike.of, strict=True) if at == number]
        for number, ranks in enumerate(alike.sets)
    }


def test_each_rank_learns_what_it_has_in_common_with_whom():
    plans = answer([plan_of("a", "b", "own"), plan_of("b", "a", "c", "own"), plan_of("c", "d")])
    found = [plan.storage_data for plan in plans]
    assert [names_of(one) for one in found] == [
        {(0, 1): ["a", "b"]}, {(0, 1): ["a", "b"], (1, 2): ["c"]}, {(1, 2): ["c"]},
    ]  # fmt: skip
    assert not any(one.unseen for one in found)


def test_a_tensor_of_one_name_and_another_shape_is_another():
    plans = answer([plan_of("a"), plan_of("a", rows=5)])
    assert [plan.storage_data.sets for plan in plans] == [(), ()]


def test_ranks_that_list_them_in_another_order_cut_alike():
    plans = answer([plan_of("a", "b"), plan_of("b", "a")])
    cuts = []
    for plan in plans:
        (stream,), values = streams_of(plan.storage_data, items_of(plan.storage_data), lambda item: torch.zeros(4))
        assert len(values) == 2
        cuts.append((stream.members, stream.cut))
    assert cuts[0] == cuts[1]


CACHED = SavePlan([], usable=False)


def test_nothing_is_said_where_all_go_on_with_cached_plans():
    assert answer([CACHED, CACHED]) == [CACHED, CACHED]


@pytest.mark.parametrize("usable", [SavePlan([]), SavePlan([], storage_data="another writer's")])
def test_what_some_do_not_receive_none_compares(usable):
    first, second, third = answer([plan_of("a"), CACHED, usable])
    assert first.storage_data == UNKNOWN
    assert third.storage_data == UNKNOWN
    assert second == CACHED
    assert UNKNOWN.unseen


def test_the_items_are_known_to_a_writer_that_did_not_tell_them():
    (plan, _) = answer([plan_of("a"), plan_of("a")])
    told = replace(plan).storage_data
    assert [item.index.fqn for item in items_of(Alike(*told))] == ["a"]
    assert items_of(UNKNOWN) is None


def test_more_sets_than_there_are_words_for_are_not_hidden():
    """Rank 0 has one tensor in common with each other rank."""
    names = "abcdefghijklmnopqr"
    plans = answer([plan_of(*names), *(plan_of(name) for name in names)])
    first = plans[0].storage_data
    assert first.unseen
    assert len(first.sets) == 15
    assert not plans[1].storage_data.unseen
