"""The short form of `make polite`: lock-step ranks that are told to end, politely, at random moments."""

import os

import pytest

from tests.faults.polite_campaign import episode

pytestmark = [pytest.mark.faults, pytest.mark.timeout(240), pytest.mark.xdist_group("nodes-campaigns")]

LONG = os.environ.get("FAULTS") == "long"


@pytest.mark.parametrize("seed", range(8) if LONG else (0,))
def test_each_polite_kill_leaves_one_durable_step_on_all_ranks(zygote, seed: int):
    count = 25 if LONG else 5
    counts = episode(seed, count, zygote)
    assert counts.findings == [], str(counts)
    assert counts.durable == counts.kills.total() == count


def test_what_does_not_fit_in_the_time_costs_nothing_that_is_durable_and_is_said(zygote):
    count = 2 if LONG else 1
    counts = episode(7, count, zygote, tight=True)
    assert counts.findings == [], str(counts)
    assert counts.kept == count
