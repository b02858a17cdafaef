"""The tables of the machines: every event and every message between daemons has a row, and its handler takes it."""

import inspect
import typing

import pytest

from ckptd.core import events as ev
from ckptd.core.coordinator.coordinator import Coordinator
from ckptd.core.links import Links
from ckptd.core.node.node import JobNode
from ckptd.core.policy import Policy
from ckptd.core.scrub.scrub import Paces, Scrub
from ckptd.shared.base.ids import JobKey

KEY = JobKey("/store", "job")
NODE = JobNode(KEY, "a", Policy())
COORDINATOR = Coordinator(KEY, "a", Policy())
SCRUB = Scrub(NODE, COORDINATOR, Links("a"), Policy(), Paces(Policy()), lambda: True)
FACTS = set(typing.get_args(ev.Fact))
MESSAGES = set(typing.get_args(ev.Message))
BASES = {ev.Event, ev.NodeMessage, ev.FromRank}


def kinds(base):
    return {base} - BASES | {kind for one in base.__subclasses__() for kind in kinds(one)}


def test_every_message_has_a_row():
    assert {*NODE.events, *NODE.orders, *SCRUB.events, ev.Report} >= MESSAGES
    assert {*NODE.orders} < MESSAGES
    assert ev.MendOrdered in SCRUB.events
    assert not NODE.events.keys() & NODE.orders.keys()
    assert {*COORDINATOR.reports} == FACTS


def test_every_event_has_a_row():
    """Jobs begin with a number that was kept: ``Catalogue`` takes it, for jobs of which nothing else is known too."""
    known = {*NODE.events, *NODE.orders, *COORDINATOR.events, *COORDINATOR.reports, *SCRUB.events}
    assert kinds(ev.Event) - known == {ev.Report, ev.Reports, ev.NumberKept}


@pytest.mark.parametrize("table", [NODE.events, NODE.orders], ids=["events", "orders"])
def test_each_part_takes_what_its_row_says(table):
    wrong = {}
    for kind, parts in table.items():
        for part in parts:
            (name, parameter), *_ = inspect.signature(part).parameters.items()
            hint = typing.get_type_hints(part).get(name, parameter.annotation)
            taken = typing.get_args(hint) or (hint,)
            fits = any(isinstance(one, type) and issubclass(kind, one) for one in taken)
            if not fits and hint not in (inspect.Parameter.empty, typing.Any, ev.Fact):  # a lambda has no hints
                wrong[kind.__name__] = (part, hint)
    assert wrong == {}
