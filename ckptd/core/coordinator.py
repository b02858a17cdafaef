"""One job as rank 0's daemon sees it: who the job is, how far each save has come, what a load restores. Pure."""

from ckptd.core import events as ev
from ckptd.core.actions import Action, ScanStore, ToNode
from ckptd.core.policy import Policy
from ckptd.core.restores import Restores
from ckptd.core.saves import Saves
from ckptd.core.sessions import Sessions
from ckptd.protocol.ids import JobKey
from ckptd.protocol.messages import End


class Coordinator:
    """The job-wide half of a job; lives on the node of rank 0."""

    def __init__(self, job: JobKey, node: str, policy: Policy) -> None:
        self.job = job
        self._node = node
        self._policy = policy
        self.sessions = Sessions(job, node, policy)
        self.saves = Saves(job, node, policy)
        self.restores = Restores(job, node, policy)
        self._asked_scan = False
        self._rescan_at: float | None = None  # the store did not answer; drains wait until it does
        self.orphaned_at: float | None = None  # when the last rank ended without closing
        self._closing = False  # every rank closed: free the memory once durable

    def handle(self, event: ev.Event, now: float) -> list[Action]:
        """What to do about a report of a node, or the outcome of an action of the coordinator."""
        match event:
            case ev.Report():
                return self._report(event.node, event.event, now)
            case ev.IncarnationTaken():
                return self._incarnation(event)
            case ev.StoreScanned():
                return self._scanned(event, now)
            case ev.CommitEnded():
                return [*self.saves.committed(event, now), *self._release_when_safe(now)]
            case ev.CheckpointRemoved():
                return self.saves.removed(event)
        raise AssertionError(f"no row for {event}")

    def _report(self, node: str, event: ev.Event, now: float) -> list[Action]:  # noqa: C901 - one line per event
        match event:
            case ev.RankFound():
                self.sessions.found(event)
                return []
            case ev.RankAttached():
                return self._attached(node, event, now)
            case ev.RankGone() | ev.RankDetached():
                return self._left(event, now)
            case ev.SegmentStaged():
                return self._staged(node, event, now)
            case ev.SegmentReleased():
                self.saves.released(node, event)
                return []
            case ev.SaveSkipped():
                return self.saves.skipped(event, self.sessions.world_size, now)
            case ev.DrainAsked():
                return self.saves.drain_newest(now)
            case ev.DrainMoved():
                self.saves.moved(node, event)
                return []
            case ev.Drained() | ev.VoteWritten():
                return self.saves.voted(node, event.save, event.problem, now)
            case ev.LoadAsked():
                self.saves.hold_retention = True
                known = self.sessions.incarnation
                return self._load(self.restores.asked(event, self.sessions.world_size, known, self.saves, now))
            case ev.LoadReported():
                return self._load(self.restores.reported(event, self.sessions.world_size, self.saves))
        raise AssertionError(f"no row for {event}")

    def _attached(self, node: str, event: ev.RankAttached, now: float) -> list[Action]:
        self._closing, self.orphaned_at = False, None
        self.saves.cadence = event.cadence
        scan: list[Action] = [] if self._asked_scan else [ScanStore(job=self.job)]
        self._asked_scan = True
        return [*scan, *self._with_news(self.sessions.attach(node, event, now))]

    def adopted(self, now: float) -> list[Action]:
        """Memory of the job was found at start and nobody is attached yet."""
        self.orphaned_at, self._asked_scan = now, True
        return [ScanStore(job=self.job)]

    def _with_news(self, actions: list[Action]) -> list[Action]:
        """Adds to each welcome what became of the saves of that incarnation."""
        known = self.saves.known(self.sessions.incarnation)
        for i, action in enumerate(actions):
            if isinstance(action, ToNode) and isinstance(action.message, ev.SessionOpened):
                order = action.message
                news = ev.SessionOpened(
                    job=order.job,
                    node=order.node,
                    session=order.session,
                    incarnation=order.incarnation,
                    ranks=order.ranks,
                    known=known,
                    warnings=order.warnings,
                )
                actions[i] = ToNode(job=self.job, node=action.node, message=news)
        return actions

    def _left(self, event: ev.RankGone | ev.RankDetached, now: float) -> list[Action]:
        ours = event.session == self.sessions.session and event.rank in self.sessions.members
        actions = self.sessions.gone(event.rank, event.session, now)
        if not ours:
            return actions
        crashed = isinstance(event, ev.RankGone)
        actions += self.saves.rank_gone(event.rank, "ended" if crashed else "closed")
        actions += self._load(self.restores.rank_gone(event.rank))
        if not self.sessions.members:
            self.orphaned_at = now if crashed else None
            self._closing = not crashed
            actions += self.saves.drain_newest(now)
            actions += self._release_when_safe(now)
        return actions

    def _staged(self, node: str, event: ev.SegmentStaged, now: float) -> list[Action]:
        self.sessions.incarnation = max(self.sessions.incarnation, event.save.incarnation)
        actions = self.saves.staged(node, event, now)
        for rank in sorted(self.sessions.departed) if event.request else []:
            actions += self.saves.rank_gone(rank, "left the job")
        return actions

    def _incarnation(self, event: ev.IncarnationTaken) -> list[Action]:
        if self.sessions.taking:
            actions = self._with_news(self.sessions.opened(event))
            return [*actions, *self.saves.new_incarnation(self.sessions.incarnation)]
        if not self.restores.wants_incarnation:
            return []
        self.sessions.incarnation = max(event.number, self.sessions.incarnation + 1)
        number = self.sessions.incarnation
        actions = self.saves.new_incarnation(number)
        return [*actions, *self._load(self.restores.incarnation_taken(number, self.sessions.world_size, self.saves))]

    def _scanned(self, event: ev.StoreScanned, now: float) -> list[Action]:
        self._rescan_at = now + self._policy.drain_retry_max_s / 4 if event.problem and not self.saves.ready else None
        actions = self.saves.scanned(event, self.sessions.incarnation, now)
        actions += self._load(self.restores.scanned(event, self.sessions.world_size, self.saves))
        return [*actions, *self._release_when_safe(now)]

    def _load(self, actions: list[Action]) -> list[Action]:
        """After each word of a load: retention may go on when the load is over."""
        if self.saves.hold_retention and not self.restores.running:
            self.saves.hold_retention = False
            actions += self.saves.retire()
        return actions

    def _release_when_safe(self, now: float) -> list[Action]:
        """A closed job's memory is free once its newest checkpoint is durable; a crashed one's after orphan_ttl_s."""
        expired = self.orphaned_at is not None and now - self.orphaned_at >= self._policy.orphan_ttl_s
        if self.sessions.members or not (self._closing or expired):
            return []
        newest = self.saves.newest_staged
        waits = newest is not None and newest.end not in (End.DURABLE, End.FAILED)
        if (waits or self.saves.active is not None) and not expired:
            return []
        self._closing, self.orphaned_at = False, None
        return [ToNode(job=self.job, message=ev.JobReleased(job=self.job, node=self._node))]

    def next_deadline(self) -> float | None:
        """The earliest time at which tick has something to do."""
        times = [self.sessions.next_deadline(), self.saves.next_deadline(), self.restores.next_deadline()]
        times.append(self._rescan_at)
        if self.orphaned_at is not None:
            times.append(self.orphaned_at + self._policy.orphan_ttl_s)
        return min((t for t in times if t is not None), default=None)

    def tick(self, now: float) -> list[Action]:
        """What is due by now."""
        actions = [*self.sessions.tick(now), *self.saves.tick(now)]
        if self._rescan_at is not None and now >= self._rescan_at:
            self._rescan_at = None
            actions.append(ScanStore(job=self.job))
        actions += self._load(self.restores.tick(now, self.sessions.world_size))
        return [*actions, *self._release_when_safe(now)]
