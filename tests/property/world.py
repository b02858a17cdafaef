"""A small model of everything around a catalogue: ranks, arena, store, clock. It executes actions and checks promises.

Whatever is asynchronous in a daemon waits in ``todo`` until a test completes it, well or badly, or the daemon dies.
"""

import re
from dataclasses import dataclass, field

from ckptd.core import actions as act
from ckptd.core import events as ev
from ckptd.core.jobs import Catalogue
from ckptd.core.policy import Policy
from ckptd.shared.base.ids import NO_RUN, JobKey, SaveId
from ckptd.shared.protocol.messages import (
    Attached,
    Cadence,
    End,
    LoadFrom,
    Milestone,
    Notice,
    Progress,
    Refused,
    SegmentsHere,
    SlotGranted,
    SlotsRefused,
    Tier,
)
from ckptd.shared.protocol.scrubbing import Harm
from ckptd.shared.protocol.segments import Wanted
from tests.runs import RUN, STORE_ID
from tests.seals import a_seal

KEY = JobKey("/store", "job")
POLICY = Policy(
    slots_per_rank=3, keep_last=2, connect_timeout_s=30, stage_timeout_s=300, drain_give_up_s=120,
    scrub_memory=1 << 30, scrub_memory_every_s=5000.0, scrub_store=1 << 30, scrub_store_every_s=5000.0,
)  # fmt: skip
REOPENED = {End.KEPT, End.FAILED}
LOST = {End.SKIPPED, End.ABANDONED, End.FAILED}
ASYNC = (
    act.AllocateSlots, act.TakeDigests, act.TakeIncarnation, act.ScanStore, act.Drain, act.WriteVote, act.Commit,
    act.RemoveCheckpoint, act.RemovePartial, act.ScrubBlock, act.CopyBlock, act.ScrubPiece, act.Mend,
)  # fmt: skip


@dataclass
class File:
    """A slot file: what its seal in force says."""

    rank: int
    capacity: int
    world: int = 1
    save: SaveId | None = None
    digested: bool = False
    damaged: bool = False  # a bit has flipped since it was digested


@dataclass
class Proc:
    """A training process, and what its client knows."""

    session: str
    rank: int
    world: int
    cadence: Cadence
    takeover: bool
    alive: bool = True
    state: str = "new"  # new, waiting, in, lost (its daemon died), stale (replaced, and told so), out (ended)
    incarnation: int = 0
    capacity: int = 0
    counter: int = 0
    granted: dict[str, int] = field(default_factory=dict)
    unheard: list[tuple[str, SaveId]] = field(default_factory=list)  # sealed, and no daemon answered
    waits: dict[int, str] = field(default_factory=dict)  # requests without an answer
    saves: dict[SaveId, list[End | None]] = field(default_factory=dict)
    staged: set[SaveId] = field(default_factory=set)
    reading: LoadFrom | None = None
    has_segments: bool = False  # which the order says that each rank may need any of
    loading: bool = False
    skipped: set[SaveId] = field(default_factory=set)

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.session}"


class World:
    """One node. ``say`` is the daemon's loop: an event, all its actions, a tick."""

    def __init__(self) -> None:
        self.now = 0.0
        self.files: dict[str, File] = {}
        self.serials: dict[int, int] = {}
        self.procs: list[Proc] = []
        self.known: set[tuple[int, str]] = set()  # live ranks this daemon has seen
        self.todo: list[act.Action] = []
        self.committed: dict[SaveId, int] = {}  # on the store: save -> world size
        self.ever: set[SaveId] = set()
        self.votes: dict[SaveId, int] = {}  # partial directories with a synced vote
        self.drained: dict[SaveId, int] = {}
        self.store_number = 0
        self.made_up = False  # some number did not come from the store
        self.read: dict[int, bool] = {}  # by scrub that has read: it found damage
        self.bad: set[SaveId] = set()  # committed, and an image of rank 0 is damaged
        self.mended: set[SaveId] = set()
        self.staged: dict[SaveId, int] = {}  # ever seen whole -> world size
        self.past: set[SaveId] = set()  # staged once, given up when their job was over
        self.orphan_since: float | None = None
        self.seq = 0
        self.lives = 1
        self.catalogue: Catalogue | None = Catalogue("node", POLICY)
        self.trace: list[str] = []
        self.exits: list[Proc] = []  # refused at the door, about to end
        self.broken = False  # a promise was: what follows says nothing

    # --- the daemon

    def say(self, event: ev.Event) -> None:
        if self.catalogue is None:
            return
        self.trace.append(f"{self.now:g} > {event}")
        self._perform(self.catalogue.handle(event, self.now))
        self.tick()

    def tick(self) -> None:
        if self.catalogue is None:
            return
        self._perform(self.catalogue.tick(self.now))
        due = self.catalogue.next_deadline()
        assert due is None or due > self.now, "the loop would spin"
        self.check()
        while self.exits:
            proc = self.exits.pop()
            if proc.alive:
                self.end(proc, crash=True)

    def _perform(self, actions: list[act.Action]) -> None:
        self._note_staged()
        for action in actions:
            self.trace.append(f"    < {action}")
            if isinstance(action, ASYNC):
                self.todo.append(action)
                self._read(action)
            elif isinstance(action, act.Note) and action.text.startswith("scrub"):
                self._found(action.text)
            elif isinstance(action, act.ToRank):
                self._hear(action)
            elif isinstance(action, act.FreeSlot):
                self._may_go(action.slot)
                self.files[action.slot].save, self.files[action.slot].digested = None, False
                self.files[action.slot].damaged = False
            elif isinstance(action, act.UnlinkSlot):
                self._may_go(action.slot)
                del self.files[action.slot]

    # --- scrubs

    def damage(self, name: str) -> None:
        """A bit flips in what a slot holds."""
        self.trace.append(f"a bit flips in {name}")
        self.files[name].damaged = True

    def _read(self, action: act.Action) -> None:
        """A scrub reads now, and its answer comes later, when something else may lie there."""
        if isinstance(action, act.ScrubBlock):
            file = self.files.get(action.name)
            there = file is not None and file.save == action.save and file.digested
            assert there, f"{action} of what is not there"
            self.read[id(action)] = file.damaged
        elif isinstance(action, act.ScrubPiece):
            self.read[id(action)] = action.save in self.bad

    def _found(self, text: str) -> None:
        """A finding is true, now: an alarm for what was given away meanwhile is false."""
        step = int(re.search(r"of step (\d+)", text)[1])
        rank = int(re.search(r"rank (\d+)", text)[1])
        if " on the store: " in text:
            assert any(save.step == step for save in self.bad | self.mended), text
            return
        held = [f for f in self.files.values() if f.rank == rank and f.save is not None and f.save.step == step]
        assert any(f.damaged for f in held) or (held and "; made good from" in text), text

    def _may_go(self, slot: str) -> None:
        """A slot is freed or unlinked: nobody may be reading it for a good purpose."""
        for action in self.todo:
            if isinstance(action, act.Drain | act.WriteVote):
                assert slot not in action.slots, f"{slot} goes while {action}"
        for proc in self.procs:
            if proc.alive and proc.state == "in" and slot in self._read_by(proc):
                assert not self._current(proc), f"{slot} goes while {proc} reads it"

    def _read_by(self, proc: Proc) -> set[str]:
        order = proc.reading
        if order is None or not (order.whole or order.saved_by):
            return {order.slot} if order is not None else set()
        return {name for name, file in self.files.items() if file.save == order.save}

    def _current(self, proc: Proc) -> bool:
        job = self.catalogue.jobs.get(KEY) if self.catalogue else None
        return (
            bool(job)
            and job.coordinator.sessions.session == proc.session
            and job.coordinator.restores.running is not None
        )

    def crash(self, effects: list[bool]) -> None:
        """SIGKILL: what was in progress may or may not have happened."""
        for action, happened in zip(self.todo, effects, strict=False):
            if happened:
                self._effect(action)
        self.todo, self.catalogue, self.known, self.read = [], None, set(), {}
        self.trace.append("daemon killed")
        for proc in self.procs:
            if proc.alive and proc.state in ("waiting", "in"):
                proc.state = "lost" if proc.incarnation else "new"
                proc.waits.clear()
                proc.reading, proc.loading, proc.has_segments = None, False, False

    def restart(self) -> None:
        self.lives += 1
        self.catalogue = Catalogue("node", POLICY)
        self.trace.append("daemon started")
        if any(f.save for f in self.files.values()):
            for name in sorted(self.files):
                f = self.files[name]
                self.serials[f.rank] = max(self.serials.get(f.rank, 0), int(name[7:13]))
                self.say_quietly(ev.SlotAdopted(
                    job=KEY, rank=f.rank, slot=name, capacity=f.capacity, world_size=f.world, save=f.save,
                    nbytes=10 if f.save else 0, seal=a_seal(KEY, f.save, f.rank) if f.digested and f.save else None,
                ))  # fmt: skip
        else:
            self.files.clear()
        if KEY in self.catalogue.jobs:
            self._look()
            self._perform(self.catalogue.adopted(KEY, self.now))
        self.orphan_since = self.now
        self.tick()

    def say_quietly(self, event: ev.Event) -> None:
        self.trace.append(f"{self.now:g} > {event}")
        self._perform(self.catalogue.handle(event, self.now))

    def _look(self) -> None:
        for proc in self.procs:
            if proc.alive and proc.state != "out" and (proc.rank, proc.session) not in self.known:
                self.known.add((proc.rank, proc.session))
                self.say_quietly(ev.RankFound(job=KEY, rank=proc.rank, session=proc.session, pid=1, host="h"))

    # --- what ends in the background

    def finish(self, index: int, *, well: bool) -> None:
        action = self.todo.pop(index)
        self.trace.append(f"{'done' if well else 'FAILED'}: {action}")
        outcome = self._outcome(action, well)
        for event in outcome:
            self.say(event)

    def _outcome(self, action: act.Action, well: bool) -> list[ev.Event]:  # noqa: C901
        problem = "" if well else "EIO"
        if well or isinstance(action, act.TakeDigests):
            made = self._effect(action)
        match action:
            case act.AllocateSlots(rank=rank, count=count, capacity=capacity):
                if well:
                    ready = [ev.SlotReady(job=KEY, rank=rank, slot=n, capacity=capacity) for n in made]
                    return [ev.SlotsFit(job=KEY, rank=rank), *ready] if action.instead else ready
                return [ev.SlotsFailed(job=KEY, rank=rank, count=count, code="budget", message="full", hint="")]
            case act.TakeDigests(slot=slot, save=save):
                f = self.files.get(slot)
                if f is None or f.save != save:
                    return []
                return [ev.DigestsSealed(job=KEY, slot=slot, save=save, seal=a_seal(KEY, save, f.rank))]
            case act.TakeIncarnation(session=session):
                self.made_up |= not well
                return [
                    ev.IncarnationTaken(
                        job=KEY, session=session, number=self.store_number if well else 0, problem=problem, run=RUN
                    )
                ]
            case act.ScanStore(after=after, claim=claim):
                claimed = claim.incarnation if claim is not None else 0
                found = tuple(ev.OnStore(s, w, 10, s.dirname) for s, w in sorted(self.committed.items()))
                incomplete = {s: False for s in self.drained if s not in self.committed}
                incomplete |= {s: True for s in self.votes if s not in self.committed}
                partials = tuple(ev.Partial(s, c) for s, c in sorted(incomplete.items()))
                if well:
                    return [
                        ev.StoreScanned(
                            job=KEY, store_id=STORE_ID, after=after, committed=found, partials=partials, claimed=claimed
                        )
                    ]
                return [ev.StoreScanned(job=KEY, after=after, problem=problem)]
            case act.Drain(save=save):
                return [ev.Drained(job=KEY, save=save, problem=problem)]
            case act.WriteVote(save=save):
                return [ev.VoteWritten(job=KEY, save=save, problem=problem)]
            case act.Commit(save=save):
                return [ev.CommitEnded(job=KEY, save=save, nbytes=10 if well else 0, problem=problem)]
            case act.RemoveCheckpoint(save=save):
                return [ev.CheckpointRemoved(job=KEY, save=save, problem=problem)]
        return self._scrubbed(action, well)

    def _scrubbed(self, action: act.Action, well: bool) -> list[ev.Event]:
        """The outcome of a scrub; badly: the store does not answer, or what was read was given away meanwhile."""
        match action:
            case act.ScrubBlock(name=name, save=save):
                bad = self.read.pop(id(action))
                return [
                    ev.BlockScrubbed(
                        job=KEY, name=name, save=save, nbytes=10, last=action.block >= 0, gone=not well,
                        damage="damaged" if bad and well and action.block >= 0 else "",
                    )
                ]  # fmt: skip
            case act.CopyBlock(name=name, save=save):
                file = self.files.get(name)
                well &= file is not None and file.save == save and save in self.committed
                if well:
                    file.damaged = False
                return [ev.BlockCopied(job=KEY, name=name, save=save, problem="" if well else "EIO")]
            case act.ScrubPiece(save=save):
                bad = self.read.pop(id(action))
                harms = (Harm("image", "damaged", 0),) if bad and well else ()
                gone, problem = save not in self.committed, "" if well else "EIO"
                return [ev.PieceScrubbed(job=KEY, save=save, nbytes=10, harms=harms, gone=gone, problem=problem)]
            case act.Mend(save=save, slots=slots):
                well &= save in self.committed and all(
                    name in self.files and self.files[name].save == save and not self.files[name].damaged
                    for _, name in slots
                )
                if well and slots:
                    self.bad.discard(save)
                    self.mended.add(save)
                    return [ev.MendEnded(job=KEY, number=action.number, save=save, memory=action.ranks)]
                lost = {"lost": action.ranks, "problem": "nothing has it"}
                return [ev.MendEnded(job=KEY, number=action.number, save=save, **lost)]
        return []

    def _effect(self, action: act.Action) -> list[str]:  # noqa: C901
        match action:
            case act.AllocateSlots(rank=rank, count=count, capacity=capacity):
                names = []
                for _ in range(count):
                    self.serials[rank] = self.serials.get(rank, 0) + 1
                    names.append(f"r{rank:05d}-{self.serials[rank]:06d}.slot")
                    self.files[names[-1]] = File(rank, capacity)
                return names
            case act.TakeDigests(slot=slot, save=save):
                if slot in self.files and self.files[slot].save == save:
                    self.files[slot].digested = True
            case act.TakeIncarnation(at_least=at_least):
                self.store_number = max(self.store_number + 1, at_least)
            case act.Drain(save=save, slots=slots):
                worlds = {self.files[s].world for s in slots if s in self.files and self.files[s].save == save}
                assert len(worlds) == 1, f"drain of {save} from slots that do not hold it"
                assert len(slots) == max(worlds), f"drain of {save} without all ranks"
                self.drained[save] = max(worlds)
            case act.WriteVote(save=save, slots=slots):
                assert save in self.drained
                assert all(self.files[s].save == save and self.files[s].digested for s in slots)
                self.votes[save] = self.drained[save]
            case act.Commit(save=save):
                assert save in self.votes or save in self.committed, f"commit of {save} without votes"
                self.committed[save] = self.votes.get(save) or self.committed[save]
                self.ever.add(save)
            case act.RemoveCheckpoint(save=save):
                assert save in self.committed
                assert save != max(self.committed), "retention took the newest"
                del self.committed[save]
            case act.RemovePartial(save=save):
                assert save not in self.votes or save in self.committed or any(c > save for c in self.committed) or (
                    self.votes[save] and save < max(self.ever, default=save)
                ), f"{save} could have been committed"  # fmt: skip
                self.votes.pop(save, None)
                self.drained.pop(save, None)
        return []

    # --- ranks speak

    def request(self, proc: Proc, what: str) -> int:
        self.seq += 1
        proc.waits[self.seq] = what
        return self.seq

    def attach(self, proc: Proc) -> None:
        if not proc.alive:
            return
        self._look()
        self.known.add((proc.rank, proc.session))
        proc.state = "waiting"
        self.say(ev.RankAttached(
            job=KEY, request=self.request(proc, "attach"), session=proc.session, rank=proc.rank,
            world_size=proc.world, host="h", pid=1, incarnation=proc.incarnation,
            run=RUN if proc.incarnation else NO_RUN, takeover=proc.takeover,
            cadence=proc.cadence,
        ))  # fmt: skip

    def ask_slots(self, proc: Proc, capacity: int) -> None:
        proc.capacity = capacity
        proc.granted = {n: c for n, c in proc.granted.items() if c >= capacity}
        seq = self.request(proc, "slots")
        self.say(ev.SlotsAsked(job=KEY, request=seq, rank=proc.rank, session=proc.session, capacity=capacity))

    def save(self, proc: Proc, step: int, *, drain: bool) -> None:
        """A rank saves: into a slot that it was granted, or not at all. Without a daemon the seal waits for one."""
        proc.counter += 1
        save = SaveId(proc.incarnation, proc.counter, step, RUN)
        proc.saves[save] = [None]
        fitting = [n for n, c in proc.granted.items() if c >= proc.capacity and n in self.files]
        if not fitting:
            proc.saves[save].append(End.SKIPPED)
            proc.skipped.add(save)
            if proc.state == "in":
                self.say(ev.SaveSkipped(
                    job=KEY, request=self.request(proc, "skip"), rank=proc.rank, session=proc.session, save=save,
                    reason="no slot",
                ))  # fmt: skip
            return
        slot = fitting[0]
        del proc.granted[slot]
        f = self.files[slot]
        assert f.save is None, f"{proc} was granted {slot}, which holds {f.save}"
        f.save, f.world, f.digested = save, proc.world, False
        if proc.state == "in":
            self.hand_over(proc, slot, save, drain=drain)
        else:
            proc.unheard.append((slot, save))

    def hand_over(self, proc: Proc, slot: str, save: SaveId, *, drain: bool = False) -> None:
        f = self.files.get(slot)
        if f is None or f.save != save or f.rank != proc.rank:
            proc.saves[save].append(End.FAILED)  # the door refuses it: the seal says otherwise
            return
        self.say(ev.SegmentStaged(
            job=KEY, request=self.request(proc, f"hand over {save}"), rank=proc.rank, session=proc.session,
            world_size=proc.world, slot=slot, save=save, nbytes=10, drain=drain,
        ))  # fmt: skip

    def load(self, proc: Proc) -> None:
        proc.loading = True
        seq = self.request(proc, "load")
        self.say(ev.LoadAsked(job=KEY, request=seq, rank=proc.rank, session=proc.session))

    def report(self, proc: Proc, problem: str, *, fatal: bool = False, reshape: bool = False) -> None:
        """Says what became of reading. What lies in the memory of nodes is asked for first, and given back."""
        order = proc.reading
        if order.saved_by and not proc.has_segments:
            wanted = tuple(Wanted(rank) for rank in range(order.saved_by))
            self.say(ev.SegmentsWanted(
                job=KEY, request=self.request(proc, "segments"), rank=proc.rank, session=proc.session, save=order.save,
                wanted=wanted,
            ))  # fmt: skip
            if not proc.has_segments:  # the answer comes later
                return
        proc.reading, proc.has_segments = None, False
        if order.saved_by:
            self.say(ev.SegmentsDropped(
                job=KEY, request=self.request(proc, "drop"), rank=proc.rank, session=proc.session, save=order.save,
            ))  # fmt: skip
        seq = self.request(proc, "report")
        self.say(ev.LoadReported(
            job=KEY, request=seq, rank=proc.rank, session=proc.session, save=order.save, tier=order.tier,
            problem=problem, fatal=fatal, reshape=reshape,
        ))  # fmt: skip

    def drain_asked(self, proc: Proc) -> None:
        seq = self.request(proc, "drain")
        self.say(ev.DrainAsked(job=KEY, request=seq, rank=proc.rank, session=proc.session))

    def end(self, proc: Proc, *, crash: bool) -> None:
        seen = (proc.rank, proc.session) in self.known
        self.known.discard((proc.rank, proc.session))
        attached = proc.state == "in"
        if crash or not attached:
            proc.alive, proc.state = False, "out"
            if seen:
                self.say(ev.RankGone(job=KEY, rank=proc.rank, session=proc.session))
        else:
            seq = self.request(proc, "detach")
            self.say(ev.RankDetached(job=KEY, request=seq, rank=proc.rank, session=proc.session))
            assert seq not in proc.waits, "a goodbye without an answer"
            proc.alive, proc.state = False, "out"

    # --- ranks hear

    def _hear(self, action: act.ToRank) -> None:
        message = action.message
        proc = next((p for p in self.procs if (p.rank, p.session) == (action.rank, action.session)), None)
        assert proc is not None, f"{action} to nobody"
        if not proc.alive or proc.state in ("lost", "out", "stale"):
            return
        what = None
        if hasattr(message, "reply_to"):
            what = proc.waits.pop(message.reply_to, None)
            assert what is not None, f"{proc} did not ask for {message}"
        if isinstance(message, Attached):
            self._welcome(proc, message)
        elif isinstance(message, Refused):
            self._refused(proc, what, message)
        elif isinstance(message, SlotGranted):
            self._granted(proc, message)
        elif isinstance(message, Progress):
            self._news(proc, message)
        elif isinstance(message, LoadFrom):
            self._ordered(proc, message)
        elif isinstance(message, SegmentsHere):
            self._given(proc, message)
        else:
            assert isinstance(message, Notice | SlotsRefused) or what

    def _welcome(self, proc: Proc, message: Attached) -> None:
        proc.state = "in"
        peers = [p for p in self.procs if p.session == proc.session]
        if not any(p.incarnation or p.takeover for p in peers):
            others = [p for p in self.procs if p.alive and p.session != proc.session and p.state == "in"]
            assert not others, f"{proc} was let in while {others[0]} lives"
        if proc.incarnation:
            assert message.incarnation == proc.incarnation, "an incarnation changed behind a rank's back"
        elif not self.made_up and not any(p.incarnation for p in self.procs if p.session == proc.session):
            others = {p.incarnation for p in self.procs if p.session != proc.session}
            assert all(number < message.incarnation for number in others), "two sessions of one incarnation"
        proc.incarnation = message.incarnation
        for news in message.known:
            self._news(proc, news)

    def _refused(self, proc: Proc, what: str, message: Refused) -> None:
        if what == "attach":
            self.exits.append(proc)
        elif message.code == "stale" and what not in ("load", "report"):
            proc.state = "stale"
            proc.waits.clear()
        if what in ("load", "report"):
            proc.loading, proc.reading = False, None

    def _granted(self, proc: Proc, message: SlotGranted) -> None:
        f = self.files.get(message.slot)
        assert f is not None, f"{proc} was granted {message.slot}, which is not there"
        assert f.rank == proc.rank
        assert f.save is None, f"{proc} was granted {message.slot}, which holds {f.save}"
        for other in self.procs:
            assert other is proc or not other.alive or message.slot not in other.granted, (
                f"two writers: {other}, {proc}"
            )
        proc.granted[message.slot] = message.capacity

    def _news(self, proc: Proc, news: Progress) -> None:
        save = news.save
        if news.milestone is not None:
            assert save in self.staged or save in self.past or save in self.ever, f"{save} is not staged"
            proc.staged.add(save)
        if news.milestone is Milestone.DURABLE or news.end is End.DURABLE:
            assert save in self.ever, f"{save} is not committed"
        ends = proc.saves.get(save)
        if ends is None or save in proc.skipped or news.end is None:  # a new daemon may know of no end yet
            return
        former = ends[-1]
        if former is not None and former != news.end:
            allowed = former in REOPENED or (news.end is End.DURABLE and save in self.ever)
            # What was never staged leaves no trace in the arena: a new daemon may lose it for another reason.
            allowed |= self.lives > 1 and {former, news.end} <= LOST and save not in self.staged
            assert allowed, f"{save} ended {former}, then {news.end}"
        ends.append(news.end)

    def _ordered(self, proc: Proc, order: LoadFrom) -> None:
        proc.reading, proc.has_segments = None, False
        if order.save is None or order.agreed:
            proc.loading = False
            if order.agreed:
                peers = [p for p in self.procs if p.session == proc.session and p.reading]
                assert not peers, f"agreed while {peers[0]} still reads"
            proc.incarnation = max(proc.incarnation, order.incarnation)
            proc.counter, proc.granted = 0, proc.granted
            return
        if order.saved_by:
            worlds = {f.world for f in self.files.values() if f.save == order.save}
            assert worlds == {order.saved_by}, (
                f"{order.saved_by} ranks are to have saved {order.save}, and {worlds} did"
            )
            assert self.whole(order.save, order.saved_by), f"an order to read {order.save}, which is not in memory"
        elif order.tier is Tier.ARENA:
            f = self.files.get(order.slot)
            assert f is not None, "an order to read a slot that is not there"
            assert f.save == order.save
            assert order.whole or f.rank == proc.rank  # else it takes what it needs of all ranks' segments
        else:
            assert order.save in self.committed, f"an order to read {order.save}, which is not on the store"
            assert order.path.endswith(order.save.dirname)
        peers = {p.reading.save for p in self.procs if p.session == proc.session and p.reading and p is not proc}
        assert peers <= {order.save}, "ranks read different checkpoints"
        proc.reading = order

    def _given(self, proc: Proc, message: SegmentsHere) -> None:
        """All that it asked for, while its load goes on."""
        proc.has_segments, order = True, proc.reading
        for one in message.files if not message.refused else ():
            f = self.files[one.name]
            assert (f.rank, f.save, f.digested) == (one.rank, order.save, True), f"{proc} was given {one} for {order}"
        if self._current(proc):
            assert not message.refused, f"{proc} asked for segments: {message.refused}"
            assert {one.rank for one in message.files} == set(range(order.saved_by)), f"{message.lacks}"

    # --- promises

    def whole(self, save: SaveId, world: int) -> bool:
        return {f.rank for f in self.files.values() if f.save == save} >= set(range(world))

    def _note_staged(self) -> None:
        """What the catalogue takes for whole must be so in the arena, before the actions that may free some of it."""
        job = self.catalogue.jobs.get(KEY)
        for record in job.coordinator.facts.records.values() if job else []:
            fresh = record.save not in self.staged and record.save not in self.past and record.save not in self.ever
            if record.staged and record.world_size and fresh:
                assert self.whole(record.save, record.world_size), f"{record.save} is not staged on all ranks"
                self.staged[record.save] = record.world_size

    def check(self) -> None:
        self.catalogue.check()
        job = self.catalogue.jobs.get(KEY)
        members = bool(job and job.coordinator.sessions.members)
        if members:
            self.orphan_since = None
        elif self.orphan_since is None:
            self.orphan_since = self.now
        newest = max(self.staged, default=None)
        if newest is not None and not self.whole(newest, self.staged[newest]):
            expired = self.orphan_since is not None and self.now - self.orphan_since >= POLICY.orphan_ttl_s
            record = job.coordinator.facts.records.get(newest) if job else None
            failed = record is not None and record.end is End.FAILED
            assert not members, f"{newest} was given up"
            assert newest in self.ever or expired or failed, f"{newest} was given up"
            self.past |= set(self.staged)  # its job is over
            self.staged.clear()
        if job:
            self._check_files(job)

    def _check_files(self, job: object) -> None:
        coming = [(a.rank, a.count - len(a.instead)) for a in self.todo if isinstance(a, act.AllocateSlots)]
        for rank in {f.rank for f in self.files.values()}:
            mine = job.node.slots.fitting(rank) + sum(n for r, n in coming if r == rank)
            # A daemon that died while it made larger slots left the smaller ones too, until their rank asks again.
            most = POLICY.slots_per_rank if job.node.slots.asks(rank) else 2 * POLICY.slots_per_rank
            assert mine <= most, f"rank {rank} has {mine} slots"
        known = {s.name: s.save for s in job.node.slots}
        for proc in self.procs:
            unheard = {slot for slot, _ in proc.unheard}
            for slot in proc.granted:
                assert not proc.alive or proc.state != "in" or known.get(slot) is None
            known |= {slot: self.files[slot].save for slot in unheard if slot in self.files}
