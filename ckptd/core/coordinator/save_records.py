"""The saves of a job that matter, and what lies where of each: facts and questions, no decisions. Pure."""

from collections import Counter
from collections.abc import Collection

from ckptd.core import events as ev
from ckptd.core.coordinator.save_record import Phase, Record
from ckptd.shared.base.ids import SaveId
from ckptd.shared.format.replica_attestations import doubt
from ckptd.shared.protocol.messages import End, Progress

MAX_RECORDS = 64


class SaveRecords:
    """Records by save, and the committed checkpoints on the store."""

    def __init__(self) -> None:
        self.records: dict[SaveId, Record] = {}
        self._past: Counter[End] = Counter()  # of records that were dropped
        self.on_store: dict[SaveId, ev.OnStore] = {}
        self.active: SaveId | None = None  # being drained or committed

    def give_away(self, save: SaveId) -> dict[int, set[str]]:
        """The save is another run's: what lies where of it, by rank. Nothing while it is on its way to the store."""
        record = self.records[save]
        if record.phase in (Phase.DRAINING, Phase.COMMITTING):
            return {}
        return self.records.pop(save).held

    def known_nodes(self, nodes: set[str]) -> None:
        """What lies elsewhere is out of reach."""
        for record in self.records.values():
            for node in {n for holders in record.held.values() for n in holders} - nodes:
                record.lost(node)

    def _record(self, save: SaveId, world_size: int, now: float) -> Record:
        if save not in self.records:
            self.records[save] = Record(save, world_size, now)
            self._prune()
        record = self.records[save]
        record.world_size = record.world_size or world_size  # that of what was found on the store is not known
        return record

    @property
    def _incomplete(self) -> list[Record]:
        return [record for record in self.records.values() if record.incomplete]

    @property
    def anything_held(self) -> bool:
        """Whether some segment of some save lies in an arena."""
        return any(record.held for record in self.records.values())

    @property
    def newest_staged(self) -> Record | None:
        """The newest save that every rank delivered and that still lies in memory."""
        return max((r for r in self.records.values() if r.staged and r.in_memory), key=lambda r: r.save, default=None)

    def only_here(self, seen: Collection[SaveId]) -> list[SaveId]:
        """Checkpoints in memory that somebody may miss and the store does not have. seen: what lies there now.

        A half with segments here counts: after a restart all ranks may have staged it, and nobody has said so yet.
        """
        newest, durable = self.newest_staged, max(seen, default=None)
        staged = [r for r in self.records.values() if r.staged and r.in_memory and r.save not in seen]
        wanted = [r for r in staged if r is newest or (r.forced and r.phase is not Phase.DURABLE)]
        wanted += [r for r in self._incomplete if r.held]
        return sorted(r.save for r in wanted if r.forced or durable is None or not r.save <= durable)

    def _prune(self) -> None:
        ended = sorted(s for s, r in self.records.items() if r.end is not None and not r.held and s != self.active)
        for save in ended[: max(0, len(self.records) - MAX_RECORDS)]:
            end = self.records.pop(save).end
            assert end is not None  # noqa: S101 - only ended ones were taken
            self._past[end] += 1

    @property
    def ends(self) -> Counter[End]:
        """How many saves ended how, of all that this coordinator has known. Who waits again is none of them."""
        return self._past + Counter(record.end for record in self.records.values() if record.end is not None)

    def world_size_of(self, save: SaveId) -> int:
        """The ranks of a save that lies in memory or on the store."""
        return self.on_store[save].world_size if save in self.on_store else self.records[save].world_size

    def notes_of(self, save: SaveId) -> tuple[str, ...]:
        """What a user who loads the save should know of it."""
        found = self.on_store[save].compared if save in self.on_store else ""
        text = doubt(self.records[save].compared if save in self.records and not found else found)
        return (f"step {save.step}: {text}",) if text else ()

    def known(self, incarnation: int) -> tuple[Progress, ...]:
        """What a rank that comes back must learn about the saves of its incarnation."""
        return tuple(
            Progress(
                save=r.save, milestone=r.milestone, end=r.end, reason=r.reason, mismatched=r.mismatched, where=r.where
            )
            for r in self.records.values()
            if r.save.incarnation == incarnation
        )
