"""What runs that are not the job's left in this node's memory: kept beside its own, and given up after a time. Pure."""

from collections.abc import Container, Iterable

from ckptd.core import events as ev
from ckptd.core.actions import Action, Note
from ckptd.core.node.parity import Protection
from ckptd.core.node.slot_retention import SlotRetention
from ckptd.core.node.slots import SlotTable
from ckptd.core.policy import Policy
from ckptd.shared.base.ids import JobKey, Run, SaveId
from ckptd.shared.protocol.messages import SlotsRefused


class ForeignMemory:
    """Slots and parity that are neither reused nor freed with the job's saves, each run's for orphan_ttl_s."""

    def __init__(
        self, job: JobKey, policy: Policy, slots: SlotTable, slot_retention: SlotRetention, protection: Protection
    ) -> None:
        self._job = job
        self._ttl_s = policy.orphan_ttl_s
        self._slots = slots
        self._slot_retention = slot_retention
        self._protection = protection
        self._runs: frozenset[Run] = frozenset()
        self._disputed: frozenset[Run] = frozenset()
        self._since: dict[Run, float] = {}  # by run: since when it is not the job's for sure

    def isolate(self, runs: frozenset[Run], disputed: frozenset[Run] = frozenset()) -> None:
        """These runs, and no others, are not the job's. disputed: those of which it is not known, which stay."""
        self._runs, self._disputed = runs, disputed
        self._slot_retention.foreign(runs)
        self._protection.foreign = runs
        self._slot_retention.pending |= self._slots.mark_foreign(runs)

    def only_here(self, on_store: Iterable[SaveId]) -> set[SaveId]:
        """What is held here and the store has nothing as new of the same run."""
        durable = list(on_store)
        held = {slot.save for slot in self._slots.foreign if slot.save is not None}
        return {save for save in held if not any(d.owner == save.owner and save <= d for d in durable)}

    def give_up(self, runs: Container[Run]) -> list[Action]:
        """The memory of these is free again."""
        count = sum(slot.save is not None and slot.save.owner in runs for slot in self._slots.foreign)
        text = f"{count} segments of other runs of this job were given up after orphan_ttl"
        return [*self._slots.drop_foreign(runs), *self._protection.drop_foreign(runs), Note(job=self._job, text=text)]

    def refusal(self, event: ev.SlotsFailed) -> SlotsRefused:
        """For a rank that is short of memory: with how much they hold, and what to type, when there are any."""
        message, hint, foreign = event.message, event.hint, self._slots.foreign
        if foreign:
            mib = sum(slot.capacity for slot in foreign) / (1 << 20)
            message += f"; {len(foreign)} segments of other runs of this job hold {mib:.0f} MiB here"
            hint = "; ".join(filter(None, [hint, f"ckptd forget {self._job.job} gives them back"]))
        return SlotsRefused(code=event.code, message=message, hint=hint)

    @property
    def _aging(self) -> set[Run]:
        """Runs here that are given up one day."""
        if not self._runs:
            return set()
        return {slot.save.owner for slot in self._slots.foreign if slot.save is not None} - self._disputed

    @property
    def until(self) -> float | None:
        """When the next is given up; in the past while nobody has looked at the clock; None while there are none."""
        return min((self._since.get(run, float("-inf")) + self._ttl_s for run in self._aging), default=None)

    def too_old(self, now: float) -> set[Run]:
        """Runs whose time is over."""
        self._since = {run: self._since.get(run, now) for run in self._aging}
        return {run for run, since in self._since.items() if now >= since + self._ttl_s}
