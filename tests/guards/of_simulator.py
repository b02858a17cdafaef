"""Guards of the pure core that the simulator must miss: without each, some short play breaks a promise."""

from tests.guards.guard import Guard

_COORDINATOR = "ckptd/core/coordinator/"
_NODE = "ckptd/core/node/"
_PLAYS = ("tests/simulation/test_simulation.py::test_no_promise_is_broken",)

ROWS = (
    Guard(
        "core-durable-after-its-commit", f"{_COORDINATOR}drains.py",
        "        if event.problem:\n            record.commit", "        if False:\n            record.commit", _PLAYS,
    ),
    Guard(
        "core-protected-after-all-sets", f"{_COORDINATOR}parity_scheduler.py",
        "if self.done >= set(self._sets):", "if self.done:", _PLAYS,
    ),
    Guard(
        "core-staged-after-all-ranks", f"{_COORDINATOR}saves.py",
        "complete = record.phase is Phase.STAGING and record.in_memory", "complete = record.phase is Phase.STAGING",
        _PLAYS,
    ),
    Guard(
        "core-older-parity-stays", f"{_NODE}parity.py",
        "{key, *(held for held in self.chunks if held >= newest)}", "{key, newest} - {newest}", _PLAYS,
    ),
    Guard(
        "core-keeps-the-newest-staged", f"{_NODE}slot_retention.py",
        "for s in (self.newest_staged, resumed) if", "for s in (resumed,) if", _PLAYS,
    ),
    Guard(
        "core-memory-stays-until-durable", f"{_COORDINATOR}leave.py",
        "if self._saves.active is not None or (waits and not expired):", "if False:", _PLAYS,
    ),
)  # fmt: skip
