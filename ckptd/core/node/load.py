"""Answers to the ranks of this node in a load: where to read, once it can be read there. Pure."""

from collections.abc import Callable

from ckptd.core import events as ev
from ckptd.core.actions import Action
from ckptd.core.node.load_reports import LoadReports
from ckptd.core.node.ranks import LocalRank, LocalRanks
from ckptd.core.node.readers import Readers, read_name
from ckptd.core.node.slots import Slot, SlotTable
from ckptd.shared.base.ids import JobKey, SaveId
from ckptd.shared.protocol.messages import LoadFrom, Tier


class LoadAnswers:
    """``report`` makes the action that sends to the coordinator."""

    def __init__(
        self,
        job: JobKey,
        ranks: LocalRanks,
        slots: SlotTable,
        report: Callable[[ev.Fact], Action],
        readers: Readers,
    ) -> None:
        self._job = job
        self._readers = readers
        self._ranks = ranks
        self._slots = slots
        self.reports = LoadReports(job, ranks, report)
        self.save: SaveId | None = None  # being loaded, so its slots stay
        self.spare: SaveId | None = None  # its load was refused: a copy made for it may be all that is left of a rank's

    def protects(self, order: ev.GatherOrdered | ev.FetchOrdered) -> list[Action]:
        """Its slots stay from here on."""
        self.save, self.spare = order.save, None
        return []

    def forget(self) -> None:
        """The job is over."""
        self.save = self.spare = None

    def copied(self, newest: SaveId | None) -> set[SaveId]:
        """Saves of which copies stay. newest: that is staged; the next load begins with nothing older."""
        spare = self.spare if newest is None or self.spare is None or self.spare >= newest else None
        return {save for save in (self.save, spare) if save is not None}

    def unreadable(self, save: SaveId) -> list[Action]:
        """Some slot of the save cannot be read: a rank that waits for its digests finds out by trying."""
        actions: list[Action] = []
        for local in self._ranks.admitted.values():
            order = local.load_order
            if order is not None and order.save == save:
                local.load_order = None
                actions += self._answer_one(local, order, "")
        return actions

    def word(self, event: ev.LoadAsked | ev.LoadReported) -> list[Action]:
        """A rank asks, or says what became of its reading."""
        local = self._ranks.admitted.get(event.rank)
        if local is None:
            return []
        local.load_request = event.request
        local.load_asked = event if isinstance(event, ev.LoadAsked) else local.load_asked
        return self.reports.said(event)

    def ordered(self, order: ev.LoadOrdered) -> list[Action]:
        """The coordinator sends the ranks to read, or says that all have."""
        self.save, self.spare = None if order.agreed else order.save, None
        self._readers.ordered(order)
        for local in self._ranks.admitted.values():
            local.load_order = order if local.load_request is not None else None
        return self.answer()

    def answer(self) -> list[Action]:
        """Answers the ranks that have their order and can follow it: a slot can be read once its digests are taken."""
        actions: list[Action] = []
        for local in self._ranks.admitted.values():
            order = local.load_order
            slots = self._slots_to_read(local.rank, order) if order is not None else []
            if order is not None and all(slot.digested for slot in slots):
                local.load_order = None
                actions += self._answer_one(local, order, slots[0].name if slots else "")
        return actions

    def _slots_to_read(self, rank: int, order: ev.LoadOrdered) -> list[Slot]:
        if order.save is None or order.agreed or order.saved_by or order.tiers.of_rank(rank) is Tier.PFS:
            return []
        slots = self._slots.holding(order.save)
        return slots if order.whole else [slot for slot in slots if slot.rank == rank][:1]

    def _answer_one(self, local: LocalRank, order: ev.LoadOrdered, slot: str) -> list[Action]:
        request, local.load_request = local.load_request, None
        alone = order.save is None or order.agreed or bool(slot) or bool(order.saved_by)
        answer = LoadFrom(
            reply_to=request or 0,
            incarnation=order.incarnation,
            run=order.run,
            save=order.save,
            tier=order.tiers.of_rank(local.rank) if slot or order.saved_by else Tier.PFS,
            whole=order.whole and bool(slot),
            slot=slot,
            saved_by=order.saved_by,
            path=self._path(order),
            readers=[] if alone else sorted(r for r in self._ranks.admitted if not self._slots_to_read(r, order)),
            read="" if alone else read_name(order),
            shared=not alone and self._readers.others_read(order),
            agreed=order.agreed,
            notes=list(order.notes),
        )
        return self._ranks.tell(local.rank, answer)

    def _path(self, order: ev.LoadOrdered) -> str:
        """On the store, where the save's own name says: what the coordinator calls it leads nowhere else."""
        if order.save is None or not order.dirname:
            return ""
        return f"{self._job.store}/{self._job.job}/{order.save.dirname}"

    def refused(self, order: ev.LoadRefused) -> list[Action]:
        """The load failed."""
        if order.rank is None:
            self.spare = self.save or self.spare
            self.save = None
        actions: list[Action] = []
        for local in self._ranks.admitted.values():
            if order.rank not in (None, local.rank):
                continue
            request, local.load_request, local.load_order = local.load_request, None, None
            if request is not None:
                actions += self._ranks.refuse(local.rank, request, order.code, order.message, order.hint)
        return actions
