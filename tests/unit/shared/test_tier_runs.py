"""The order of a load: one tier for all ranks, and runs of those that read elsewhere."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.core import events as ev
from ckptd.shared.base.ids import JobKey, SaveId
from ckptd.shared.protocol import node_messages
from ckptd.shared.protocol.messages import Tier
from ckptd.shared.protocol.tier_runs import Tiers
from tests.runs import RUN

SAVE = SaveId(1, 1, 10, RUN)


def size_of(tiers):
    order = ev.LoadOrdered(
        job=JobKey("/store", "job"), node="n000", incarnation=2, run=RUN, save=SAVE, tiers=Tiers.of(tiers), attempt=1
    )
    raw = node_messages.encode(order)
    assert node_messages.decode(raw) == order
    return len(raw)


@pytest.mark.parametrize("tier", list(Tier))
def test_an_order_has_one_size_whatever_the_number_of_ranks(tier):
    assert size_of([tier] * 8) == size_of([tier] * 80_000) < 250


def test_exceptions_cost_a_few_bytes_each():
    tiers = [Tier.ARENA] * 80_000
    for node in range(20):
        tiers[800 * node : 800 * node + 8] = [Tier.REBUILT] * 8
    assert size_of(tiers) - size_of([Tier.ARENA] * 8) <= 20 * 20


@given(st.lists(st.sampled_from(list(Tier)), min_size=1, max_size=40))
def test_each_rank_has_its_tier(tiers):
    found = Tiers.of(tiers)
    assert [found.of_rank(rank) for rank in range(len(tiers))] == tiers
    for tier in Tier:
        assert found.readers(tier, len(tiers)) == {rank for rank, one in enumerate(tiers) if one is tier}
