"""All jobs of a daemon: hands each event to the right half of the right job, and loops local messages back. Pure."""

from collections import deque
from dataclasses import dataclass
from functools import partial

from msgspec.structs import replace

from ckptd.core import events as ev
from ckptd.core.actions import Action, DropChunk, ForgetJob, KeepNumber, ScanStore, ToNode, ToRank, UnlinkSlot
from ckptd.core.beside import Beside
from ckptd.core.coordinator.coordinator import Coordinator
from ckptd.core.coordinator.journal import Journal
from ckptd.core.links import Links
from ckptd.core.node.node import JobNode
from ckptd.core.policy import Policy
from ckptd.core.scrub.scrub import Paces, Scrub
from ckptd.shared.base.errors import CkptdError, UsageError
from ckptd.shared.base.ids import JobKey
from ckptd.shared.protocol.messages import Done, Refused

_FIRST = (ev.TopologyKept, ev.StoreRemembered, ev.RankAttached, ev.RankFound, ev.SlotAdopted)  # a job can begin with it
_REPORTS = (ev.Report, ev.Reports)
_MAX_NUMBERS = 4096  # of jobs; the clock has passed those of older ones


@dataclass(slots=True)
class Job:
    """Both halves of a job. Every daemon could coordinate; the one of rank 0 does."""

    node: JobNode
    coordinator: Coordinator
    links: Links
    journal: Journal
    scrub: Scrub


class Catalogue:
    """``handle(event, now) -> actions``. ``now`` is any steady clock, in seconds."""

    def __init__(self, node: str, policy: Policy) -> None:
        self.node = node
        self.policy = policy
        self.jobs: dict[JobKey, Job] = {}
        self._beside = Beside()
        self._paces = Paces(policy)
        self._numbers: dict[JobKey, int] = {}  # the largest of each job, also of one of which nothing is left here

    def handle(self, event: ev.Event, now: float) -> list[Action]:
        """What to do about an event, messages between the halves on this node already delivered."""
        if isinstance(event, ev.NumberKept):
            self._numbers[event.job] = event.number
            return []
        if event.job not in self.jobs and not isinstance(event, _FIRST):  # a late outcome, for a job that is gone
            return _afterwards(event)
        return self._deliver(deque([event]), [], now)

    def tick(self, now: float) -> list[Action]:
        """What is due by now, in all jobs."""
        out: list[Action] = []
        for job in list(self.jobs.values()):
            self._tick(job, out, now)
            if (due := job.coordinator.due.at) is not None and due <= now and job.node.job in self.jobs:
                self._tick(job, out, now)  # what it gave back has made something else due
        return out

    def _tick(self, job: Job, out: list[Action], now: float) -> None:
        inbox: deque[ev.Event] = deque()
        due = job.coordinator.tick(now)
        recorded = self._recorded(job, None, due, now)
        scrubbed = self._beside(job.node.job, "scrub", lambda: job.scrub.tick(now))
        self._route(job.node.job, [*due, *recorded, *job.node.tick(now), *scrubbed], inbox, out)
        self._deliver(inbox, out, now)

    def adopted(self, key: JobKey, now: float) -> list[Action]:
        """All slots and live ranks of a job found at start are in: asks for what is missing to continue with them."""
        job = self._job(key)
        inbox: deque[ev.Event] = deque()
        out: list[Action] = []
        coordinates = job.node.coordinator == self.node
        asked = job.coordinator.adopted(now) if coordinates else []
        asked += self._recorded(job, None, asked, now)
        self._route(key, [*job.node.slots.digests_due(), *asked], inbox, out)
        if coordinates and not job.node.ranks.live and not any(slot.save for slot in job.node.slots):
            inbox.append(ev.JobReleased(job=key, node=self.node))
        if not coordinates and not job.node.needed:
            out.append(ForgetJob(job=key))
        return self._deliver(inbox, out, now)

    def look_before_forgetting(self, key: JobKey) -> ScanStore | None:
        """What must be asked first, since the table may be older than the store; None: nothing is held here."""
        job = self.jobs.get(key)
        if job is None or job.node.coordinator != self.node or not any(slot.save for slot in job.node.slots):
            return None
        return replace(job.coordinator.sessions.scan(None), make=False)

    def forget(self, key: JobKey, *, force: bool, seen: ev.StoreScanned | None = None) -> list[Action]:
        """Gives up all that the job has on this node. Raises CkptdError with the reason when that does harm.

        seen: the answer to look_before_forgetting.

        A drain that runs finds its slots gone or continues in what it has mapped; what it leaves is no checkpoint.
        """
        job = self.jobs.get(key)
        if job is None:
            known = ", ".join(sorted({known.job for known in self.jobs})) or "none"
            raise UsageError(f"this daemon has no job {key.job!r} with store {key.store!r}", hint=f"its jobs: {known}")
        live = [job.node.ranks.live[place] for place in sorted(job.node.ranks.live)]
        if live or job.coordinator.sessions.wanted:
            ranks = (f"rank {rank.rank} (pid {rank.pid} on {rank.host})" for rank in live)
            who = ", ".join(ranks) or "ranks that wait to join"
            raise CkptdError(f"job {key.job!r} lives: {who}", hint="end those processes first")
        elsewhere = job.node.coordinator
        if elsewhere != self.node and not force and any(slot.save for slot in job.node.slots):
            text = (
                f"node {elsewhere} knows whether what job {key.job!r} has in memory here is needed, this one does not"
            )
            raise CkptdError(text, hint=f"ckptd forget {key.job} on {elsewhere}, or give it up with --force")
        durable = {found.save for found in seen.committed} if seen is not None else set()
        lost = job.coordinator.facts.only_here(durable)
        if lost and not force:
            steps, problem = ", ".join(str(save.step) for save in lost), seen.problem if seen is not None else ""
            text = f"step {steps} of job {key.job!r} is in memory only and not durable: it would be lost"
            if problem:
                text = f"step {steps} of job {key.job!r} is in memory, and nothing tells whether the store has it"
            hint = f"ckptd drain --job {key.job} --wait, or give it up with --force"
            raise CkptdError(f"{text}: {problem}" if problem else text, hint=hint)
        foreign = sorted({save.step for save in job.node.foreign.only_here(durable)})
        if foreign and not force:
            steps = ", ".join(map(str, foreign))
            text = f"step {steps} of another run of job {key.job!r} is in memory only and not durable: it would be lost"
            raise CkptdError(text, hint="load(run=...) restores it; or give it up with --force")
        slots = [UnlinkSlot(job=key, slot=slot.name) for slot in job.node.slots]
        del self.jobs[key]
        return [*job.node.membership.emptied(), *slots, ForgetJob(job=key)]

    def next_deadline(self) -> float | None:
        """When tick must be called at the latest."""
        times = [at for job in self.jobs.values() for at in (job.coordinator.due.at, job.node.due.at, job.scrub.due)]
        return min((at for at in times if at is not None), default=None)

    @property
    def empty(self) -> bool:
        """Whether no rank is here and no memory is in use."""
        return not any(job.node.busy or job.coordinator.sessions.attended for job in self.jobs.values())

    def check(self) -> None:
        """Asserts the invariants of every job."""
        for job in self.jobs.values():
            job.node.check()
            job.node.due.check()
            job.coordinator.check()
            job.coordinator.due.check()

    def _job(self, key: JobKey) -> Job:
        if key not in self.jobs:
            number = self._numbers.get(key, 0)
            links = Links(self.node)
            node = JobNode(key, self.node, self.policy, number, links)
            coordinator = Coordinator(key, self.node, self.policy, number, links)
            scrub = Scrub(node, coordinator, links, self.policy, self._paces, self._no_drain)
            self.jobs[key] = Job(node, coordinator, links, Journal(coordinator), scrub)
        return self.jobs[key]

    def _deliver(self, inbox: deque[ev.Event], out: list[Action], now: float) -> list[Action]:
        while inbox:
            event = inbox.popleft()
            job = self._job(event.job)
            kind = type(event)
            if isinstance(event, ev.PeerUp):
                job.links.came(event.node)
            elif isinstance(event, ev.PeerDown):
                job.links.went(event.node, rests=event.rests)
                if event.rests:
                    job.node.due.changed()
                    continue  # no node was lost, and no machine waits for one to which it has no use for a link
            if kind in _REPORTS or kind in job.coordinator.events:
                actions = job.coordinator.handle(event, now)
                self._route(event.job, [*actions, *self._recorded(job, event, actions, now)], inbox, out)
            if kind in job.node.events or kind in job.node.orders:
                self._route(event.job, job.node.handle(event), inbox, out)
            scrubbed = self._beside(event.job, "scrub", partial(job.scrub.follow, event, now))
            self._route(event.job, scrubbed, inbox, out)
            if isinstance(event, ev.SessionOpened) and job.node.coordinator != self.node:
                job.coordinator.retire(event.incarnation)
                self._route(event.job, self._recorded(job, event, [], now), inbox, out)
        kept = [a for a in out if isinstance(a, ForgetJob) and self._coordinates_others(a.job)]
        out[:] = [action for action in out if action not in kept]
        for action in out:
            if isinstance(action, ForgetJob):
                self.jobs.pop(action.job, None)
        return out

    def _recorded(self, job: Job, event: ev.Event | None, actions: list[Action], now: float) -> list[Action]:
        return self._beside(job.node.job, "journal", lambda: job.journal.follow(event, actions, now))

    def _no_drain(self) -> bool:
        """Whether nothing is being written to a store."""
        return not any(job.node.drain.at_work or job.coordinator.facts.active for job in self.jobs.values())

    def _coordinates_others(self, key: JobKey) -> bool:
        """Whether ranks or memory of other nodes depend on this daemon, though nothing of the job is here."""
        job = self.jobs.get(key)
        return job is not None and bool(job.coordinator.sessions.attended or job.coordinator.facts.anything_held)

    def _route(self, key: JobKey, actions: list[Action], inbox: deque[ev.Event], out: list[Action]) -> None:
        out += self._reserve(key)
        for action in actions:
            if not isinstance(action, ToNode):
                out.append(action)
                continue
            for node in [action.node] if action.node is not None else self._receivers(key, action.message):
                if node == self.node:
                    inbox.append(action.message)
                else:
                    out.append(ToNode(job=key, node=node, message=action.message))

    def _reserve(self, key: JobKey) -> list[Action]:
        """A number that some half of the job knows is kept before any rank or node receives it from here."""
        job = self._job(key)
        number = max(job.node.incarnation, job.coordinator.sessions.incarnation)
        if number <= self._numbers.get(key, 0):
            return []
        self._numbers.pop(key, None)
        self._numbers[key] = number
        if len(self._numbers) > _MAX_NUMBERS:
            del self._numbers[next(iter(self._numbers))]
        return [KeepNumber(job=key, number=number)]

    def _receivers(self, key: JobKey, message: ev.NodeMessage) -> list[str]:
        """Of a message that names none: a report goes to the coordinator, an order to every node of the job."""
        if isinstance(message, ev.Report):
            return [self._job(key).node.coordinator]
        sessions = self._job(key).coordinator.sessions
        pending_jobs = sessions.heard_of if isinstance(message, ev.SessionRefused) else set()
        return sorted(sessions.nodes | pending_jobs)


def _afterwards(event: ev.Event) -> list[Action]:
    """What an event still asks for whose job is gone: memory to be given back, or an answer."""
    match event:
        case ev.SlotReady():
            return [UnlinkSlot(job=event.job, slot=event.slot), ForgetJob(job=event.job)]
        case ev.SegmentFetched() if event.slot:
            return [UnlinkSlot(job=event.job, slot=event.slot), ForgetJob(job=event.job)]
        case ev.Encoded() if not event.problem:
            dropped = DropChunk(job=event.job, save=event.save, epoch=event.epoch)
            return [dropped, ForgetJob(job=event.job)]
        case ev.RankDetached():
            done = Done(reply_to=event.request)
            return [ToRank(job=event.job, rank=event.rank, session=event.session, message=done)]
        case ev.FromRank() if event.session:
            refusal = Refused(reply_to=event.request, code="stale", message="the job was replaced and is over")
            return [ToRank(job=event.job, rank=event.rank, session=event.session, message=refusal)]
    return []
