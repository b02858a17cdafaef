"""What a coordinator must always hold is asserted after every event: each assertion fails where its facts are wrong."""

import pytest

from ckptd.core.coordinator.protection_states import Encoding
from ckptd.core.coordinator.save_states import State
from ckptd.shared.base.ids import SaveId
from tests.runs import RUN
from tests.unit.core.a_job import KEY, AJob

ONE, TWO = SaveId(1, 1, 10, RUN), SaveId(1, 2, 20, RUN)

WRONG = {
    "places differ": lambda facts, _: facts.records[ONE].held[0].add("nowhere"),
    "listed as": lambda facts, _: setattr(facts.records[ONE], "state", State.KEPT),
    "was never whole": lambda facts, _: setattr(facts.records[ONE], "staged", False),
    "queued, and not due": lambda facts, _: setattr(facts.records[TWO], "due", False),
    "all nodes voted": lambda facts, _: facts.records[ONE].voters.add("node"),
    "taken for the newest": lambda facts, _: setattr(facts, "_newest", None),
    "is not the newest": lambda facts, _: setattr(facts, "_newest", facts.records[ONE]),
    "an incarnation that": lambda facts, _: setattr(facts, "incarnation", 99),
    "and not None": lambda facts, _: setattr(facts, "active", None),
    "unfinished, and": lambda facts, _: (facts.partials.add(ONE), facts.on_store.update({ONE: None})),
    "encoded at once": lambda _, parity: parity.states.update({(ONE, 1): Encoding.ENCODING, (TWO, 1): Encoding.STUCK}),
    "protected: ": lambda _, parity: parity.states.update({(s, 1): Encoding.PROTECTED for s in (ONE, TWO)}),
    "former nodes": lambda _, parity: parity.states.update({(ONE, 7): Encoding.ENCODING}),
    "with {'node'": lambda _, parity: parity.problems.update(node="it is full"),
    "parity lies": lambda facts, _: facts.chunks._holders.update({(ONE, 1): {"node"}}),
    "has spoken": lambda facts, _: facts.inventory._silent.add("node"),
}


def a_job():
    """Its first save is drained, the second waits for that."""
    job = AJob().start()
    for save in (ONE, TWO):
        for rank in range(2):
            job.stage(rank, save, drain=True)
    assert [job.facts.records[save].state for save in (ONE, TWO)] == [State.DRAINING, State.QUEUED]
    job.catalogue.check()
    return job


@pytest.mark.parametrize("text", WRONG)
def test_what_does_not_hold_is_found(text):
    job = a_job()
    WRONG[text](job.facts, job.catalogue.jobs[KEY].coordinator.parity)
    with pytest.raises(AssertionError, match=text):
        job.catalogue.check()


def test_what_still_follows_is_found():
    """A drain that could begin, and was not begun."""
    job = a_job()
    coordinator = job.catalogue.jobs[KEY].coordinator
    coordinator.saves.start_drain, begun = lambda now: [], coordinator.saves.start_drain
    job.drain(ONE)
    assert job.facts.active is None
    coordinator.saves.start_drain = begun
    with pytest.raises(AssertionError, match="had not settled"):
        job.catalogue.check()
