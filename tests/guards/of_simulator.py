"""Guards of the pure core that the simulator must miss: without each, some short play breaks a promise."""

from tests.guards.guard import play_guard as _row

_COORDINATOR = "ckptd/core/coordinator/"
_NODE = "ckptd/core/node/"

ROWS = (
    _row(
        "core-durable-after-its-commit", f"{_COORDINATOR}drains.py",
        "        if event.problem:\n            record.commit", "        if False:\n            record.commit",
    ),
    _row(
        "core-protected-after-all-sets", f"{_COORDINATOR}parity_scheduler.py",
        "if len(self._done) == len(self._sets):", "if self._done:",
    ),
    _row(
        "core-staged-after-all-ranks", f"{_COORDINATOR}saves.py",
        "complete = SAVE.takes(record.state, On.WHOLE) and record.in_memory",
        "complete = SAVE.takes(record.state, On.WHOLE)",
    ),
    _row(
        "core-older-parity-stays", f"{_NODE}parity.py",
        "{key, *(held for held in self.chunks if held >= newest)}", "{key, newest} - {newest}",
    ),
    _row(
        "core-keeps-the-newest-staged", f"{_NODE}slot_retention.py",
        "for s in (self.newest_staged, resumed) if", "for s in (resumed,) if",
    ),
    _row(
        "core-memory-stays-until-durable", f"{_COORDINATOR}leave.py",
        "if facts.active is not None or (waits and not expired):", "if False:",
    ),
)  # fmt: skip
