"""Which saves a node keeps in its slots because the coordinator's word on them is out, or holds. Pure."""

from collections.abc import Container

from ckptd.core import events as ev
from ckptd.core.actions import Action
from ckptd.core.node.standing import Standing
from ckptd.shared.base.ids import Run, SaveId
from ckptd.shared.protocol.messages import End


class SlotRetention:
    """What is kept for protection, drains and loads is known elsewhere."""

    def __init__(self, standing: Standing) -> None:
        self._standing = standing
        self.newest_staged: SaveId | None = None
        self.resumed: SaveId | None = None  # the job went on from it, and has staged nothing since
        self._resumed_as = 0  # the incarnation that began then
        self.durable: SaveId | None = None  # the newest
        self.pending: set[SaveId] = set()  # held here, neither staged nor given up by the coordinator
        self.forced: set[SaveId] = set()  # to be drained for sure, so kept until they are
        self.unended: set[SaveId] = set()  # staged, and its end is not known here
        self.settled = 0  # the incarnation that has a checkpoint as safe as it was to become

    @property
    def wanted(self) -> set[SaveId]:
        """Saves whose slots must stay."""
        resumed = None if self._resumed_is_spare else self.resumed
        return self.pending | self.forced | {s for s in (self.newest_staged, resumed) if s is not None}

    @property
    def _resumed_is_spare(self) -> bool:
        """Whether what the job went on from lies on the store, and an older incarnation staged something newer.

        With the newest protected one that makes three saves, and leaves ranks of three slots none for the next save.
        """
        resumed, newest, durable = self.resumed, self.newest_staged, self.durable
        if resumed is None or newest is None or durable is None:
            return False
        return resumed < newest and resumed <= durable

    def staged(self, order: ev.SaveStaged) -> list[Action]:
        """Every rank delivered it."""
        save = order.save
        self.pending.discard(save)
        self.unended.add(save)
        self.newest_staged = max(save, self.newest_staged or save)
        if self.resumed is not None and save.incarnation > self.resumed.incarnation:
            self.resumed = None
        return []

    def loaded(self, order: ev.LoadOrdered) -> list[Action]:
        """All ranks have read it, once they agree."""
        if order.agreed:
            self.resumed, self._resumed_as = order.save, order.incarnation
        return []

    def resumed_in(self, incarnation: int) -> SaveId | None:
        """What that incarnation began with, if a load began it."""
        return self.resumed if self._resumed_as == incarnation else None

    def ended(self, order: ev.SaveEnded) -> list[Action]:
        """Its end is decided. What is durable or kept was staged, though a new coordinator may never have said so.

        What an older incarnation staged is abandoned only when too much of it is lost.
        """
        self.pending.discard(order.save)
        self.forced.discard(order.save)
        self.unended.discard(order.save)
        older = order.save.incarnation < self._standing.incarnation
        if order.end is End.ABANDONED and order.save == self.newest_staged and older:
            self.newest_staged = None
        if order.end is End.DURABLE:
            self.durable = max(order.save, self.durable or order.save)
        if order.end in (End.DURABLE, End.KEPT):
            self.newest_staged = max(order.save, self.newest_staged or order.save)
            self.settled = max(self.settled, order.save.incarnation)
        return []

    def foreign(self, runs: Container[Run]) -> None:
        """These runs are not the job's: nothing of theirs is kept as the job's newest."""
        self.pending = {save for save in self.pending if save.owner not in runs}
        self.forced = {save for save in self.forced if save.owner not in runs}
        self.unended = {save for save in self.unended if save.owner not in runs}
        newest, resumed, durable = self.newest_staged, self.resumed, self.durable
        self.newest_staged = None if newest is not None and newest.owner in runs else newest
        self.resumed = None if resumed is not None and resumed.owner in runs else resumed
        self.durable = None if durable is not None and durable.owner in runs else durable

    def obsolete(self, order: ev.SavesObsolete) -> list[Action]:
        """These are of no use to anybody."""
        self.pending -= set(order.saves)
        self.forced -= set(order.saves)
        self.unended -= set(order.saves)
        self.newest_staged = order.newest if self.newest_staged in order.saves else self.newest_staged
        return []

    def released(self) -> None:
        """The job is over."""
        self.newest_staged = self.resumed = self.durable = None
        self.pending.clear()
        self.forced.clear()
        self.unended.clear()
