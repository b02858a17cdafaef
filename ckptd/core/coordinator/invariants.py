"""The invariants of docs/architecture.md, as far as a coordinator sees them; tests ask after each event. Pure."""
# ruff: noqa: S101

from ckptd.core.coordinator.job_state import JobState
from ckptd.core.coordinator.parity_scheduler import ParityScheduler
from ckptd.core.coordinator.protection_states import Encoding
from ckptd.core.coordinator.save_record import Record
from ckptd.core.coordinator.save_states import ON_STORE_WAY, WHOLE, State

_PARTS = {State.STAGING, State.ABANDONED, State.SKIPPED}


def check(facts: JobState, parity: ParityScheduler) -> None:
    """Raises AssertionError when one does not hold."""
    _check_places(facts)
    _check_lists(facts)
    for record in facts.records.values():
        _check_save(facts, record)
    _check_newest(facts)
    _check_store(facts)
    _check_parity(parity)
    facts.chunks.check()
    facts.inventory.check()
    facts.restore.check()


def _check_places(facts: JobState) -> None:
    """What lies where is kept both ways."""
    by_rank = {(s, rank, n) for s, r in facts.records.items() for rank, nodes in r.held.items() for n in nodes}
    by_node = {(s, rank, n) for n, saves in facts.places.items() for s, ranks in saves.items() for rank in ranks}
    assert by_rank == by_node, f"places differ: {by_rank ^ by_node}"


def _check_lists(facts: JobState) -> None:
    """Each save is listed under its state, and under no other."""
    states = {save: record.state for save, record in facts.records.items()}
    listed = [(record.save, state) for state in State for record in facts.of(state)]
    assert len(listed) == len(states), f"{len(states)} saves, {len(listed)} listed"
    assert dict(listed) == states, f"listed as {dict(listed)}, and are {states}"


def _check_save(facts: JobState, record: Record) -> None:
    state = record.state
    assert record.staged or state not in WHOLE, f"{record.save} is {state}, and was never whole"  # 4: milestones
    assert not record.staged or state not in _PARTS, f"{record.save} was whole, and is {state}"  # 1: it stays so
    if not record.staged:
        assert record.delivered.keys() == record.held.keys(), f"{record.save} counts segments that are gone"
        assert state is not State.STAGING or not record.in_memory or facts.clash_of(record.save), f"{record} is whole"
    assert record.due or state is not State.QUEUED, f"{record.save} is queued, and not due"
    assert all(rank < record.world_size for rank in record.held), f"{record.save}: ranks that it does not have"
    assert all(record.delivered.values()), f"{record.save}: segments of no bytes"
    if state is State.DRAINING:  # 7: all votes, or no commit
        assert record.drainers.keys() > record.voters, f"{record.save}: all nodes voted, and it is not committed"
    if state is State.COMMITTING:
        assert record.voters <= record.drainers.keys(), f"{record.save}: votes of others"


def _check_newest(facts: JobState) -> None:
    """6: newest is largest, and 1: it is known at any time which staged save must keep its slots."""
    whole = [record for record in facts.records.values() if record.staged and record.in_memory]
    newest = facts.newest_staged
    known = any(record is newest for record in whole)
    assert known if newest is not None else not whole, f"{newest} is taken for the newest staged"
    assert newest is None or not any(newest.save < r.save for r in whole), f"{newest.save} is not the newest"
    assert facts.incarnation <= facts.session.incarnation, "saves of an incarnation that the session does not have"


def _check_store(facts: JobState) -> None:
    """7: one save at a time is written and committed."""
    under_way = [record.save for record in facts.of(*ON_STORE_WAY)]
    assert under_way == ([facts.active] if facts.active is not None else []), f"{under_way}, and not {facts.active}"
    assert not facts.partials & facts.on_store.keys(), "unfinished, and committed"


def _check_parity(parity: ParityScheduler) -> None:
    """5: one save at a time is encoded, one is protected; it has failed somewhere, or has not."""
    running = [(key, state) for key, state in parity.states.items() if state is not Encoding.PROTECTED]
    assert len(running) <= 1, f"encoded at once: {running}"
    assert len(parity.states) - len(running) <= 1, f"protected: {parity.states}"
    for (_, epoch), state in running:
        assert epoch == parity.epoch, "encoded by sets of former nodes"
        assert (state is Encoding.STUCK) == bool(parity.problems), f"{state}, with {parity.problems}"
    assert running or not parity.problems, f"no encode runs, with {parity.problems}"
