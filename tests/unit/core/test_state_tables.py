"""The machines' tables: each event has a meaning in each state or a reason why not, and the document draws them."""

import pytest

from ckptd.core.actions import Note
from ckptd.core.coordinator.admission_states import ADMISSION, Admission, AdmissionOn
from ckptd.core.coordinator.protection_states import PROTECTION, Encoding, EncodingOn
from ckptd.core.coordinator.restore_states import RESTORE, Loading, LoadOn
from ckptd.core.coordinator.save_states import ENDS, SAVE, On, State
from ckptd.core.coordinator.scrub_states import (
    MEMORY_SCRUB,
    STORE_SCRUB,
    MemoryOn,
    MemoryScrubbing,
    StoreOn,
    StoreScrubbing,
)
from ckptd.core.coordinator.session_states import SESSION, Presence, SessionOn
from ckptd.core.coordinator.state_table import Table
from ckptd.core.events import Arrival, IncarnationTaken, NodeAttached
from ckptd.shared.base.ids import SaveId
from ckptd.shared.protocol.messages import Tier
from ckptd.shared.protocol.topology import Peer
from tests.runs import RUN
from tests.states import TABLES
from tests.unit.core.a_job import KEY, AJob
from tests.unit.sources import ROOT

ONE = SaveId(1, 1, 10, RUN)
KINDS = {
    "save": (SAVE, State, On),
    "protection": (PROTECTION, Encoding, EncodingOn),
    "admission": (ADMISSION, Admission, AdmissionOn),
    "session": (SESSION, Presence, SessionOn),
    "load": (RESTORE, Loading, LoadOn),
    "memory scrub": (MEMORY_SCRUB, MemoryScrubbing, MemoryOn),
    "store scrub": (STORE_SCRUB, StoreScrubbing, StoreOn),
}
ROWS = [pytest.param(*kinds, id=name) for name, kinds in KINDS.items()]


@pytest.mark.parametrize(("table", "states", "events"), ROWS)
def test_every_event_is_taken_or_ignored_for_a_reason_in_every_state(table, states, events):
    assert set(table.edges) == {None, *states}
    assert {event for _, event, _ in table.rows()} == set(events), "an event that no state takes"
    assert {after for *_, after in table.rows()} == {None, *states}, "a state that nothing leads to"
    everywhere = {event for event in events if all(table.takes(state, event) for state in (None, *states))}
    assert set(table.ignored) == set(events) - everywhere


@pytest.mark.parametrize("name", TABLES)
def test_the_document_draws_the_table(name):
    """``python -m tests.states`` prints the diagrams."""
    assert TABLES[name].mermaid() in (ROOT / "docs" / "architecture.md").read_text()


def test_a_row_that_is_in_no_table_is_an_error_in_tests_alone(monkeypatch):
    monkeypatch.setattr(Table, "strict", False)
    assert SAVE.step(State.DURABLE, On.VOTED) is None
    monkeypatch.setattr(Table, "strict", True)
    with pytest.raises(AssertionError, match="no row for durable: all nodes voted"):
        SAVE.step(State.DURABLE, On.VOTED)


def test_the_tracer_is_called_with_each_row(monkeypatch):
    rows = []
    monkeypatch.setattr(SAVE, "trace", lambda *row: rows.append(row))
    assert SAVE.begin(On.BEGUN) is State.STAGING
    assert rows == [(None, On.BEGUN, State.STAGING)]


def test_what_has_no_end_is_on_its_way():
    assert set(State) - ENDS.keys() == {State.STAGING, State.QUEUED, State.DRAINING, State.COMMITTING}


@pytest.fixture
def as_in_a_daemon(monkeypatch):
    monkeypatch.setattr(Table, "strict", False)


def test_a_save_that_cannot_take_a_step_does_nothing_that_goes_with_it(as_in_a_daemon):
    job = AJob(world=1).start()
    job.stage_all(ONE)
    job.drain(ONE)
    record = job.facts.records[ONE]
    before = (record.state, record.reason, job.facts.active)
    for step in (
        lambda: job.saves._end(record, On.OUTRUN, "it is not"),
        lambda: job.saves._commit(record, On.VOTED),
        lambda: job.saves._begin_drain(record, job.now),
        lambda: job.saves._complete(record, job.now),
    ):
        assert step() == []
        assert (record.state, record.reason, job.facts.active) == before


@pytest.fixture
def not_drained(as_in_a_daemon):
    """A save that no drain or commit of can end well or badly: none runs."""
    job = AJob(world=1).start()
    job.stage_all(ONE)
    record = job.facts.records[ONE]
    job.facts.move(record, On.BROKEN) if record.state is State.DRAINING else None
    job.facts.active = None
    job.facts.retry_at = None
    return job, record


def test_a_drain_that_does_not_run_neither_fails_nor_makes_anything_durable(not_drained):
    job, record = not_drained
    for step in (
        lambda: job.saves._drain_failed(record, "EIO", job.now),
        lambda: job.saves._made_durable(record, 10),
    ):
        assert step() == []
        known = (record.state, record.error, record.failures, job.facts.retry_at)
        assert known == (State.QUEUED, "", 0, None)
        assert not job.facts.partials
        assert not job.facts.on_store


def test_a_drain_whose_save_cannot_be_taken_over_runs_on(as_in_a_daemon, monkeypatch):
    job = AJob(world=1).start()
    job.stage_all(ONE)
    assert job.facts.active == ONE
    row = {on: after for on, after in SAVE.edges[State.DRAINING].items() if on is not On.TAKEN_OVER}
    monkeypatch.setattr(SAVE, "edges", {**SAVE.edges, State.DRAINING: row})
    assert [type(action) for action in job.saves.superseded_by(7)] == [Note]
    assert (job.facts.active, job.facts.records[ONE].state) == (ONE, State.DRAINING)


def test_a_session_that_cannot_take_a_step_is_not_opened(as_in_a_daemon, monkeypatch):
    sessions = AJob(world=1).start().catalogue.jobs[KEY].coordinator.sessions
    before = (sessions.session, sessions.incarnation, sessions.members)
    waiting = sessions._waiting.came("other", 0.0)
    attached = NodeAttached(job=KEY, session="other", peer=Peer("b", "arena", "", "k" * 40))
    waiting.roster.put("b", attached, [Arrival(0, 1)])
    waiting.state = Admission.NUMBERING
    monkeypatch.setattr(ADMISSION, "edges", {**ADMISSION.edges, Admission.NUMBERING: {}})
    assert sessions.opened(IncarnationTaken(job=KEY, session="other", number=9, run=RUN), 0.0) == []
    assert (sessions.session, sessions.incarnation, sessions.members) == before


def test_a_load_that_cannot_take_a_step_orders_nothing(as_in_a_daemon):
    job = AJob(world=2).start()
    job.stage_all(ONE)
    job.ask_load(0)
    job.hold()
    load = job.catalogue.jobs[KEY].coordinator.restores
    load._round.state = Loading.DRAINING
    assert load._order(load._round, ONE, [Tier.ARENA] * 2) == []
    assert load._gather(load._round, ONE, {}) == []
    assert (load._round.order, load._round.gathered, load._round.state) == (None, None, Loading.DRAINING)


def test_parity_that_cannot_take_a_step_is_not_called_protected(as_in_a_daemon):
    parity = AJob(world=1).start().catalogue.jobs[KEY].coordinator.parity
    assert parity._protected((ONE, 1), EncodingOn.SEALED) == []
    assert (parity.newest, parity.states) == (None, {})


def test_a_session_that_cannot_take_a_step_is_as_old_as_it_was(as_in_a_daemon):
    leave = AJob(world=1).start().catalogue.jobs[KEY].coordinator.leave
    before = leave._since
    assert not leave._move(SessionOn.RELEASED, before + 10.0)
    assert (leave._since, leave._state) == (before, Presence.OPEN)
