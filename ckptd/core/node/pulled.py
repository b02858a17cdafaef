"""Parts of other nodes' segments that ranks of this node want in a load: asked for, pulled, and given back. Pure.

The order to load names the node of each segment. What lies on this node is read where it is. Of each other segment the
seal is asked for once, then what the ranks want is pulled into a partial segment, which they share. Those stay until
each rank that wanted some has read it, or the load is refused, or another begins.
"""

from dataclasses import dataclass, field

from ckptd.core import events as ev
from ckptd.core.actions import Action, DropPulled, Pull, PullSegments
from ckptd.core.links import Links
from ckptd.core.node.fetch import Fetching
from ckptd.core.node.ranks import LocalRanks
from ckptd.core.node.slots import Slot, SlotTable
from ckptd.core.policy import Policy
from ckptd.shared.base.ids import JobKey
from ckptd.shared.format.slot import Seal
from ckptd.shared.protocol.messages import SegmentsHere, Tier
from ckptd.shared.protocol.parity_types import ParityChunk
from ckptd.shared.protocol.segments import SegmentHere, SegmentLacks

_OVER = "this load is over, or the ranks are sent to read something else"


@dataclass(slots=True)
class _Waiting:
    """A rank, for segments that are not known here yet."""

    event: ev.SegmentsWanted
    lacks: dict[int, str] = field(default_factory=dict)


class PulledSegments(Fetching):
    """Of the newest order to load. The base asks holders for seals, and gives those up that do not answer."""

    def __init__(  # noqa: PLR0913, PLR0917 - the node's parts that it asks
        self, job: JobKey, node: str, policy: Policy, links: Links, ranks: LocalRanks, slots: SlotTable
    ) -> None:
        super().__init__(job, node, policy, links)
        self._ranks = ranks
        self._slots = slots
        self._order: ev.LoadOrdered | None = None
        self._homes: dict[int, str] = {}  # of the order's segments, once a rank wants some
        self._seals: dict[int, Seal] = {}  # of segments of other nodes
        self._waiting: list[_Waiting] = []
        self._pulled: list[ev.SegmentsWanted] = []  # are being pulled
        self._users: set[tuple[int, str]] = set()  # ranks, and their sessions, that may still read

    @property
    def nodes(self) -> set[str]:
        """From which something may be pulled: as long as ranks read, the link stays."""
        holders = {self._homes[rank] for rank in self._seals} if self._users else set()
        return super().nodes | holders

    def ordered(self, order: ev.LoadOrdered) -> list[Action]:
        """Ranks are sent to read; or all have read it, and may read on."""
        before, again = self._order, self._order is not None and self._order.save == order.save
        if again and (order.agreed or order == before):
            return []
        gone = [] if again and order.saved_by else self._drop()
        lost = self._end_waits()
        self._order = order if order.saved_by else None
        return [*gone, *lost]

    def over(self) -> list[Action]:
        """The load is refused, or its session ended."""
        actions = [*self._drop(), *self._end_waits()]
        self._order = None
        return actions

    def _end_waits(self) -> list[Action]:
        """No holder is asked for anything any more: ranks wait for an answer without a deadline."""
        answers = [action for waiting in self._waiting for action in self._answer(waiting, refused=_OVER)]
        self.forget()
        self._homes, self._seals, self._waiting = {}, {}, []
        return answers

    def refused(self, order: ev.LoadRefused) -> list[Action]:
        """On all ranks the load is over."""
        return self.over() if order.rank is None else []

    def _drop(self) -> list[Action]:
        used, self._users = self._users, set()
        save = self._order.save if self._order is not None else None
        return [DropPulled(job=self._job, save=save)] if used and save is not None else []

    def left(self, event: ev.RankGone | ev.RankDetached | ev.SegmentsDropped) -> list[Action]:
        """The rank reads nothing any more."""
        user = event.rank, event.session
        self._waiting = [waiting for waiting in self._waiting if (waiting.event.rank, waiting.event.session) != user]
        if self._users != {user}:
            self._users.discard(user)
            return []
        return self._drop()

    def dropped(self, event: ev.SegmentsDropped) -> list[Action]:
        """The rank has read what it wanted."""
        ours = self._order is not None and self._order.save == event.save
        return [*(self.left(event) if ours else []), *self._ranks.done(event.rank, event.request)]

    def wanted(self, event: ev.SegmentsWanted) -> list[Action]:
        """A rank wants segments, or parts of them."""
        if self._order is None or self._order.save != event.save:
            answer = SegmentsHere(reply_to=event.request, refused=f"{event.save} is not being loaded here (any more)")
            return self._ranks.answer(event, answer)
        if not self._homes:
            size, holders = self._order.saved_by, self._order.holders
            self._homes = {r: one.node for one in holders for run in one.ranks for r in run.below(size)}
        self._users.add((event.rank, event.session))
        waiting, asks = _Waiting(event), list[Action]()
        self._waiting.append(waiting)
        for rank in [one.rank for one in event.wanted]:
            holder = self._homes.get(rank)
            if holder is None:
                waiting.lacks[rank] = "no node is known to have it"
            elif holder != self._node and rank not in self._seals and (event.save, rank) not in self._orders:
                asks += self.order(self._ask_of(rank, holder), None)
        return [*asks, *self.settled()]

    def _ask_of(self, rank: int, holder: str) -> ev.FetchOrdered:
        order = self._order
        assert order is not None and order.save is not None  # noqa: S101, PT018 - the caller has checked
        return ev.FetchOrdered(
            job=self._job, node=order.node, rank=rank, save=order.save, tier=Tier.PEER, holder=holder
        )

    def _pull(self, order: ev.FetchOrdered, seal: Seal, chunk: ParityChunk | None) -> list[Action]:
        """The holder has sent its seal."""
        del chunk
        self.drop(order)
        if seal.rank != order.rank or seal.save != order.save:
            return self._failed(order, f"its seal is of rank {seal.rank} of {seal.save}")
        self._seals[order.rank] = seal
        return self.settled()

    def _failed(self, order: ev.FetchOrdered, problem: str) -> list[Action]:
        self.drop(order)
        for waiting in self._waiting:
            if any(one.rank == order.rank for one in waiting.event.wanted):
                waiting.lacks[order.rank] = problem
        return self.settled()

    def settled(self) -> list[Action]:
        """Begins to pull what ranks want of which all is known, and answers those for whom nothing is pulled."""
        ready = [waiting for waiting in self._waiting if self._is_known(waiting)]
        self._waiting = [waiting for waiting in self._waiting if waiting not in ready]
        return [action for waiting in ready for action in self._begin(waiting)]

    def _is_known(self, waiting: _Waiting) -> bool:
        for rank in (one.rank for one in waiting.event.wanted if one.rank not in waiting.lacks):
            if self._homes[rank] != self._node:
                if rank not in self._seals:
                    return False
            elif (slot := self._slot(rank)) is None or slot.unreadable:
                waiting.lacks[rank] = slot.unreadable if slot is not None else "it is not in the memory of this node"
            elif not slot.digested:
                return False
        return True

    def _slot(self, rank: int) -> Slot | None:
        save = self._order.save if self._order is not None else None
        return next((s for s in self._slots.holding(save) if s.rank == rank), None) if save is not None else None

    def _begin(self, waiting: _Waiting) -> list[Action]:
        event = waiting.event
        pulls = [
            Pull(self._homes[one.rank], self._seals[one.rank], one.ranges)
            for one in event.wanted
            if one.rank in self._seals and one.rank not in waiting.lacks
        ]
        if not pulls or waiting.lacks:  # what lacks comes from elsewhere in the next round
            return self._answer(waiting)
        self._pulled.append(event)
        return [
            PullSegments(
                job=self._job, rank=event.rank, session=event.session, request=event.request, save=event.save,
                pulls=tuple(pulls),
            )
        ]  # fmt: skip

    def pulled(self, event: ev.SegmentsPulled) -> list[Action]:
        """It is here, or cannot be had."""
        key = event.rank, event.session, event.request
        asked = next((one for one in self._pulled if (one.rank, one.session, one.request) == key), None)
        if asked is None:
            return []
        self._pulled.remove(asked)
        return self._answer(_Waiting(asked, dict(event.lacks)), dict(event.files), event.refused)

    def _answer(self, waiting: _Waiting, files: dict[int, str] | None = None, refused: str = "") -> list[Action]:
        event, names = waiting.event, dict(files or {})
        for rank in (one.rank for one in event.wanted if self._homes.get(one.rank) == self._node):
            if (slot := self._slot(rank)) is not None:
                names[rank] = slot.name
        answer = SegmentsHere(
            reply_to=event.request,
            files=[SegmentHere(rank, name) for rank, name in sorted(names.items()) if rank not in waiting.lacks],
            lacks=[SegmentLacks(rank, problem[:4000]) for rank, problem in sorted(waiting.lacks.items())],
            refused=refused[:4000],
        )
        return self._ranks.answer(event, answer)
