"""The sizes that keep the bars today; ``python -m tests.simulation.scale`` (make scale) plays larger ones."""

import pytest

from tests.long_form import LONG, in_long
from tests.simulation.costs import Costs
from tests.simulation.scale import PLAYS

NODES = 32 if LONG else 16


@pytest.mark.parametrize("play", PLAYS)
def test_a_job_keeps_the_bars(play):
    assert PLAYS[play](NODES, Costs()).problems == []


@pytest.mark.parametrize("play", PLAYS)
def test_a_job_whose_daemons_take_far_longer_does_not(play):
    assert PLAYS[play](8, Costs().times(1000)).problems != []


@pytest.mark.parametrize("play", ["save", *in_long("connect")])
def test_a_busy_coordinator_receives_nothing_twice(play):
    figures = PLAYS[play](32, Costs().times(100))
    assert figures.load.busy_s > 1.0
    assert figures.load.again == 0
