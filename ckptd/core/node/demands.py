"""What ranks and users of a node asked of the coordinator, while no order shows that it knows. Pure.

A link that breaks loses reports. So each demand is state of the node, and said again with all else that the node has.
"""

from collections.abc import Container

from msgspec.structs import replace

from ckptd.core import events as ev
from ckptd.core.actions import Action
from ckptd.core.node.membership import Membership
from ckptd.core.node.slot_retention import SlotRetention
from ckptd.shared.base.ids import Run, SaveId
from ckptd.shared.protocol.messages import End


class Demands:
    """``durable``: this save is wanted durable, or a newer one; None: none is."""

    def __init__(self, membership: Membership, slot_retention: SlotRetention) -> None:
        self._membership = membership
        self._slot_retention = slot_retention
        self.durable: SaveId | None = None
        self._skipped: dict[SaveId, ev.SaveSkipped] = {}
        self._preempt: ev.PreemptAsked | None = None

    def made(self, event: ev.SaveSkipped | ev.DrainAsked | ev.PreemptAsked) -> list[Action]:
        """A save is over on all nodes; the newest is wanted durable; or this session, and no later, is preempted."""
        match event:
            case ev.SaveSkipped():
                self._skipped[event.save] = event
            case ev.DrainAsked():
                saves = (*self._slot_retention.pending, self._staged)
                self.durable = max((save for save in saves if save is not None), default=self.durable)
            case ev.PreemptAsked() if event.passed is None:
                self._preempt = replace(event, session=self._membership.session)
        return [self._membership.report(event)]

    @property
    def _staged(self) -> SaveId | None:
        """The newest save that is staged, and not durable."""
        staged, durable = self._slot_retention.newest_staged, self._slot_retention.durable
        return None if staged is None or (durable is not None and staged <= durable) else staged

    def ended(self, order: ev.SaveEnded) -> list[Action]:
        """A save has ended. Where it never was whole, the newest that is stays wanted."""
        save, wanted = order.save, self.durable
        self._skipped.pop(save, None)
        if wanted is None or save < wanted:
            return []
        if order.end is End.DURABLE or (order.end is End.FAILED and save == wanted):
            self.durable = None
        elif order.end in (End.ABANDONED, End.SKIPPED) and save == wanted:
            self.durable = self._staged
        return []

    def preempt_ordered(self, order: ev.PreemptOrdered) -> list[Action]:
        """The coordinator preempts this session."""
        if self._preempt is not None and self._preempt.session == order.session:
            self._preempt = None
        return []

    def foreign(self, runs: Container[Run]) -> None:
        """These runs are not the job's."""
        self.durable = None if self.durable is not None and self.durable.owner in runs else self.durable

    def obsolete(self, order: ev.SavesObsolete) -> list[Action]:
        """These saves are of no use any more."""
        self.durable = self._staged if self.durable in order.saves else self.durable
        return []

    def released(self) -> None:
        """The job is over."""
        self.durable, self._preempt = None, None
        self._skipped.clear()

    def repeat(self) -> list[ev.Fact]:
        """Those of the present session that have a report of their own."""
        session = self._membership.session
        self._skipped = {save: event for save, event in self._skipped.items() if event.session in ("", session)}
        preempt = self._preempt if self._preempt is not None and self._preempt.session == session else None
        return [*self._skipped.values(), *((preempt,) if preempt is not None else ())]
