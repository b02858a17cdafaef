"""The machines' tables: each event has a meaning in each state or a reason why not, and the document draws them."""

import pytest

from ckptd.core.coordinator.protection_states import PROTECTION, Encoding, EncodingOn
from ckptd.core.coordinator.restore_states import RESTORE, Loading, LoadOn
from ckptd.core.coordinator.save_states import ENDS, SAVE, On, State
from ckptd.core.coordinator.session_states import SESSION, Presence, SessionOn
from ckptd.core.coordinator.state_table import Table
from tests.states import TABLES
from tests.unit.sources import ROOT

KINDS = {
    "save": (SAVE, State, On),
    "protection": (PROTECTION, Encoding, EncodingOn),
    "session": (SESSION, Presence, SessionOn),
    "load": (RESTORE, Loading, LoadOn),
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
    assert SAVE.after(State.DURABLE, On.VOTED) is State.DURABLE
    monkeypatch.setattr(Table, "strict", True)
    with pytest.raises(AssertionError, match="no row for durable: all nodes voted"):
        SAVE.after(State.DURABLE, On.VOTED)


def test_the_tracer_is_called_with_each_row(monkeypatch):
    rows = []
    monkeypatch.setattr(SAVE, "trace", lambda *row: rows.append(row))
    SAVE.after(None, On.BEGUN)
    assert rows == [(None, On.BEGUN, State.STAGING)]


def test_what_has_no_end_is_on_its_way():
    assert set(State) - ENDS.keys() == {State.STAGING, State.QUEUED, State.DRAINING, State.COMMITTING}
