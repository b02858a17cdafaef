"""What a job that closes still owes where a drain cannot read it: segments that parity alone has. Pure.

A load has lost segments rebuilt as far as its ranks need them. A job that loads something older, or nothing, and ends
leaves its newest checkpoint with what a lost node has left of it: that is rebuilt at nodes that answer, then drained.
"""

from ckptd.core import events as ev
from ckptd.core.actions import Action, Note, ToNode
from ckptd.core.coordinator.job_state import JobState
from ckptd.core.coordinator.locations import Routes
from ckptd.core.coordinator.save_record import Record
from ckptd.shared.base.ids import SaveId


class LastRebuild:
    """Orders are repeated until the segments lie somewhere: a node that carries one out takes it once."""

    def __init__(self, facts: JobState) -> None:
        self._facts, self._routes = facts, Routes(facts)
        self._save: SaveId | None = None  # being rebuilt
        self._order_at: float | None = None
        self.notes: list[Action] = []  # said when the memory of the job is given back

    @property
    def owed(self) -> Record | None:
        """The newest checkpoint that can be had and is not durable, if no node that answers has some of it."""
        durable = max(self._facts.on_store, default=None)
        for save in sorted(self._routes.candidates(), reverse=True):
            record = self._facts.records[save]
            if durable is not None and save <= durable:
                return None
            if save.incarnation == self._facts.disputed or record.mismatched:
                continue
            if not self._missing(record):
                return None  # it is drained as it is
            if self._facts.rebuildable(record):
                return record
        return None

    def _missing(self, record: Record) -> list[int]:
        return [rank for rank in range(record.world_size) if not self._routes.has(record.save, rank)]

    def react(self, now: float) -> list[Action]:
        """Has what is owed rebuilt, after a moment in which nodes may come back."""
        record = self.owed
        if record is None:
            self.forget()
            return []
        if self._save != record.save:
            self._save, self._order_at = record.save, now + self._facts.policy.outside_wait_s
        if self._order_at is None or now < self._order_at:
            return []
        self._order_at = now + self._facts.policy.drain_retry_max_s
        missing = self._missing(record)
        orders = [order for rank in missing for order in self._order(record, rank)]
        return orders or [
            self._note(record, missing, "waits in parity to be rebuilt and drained, but it cannot be now")
        ]

    def _note(self, record: Record, missing: list[int], fate: str) -> Action:
        why = self._routes.why_not(record.save, missing)
        return Note(job=self._facts.job, text=f"the job is over, and {record.save} {fate}: {why}")

    def give_up(self) -> None:
        """The memory of the job is given back, with what is owed: notes say so."""
        record = self.owed
        fate = "is given up, which was never drained"
        self.notes = [] if record is None else [self._note(record, self._missing(record), fate)]

    def _order(self, record: Record, rank: int) -> list[Action]:
        """At a node that has something of the job: others may have forgotten it. Nothing while too many are silent."""
        nodes = sorted(self._facts.holders & self._facts.links.up) or [self._facts.node]
        home = self._routes.home(rank)
        at = home if home in nodes else nodes[rank % len(nodes)]
        order = self._routes.fetch(record.save, rank, set(), at)
        return [ToNode(job=self._facts.job, node=at, message=order)] if order is not None else []

    def fetched(self, event: ev.SegmentFetched) -> list[Action]:
        """One was rebuilt, or cannot be now."""
        if not event.problem or event.save != self._save:
            return []
        again = f"again in {self._facts.policy.drain_retry_max_s:g} s at most"
        text = f"the job is over, and rank {event.rank} of {event.save} cannot be rebuilt to be drained, {again}"
        return [Note(job=self._facts.job, text=f"{text}: {event.problem}")]

    def forget(self) -> None:
        """Nothing is owed."""
        self._save = self._order_at = None

    def next_deadline(self) -> float | None:
        """When to look again."""
        return self._order_at
