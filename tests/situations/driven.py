"""Situations of a job as its daemon's status builder shows them: the cores are driven there, at fixed times."""

import time
from collections import deque
from collections.abc import Callable, Iterator

import msgspec

from ckptd.core import actions as act
from ckptd.core import events as ev
from ckptd.daemon import status as builder
from ckptd.history.account import Account
from ckptd.shared.base.ids import SaveId
from ckptd.shared.protocol.node_facts import StagedSegment
from ckptd.shared.protocol.status import JobStatus, Status
from tests.runs import RUN, STORE_ID
from tests.seals import a_seal
from tests.unit import a_status
from tests.unit.core import a_job
from tests.unit.core.nodes import a_cluster
from tests.unit.core.nodes.test_connect_costs import Played

GIB = 1 << 30
LARGE = 1000  # nodes
_SEGMENT_NBYTES = 24 * GIB


def of_jobs(jobs: list[JobStatus], node: str) -> Status:
    """What is not of the job is that of any daemon."""
    shown = {"version": "0.1.0", "errors": [], "refused_messages": 0, "workers": [], "node": node}
    return msgspec.structs.replace(a_status.status(jobs=jobs), tightest_limit="MemAvailable of /proc/meminfo", **shown)


def save(number: int) -> SaveId:
    """The one of step 50 times number."""
    return SaveId(1, number, 50 * number, RUN)


class SlowStore(a_job.AJob):
    """Two ranks of 24 GiB that save each 20 s; the store takes 34 s for a drain."""

    def stage(self, rank: int, save: SaveId, **_words: object) -> int:
        self.say(ev.SegmentStaged(
            job=a_job.KEY, request=self.request(), rank=rank, session="a", world_size=self.world, slot=self.idle(rank),
            save=save, nbytes=_SEGMENT_NBYTES,
        ))  # fmt: skip
        return self.seq

    def slots(self, rank: int, session: str = "a", capacity: int = _SEGMENT_NBYTES) -> None:
        super().slots(rank, session, capacity)

    def play(self, saves: int) -> "SlowStore":
        for rank in range(2):
            self.say(ev.RankFound(job=a_job.KEY, rank=rank, session="a", pid=4100 + rank, host="gpu01"))
        self.start()
        ends_at = 0.0
        for number in range(1, saves + 1):
            self.stage_all(save(number))
            for _ in range(20):
                self.tick(1.0)
                active = self.facts.active
                began = self.facts.records[active].drain_since if active is not None else self.now
                ends_at = began + 34.0
                if active is not None and self.now >= ends_at:
                    self.drain(active)
                    self.tick()
        return self


def store_slow() -> Status:
    """The store takes longer for a save than there is from one to the next."""
    job = SlowStore(slots_per_rank=40, arena="/dev/shm/ckptd-1000").play(10)
    notes = [action.text for action in job.of(act.Note)]
    return of_jobs(builder.jobs(job.catalogue.jobs, job.now, {a_job.KEY: notes[:1]}), "gpu01")


def on_record(job: a_job.AJob) -> Account:
    """What the job's journal comes to. The newest record is of now."""
    found = job.of(act.KeepEntry)
    began = time.time() - max(action.age_s for action in found)
    account = Account()
    for action in found:
        account.add(msgspec.structs.replace(action.began, at=began))
        account.add(msgspec.structs.replace(action.entry, at=began + action.age_s - action.ago_s))
    return account


def healthy() -> Status:
    """The newest save is durable; nothing waits."""
    return _of_one(_healthy())


def damaged() -> Status:
    """A scrub has found a bit flip that neither parity nor the store could make good."""
    job = _healthy(scrub_memory=4 << 20)
    job.tick(3601.0)
    (block,) = job.of(act.ScrubBlock)
    job.say(ev.BlockScrubbed(
        job=a_job.KEY, name=block.name, save=block.save, nbytes=16 << 20, damage="block 3 is not as its digest says"
    ))  # fmt: skip
    return _of_one(job)


def _healthy(**policy: object) -> SlowStore:
    job = SlowStore(slots_per_rank=8, **policy)
    for rank in range(2):
        job.say(ev.RankFound(job=a_job.KEY, rank=rank, session="a", pid=4100 + rank, host="gpu01"))
    job.start()
    job.stage_all(save(1))
    job.tick(2.0)
    job.drain(save(1))
    job.tick(1.0)
    return job


def _of_one(job: a_job.AJob) -> Status:
    """With what is on record."""
    account = on_record(job)
    return of_jobs(builder.jobs(job.catalogue.jobs, job.now, {}, lambda _job: account), "gpu01")


def node_lost() -> Status:
    """One of four nodes is gone; what it had is protected."""
    cluster = a_cluster.a_protected_job()
    cluster.cut_off("c")
    cluster.tick(30.0)
    return of_jobs(builder.jobs(cluster.nodes["a"].catalogue.jobs, cluster.now, {}), "a")


def restoring() -> Status:
    """All ranks of four nodes were sent to read a step, and two have."""
    cluster = a_cluster.a_protected_job()
    cluster.end_ranks()
    cluster.connect("abcd")
    seqs = cluster.ask()
    cluster.tick(4.0)
    for rank in range(2):
        answer = cluster.answer(rank, seqs[rank])
        cluster.say(
            cluster.node(rank),
            ev.LoadReported(
                job=a_cluster.KEY, rank=rank, session=cluster.sid, request=cluster.seq(), save=answer.save,
                tier=answer.tier, problem="",
            ),
        )  # fmt: skip
    cluster.settle()
    cluster.tick(1.0)
    return of_jobs(builder.jobs(cluster.nodes["a"].catalogue.jobs, cluster.now, {}), "a")


class Large(Played):
    """A coordinator of many nodes, with slots of its own; only the words of the others are played."""

    def __init__(self, nodes: int) -> None:
        super().__init__(nodes)
        self.now, self.serial = 1.0, 0
        self.silent: frozenset[str] = frozenset()
        self.store_busy = False  # drains do not end
        self._queue: deque[ev.Event] = deque()

    def say(self, event: ev.Event) -> None:
        """And all that follows at once."""
        self._queue.append(event)
        while self._queue:
            while self._queue:  # as the daemon's loop: what has come, then what is due
                for action in self.core.handle(self._queue.popleft(), self.now):
                    self._queue.extend(self._outcome(action))
            for action in self.core.tick(self.now):
                self._queue.extend(self._outcome(action))

    def _outcome(self, action: act.Action) -> Iterator[ev.Event]:
        match action:
            case act.TakeIncarnation():
                self.taking = action
            case act.AllocateSlots(job=job, rank=rank, count=count, capacity=capacity):
                yield ev.SlotsFit(job=job, rank=rank)
                for _ in range(count):
                    self.serial += 1
                    slot = f"r{rank:05d}-{self.serial:06d}.slot"
                    yield ev.SlotReady(job=job, rank=rank, slot=slot, capacity=capacity)
            case act.TakeDigests(job=job, slot=slot, save=saved):
                seal = a_seal(job, saved, int(slot[1:6]), len(self.topology.homes))
                yield ev.DigestsSealed(job=job, slot=slot, save=saved, seal=seal)
            case act.Encode(job=job, chunk=chunk):
                yield ev.Encoded(job=job, save=chunk.save, epoch=chunk.epoch)
            case act.Drain(job=job, save=saved) if not self.store_busy:
                yield ev.Drained(job=job, save=saved)
            case act.WriteVote(job=job, save=saved):
                yield ev.VoteWritten(job=job, save=saved)
            case act.Commit(job=job, save=saved):
                yield ev.CommitEnded(job=job, save=saved, nbytes=len(self.topology.homes) * _SEGMENT_NBYTES)
            case act.ToNode(node=node, message=message) if node is not None and node not in self.silent:
                yield from self._answer(node, message)

    def _answer(self, node: str, message: ev.NodeMessage) -> Iterator[ev.Event]:
        match message:
            case ev.EncodeOrdered(job=job, save=saved, epoch=epoch):
                yield ev.Report(job=job, node=node, event=ev.Encoded(job=job, save=saved, epoch=epoch))
            case ev.DrainOrdered(job=job, save=saved) if not self.store_busy:
                yield ev.Report(job=job, node=node, event=ev.VoteWritten(job=job, save=saved))

    def play(self) -> "Large":
        self.connect()
        for name in self.names[1:]:
            self.say(ev.PeerUp(job=a_cluster.KEY, node=name))
            self.report(name, self.attached(name, members=True))
            living = self.attached(name).living
            self.report(name, ev.NodeHas(job=a_cluster.KEY, incarnation=1, run=RUN, session="s" * 32, living=living))
        self.say(ev.StoreScanned(job=a_cluster.KEY, store_id=STORE_ID, after=a_job.LATE))
        for rank in self.topology.ranks_of(self.names[0]):
            asked = ev.SlotsAsked(
                job=a_cluster.KEY, request=100 + rank, rank=rank, session="s" * 32, capacity=_SEGMENT_NBYTES
            )
            self.say(asked)
        return self

    def stage(self, number: int) -> None:
        """All ranks of the nodes that are not silent hand a save over."""
        world = len(self.topology.homes)
        for rank in self.topology.ranks_of(self.names[0]):
            slots = self.core.jobs[a_cluster.KEY].node.slots.of_rank(rank)
            self.say(ev.SegmentStaged(
                job=a_cluster.KEY, request=1000 * number + rank, rank=rank, session="s" * 32, world_size=world,
                slot=next(slot.name for slot in slots if slot.granted), save=save(number), nbytes=_SEGMENT_NBYTES,
            ))  # fmt: skip
        for name in [name for name in self.names[1:] if name not in self.silent]:
            segments = tuple(StagedSegment(rank, _SEGMENT_NBYTES) for rank in self.topology.ranks_of(name))
            fact = ev.SegmentsStaged(
                job=a_cluster.KEY, session="s" * 32, save=save(number), world_size=world, segments=segments
            )
            self.report(name, fact)

    def tick(self, seconds: float) -> None:
        self.now += seconds
        for action in self.core.tick(self.now):
            self._queue.extend(self._outcome(action))
        while self._queue:
            self.say(self._queue.popleft())


def thousand_nodes(nodes: int = LARGE) -> Status:
    """Eight ranks each. Of seven nodes nothing is heard since before the last save."""
    job = Large(nodes).play()
    job.stage(1)
    job.tick(60.0)
    job.store_busy = True
    job.stage(2)
    job.tick(60.0)
    job.silent = frozenset(name for place, name in enumerate(job.names) if place in {3, *range(7, 13)})
    for name in sorted(job.silent):
        job.say(ev.PeerDown(job=a_cluster.KEY, node=name))
    job.stage(3)
    job.tick(30.0)
    return of_jobs(builder.jobs(job.core.jobs, job.now, {}), job.names[0])


SITUATIONS: dict[str, Callable[[], Status]] = {
    "store slow": store_slow,
    "node lost": node_lost,
    "restoring": restoring,
    "1,000 nodes": thousand_nodes,
}
