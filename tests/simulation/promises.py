"""Design section 2, checked as things happen: only what an event touches is looked at, so that 64 nodes stay cheap."""

from collections import Counter
from itertools import chain
from typing import TYPE_CHECKING, Any

from ckptd.shared.base.ids import JobKey, SaveId
from ckptd.shared.format.slot import Seal
from ckptd.shared.protocol.messages import End, LoadFrom, Milestone, Progress, Tier
from ckptd.shared.protocol.parity_types import ParityChunk
from tests.simulation.truth import Promise, SaveTruth, Truth

if TYPE_CHECKING:
    from tests.simulation.arena import Arena
    from tests.simulation.machine import Machine
    from tests.simulation.ranks import Proc
    from tests.simulation.session import Session
    from tests.simulation.world import World

_CALM_S = 30.0  # a load that began so long after all was well finds the newest there is


class Promises:
    """Told of every change in arenas and of every word to ranks. Raises AssertionError when one is broken."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self.jobs: dict[JobKey, Truth] = {}
        self.told_of: Counter[str] = Counter()
        self._admitted: dict[tuple[int, JobKey], int] = {}  # daemon life -> the newest incarnation it let in

    def of(self, job: JobKey) -> Truth:
        """What is so with the job."""
        return self.jobs.setdefault(job, Truth())

    def size_of(self, job: JobKey, save: SaveId) -> int:
        """Ranks of the save."""
        return self.of(job).sizes.get(save, 0)

    def needed(self, proc: "Proc", save: SaveId) -> set[int]:
        """Whose images of the save the rank needs: of one of another world or layout all of them."""
        size, found = self.size_of(proc.job, save), self.of(proc.job).saves.get(save)
        if size != proc.session.world_size or proc.session.relaid:
            return set(range(size))
        return found.needed(proc.rank) if found is not None else {proc.rank}

    # --- the arenas change

    def held(self, job: JobKey, arena: "Arena", seal: Seal, there: bool) -> None:
        """A seal came into force, or went."""
        truth = self.of(job)
        found = truth.held(arena.ident, seal, there=there)
        if there:
            truth.forget_old()
        else:
            self._still_kept(job, truth, found.save)

    def chunk(self, job: JobKey, arena: "Arena", chunk: ParityChunk, there: bool) -> None:
        """A chunk was sealed, or went."""
        truth = self.of(job)
        truth.chunk(arena.ident, chunk, there=there)
        if not there:
            self._still_kept(job, truth, chunk.save)

    def _still_kept(self, job: JobKey, truth: Truth, save: SaveId) -> None:
        """Something of this save was given up: what was promised of it, or of an older one, must be kept elsewhere."""
        if self._over(job, truth):
            return
        staged = truth.staged
        if staged is not None and any(s > staged and t.lost_when_staged for s, t in truth.saves.items()):
            staged = truth.staged = None  # it was outrun, and what outran it is lost with a node
        if staged is not None and save >= staged:
            kept = any(s >= staged and t.whole for s, t in truth.saves.items())
            bears = truth.protected is not None and truth.protected.save >= staged
            kept = kept or (bears and any(s >= staged and t.restorable() for s, t in truth.saves.items()))
            assert kept, f"{staged} was told staged, and no save as new is whole: {save} was given up"
        promise = truth.protected
        if promise is not None and save >= promise.save and not self._safer(job, truth, promise):
            newer = [t for s, t in truth.saves.items() if s >= promise.save]
            if not promise.losses:
                kept = any(t.whole and t.epochs_protected() for t in newer)
                state = [
                    (s, t.whole, sorted(t.where), {k[:2]: sorted(p.chunks) for k, p in t.sets.items()})
                    for s, t in sorted(truth.saves.items())
                    if s >= promise.save
                ]
                assert kept, (
                    f"{promise.save} was told protected; without the loss of a node it is not any more: {state}"
                )
            else:
                assert any(t.restorable() for t in newer), f"{promise.save} was protected, and too much was given up"

    def _newest_session(self, truth: Truth) -> "Session | None":
        name = truth.owners[max(truth.owners)] if truth.owners else ""
        sessions = chain.from_iterable((one.current, *one.zombies) for one in self._world.launchers)
        return next((session for session in sessions if session is not None and session.name == name), None)

    def _safer(self, job: JobKey, truth: Truth, promise: Promise) -> bool:
        """Whether something newer is durable, where nothing is protected or nodes that bore the promise are lost."""
        session = self._newest_session(truth)
        alone = session is not None and len({machine.name for machine in session.homes}) == 1
        return bool(alone or promise.losses) and max(self._world.store(job).ever, default=promise.save) > promise.save

    def _over(self, job: JobKey, truth: Truth) -> bool:
        """Whether the job is over and safe: every rank closed or dead, and the newest is durable."""
        session = self._newest_session(truth)
        if session is not None and any(p.alive and p.incarnation and p.state != "closing" for p in session.procs):
            return False
        owed = max((p for p in (truth.staged, truth.protected and truth.protected.save) if p is not None), default=None)
        durable = max(self._world.store(job).ever, default=None)
        over = owed is None or self._world.expired or (durable is not None and durable >= owed)
        if over:
            truth.staged = truth.protected = None
        return over

    def may_go(self, machine: "Machine", job: JobKey, slot: str) -> None:
        """A slot is freed or unlinked: no rank that is in may have been told to write it."""
        memory = machine.arena.jobs[job]
        for proc in memory.rank_files.values():
            if proc.alive and proc.state == "in" and proc.copying == slot and proc.life == machine.life:
                newer = self._admitted.get((machine.life, job), 0) > proc.incarnation
                assert newer or memory.slots[slot].save is None, f"{slot} goes while {proc} writes it"

    def may_drop(self, machine: "Machine", job: JobKey, save: SaveId, epoch: int) -> None:
        """A chunk is dropped; what follows from it is checked when it is gone."""

    def wiped(self, machine: "Machine") -> None:
        """A node is lost with all that lay there."""
        ident = machine.arena.ident
        for job, memory in machine.arena.jobs.items():
            truth = self.of(job)
            for slot in memory.slots.values():
                if slot.save is not None:
                    truth.held(ident, slot.seal, there=False).bereft = True
            for chunk in memory.chunks.values():
                truth.chunk(ident, chunk, there=False)
            self._after_loss(job, truth, ident)

    def _after_loss(self, job: JobKey, truth: Truth, ident: str) -> None:
        promise = truth.protected
        if promise is not None:
            if promise.lost(ident):
                newer = [t for s, t in truth.saves.items() if s >= promise.save]
                if not self._over(job, truth):
                    assert any(t.restorable() for t in newer), f"{promise.save} was protected against this loss"
                    self.told_of["losses borne"] += bool(promise.losses)
            else:
                truth.protected = None
        if truth.staged is not None and not any(s >= truth.staged and t.whole for s, t in truth.saves.items()):
            truth.staged = None  # memory was lost with it; what is protected is checked as that

    # --- words to ranks

    def told(self, proc: "Proc", news: Progress) -> None:
        """A rank hears of a milestone: it is true in all the world."""
        save, truth, store = news.save, self.of(proc.job), self._world.store(proc.job)
        durable = save in store.ever
        found = truth.saves.get(save)
        self._mismatched(proc, news, mismatched=found is not None and found.mismatched)
        if news.milestone is Milestone.DURABLE or news.end is End.DURABLE:
            assert durable, f"{proc} was told that {save} is durable"
            self.told_of["durable"] += 1
        elif news.milestone is Milestone.STAGED:
            self.told_of["staged"] += 1
            if not durable:
                assert found is not None, f"{proc} was told that {save} is staged, and nothing of it was ever"
                sealed = found.contents  # some may have been lost with their node while the word went round
                assert len(sealed) == found.world_size, f"{proc} was told that {save} is staged; {sorted(sealed)} are"
                if found.whole:
                    truth.staged = max(save, truth.staged or save)
        elif news.milestone is Milestone.PROTECTED:
            self.told_of["protected"] += 1
            if not durable:
                assert found is not None, f"{proc} was told that {save} is protected, and nothing of it was ever"
                assert found.ever_protected, f"{proc} was told that {save} is protected; {found.sets} are"
            if found is not None and (truth.protected is None or truth.protected.save <= save):
                self._protected(truth, save)

    def _mismatched(self, proc: "Proc", news: Progress, *, mismatched: bool) -> None:
        """Slices that make no whole are a checkpoint for nobody; of those that do nobody hears the contrary."""
        if mismatched:
            told = f"{news.milestone or ''} {news.end or ''}"
            lost = news.milestone is None and news.end in (None, End.ABANDONED, End.SKIPPED, End.FAILED)
            assert lost, f"{proc} was told that {news.save} is {told.strip()}, of which the slices do not make a whole"
            self.told_of["mismatched"] += news.mismatched
        else:
            assert not news.mismatched, f"{proc} was told that the shares of {news.save} are no whole"

    def mismatches_heard(self, session: "Session", since_step: int, until: SaveId) -> None:
        """Nothing went wrong meanwhile: every rank knows the end of each save whose slices made no whole."""
        truth = self.of(session.job)
        for save in [s for s, t in truth.saves.items() if t.mismatched and s.step > since_step and s < until]:
            waiting = [p.rank for p in session.procs if save in p.saves and not p.saves[save].end]
            assert not waiting, f"ranks {waiting[:8]} never heard the end of {save}, whose slices made no whole"

    def _protected(self, truth: Truth, save: SaveId) -> None:
        found = truth.saves[save]
        epochs = found.epochs_protected()
        if not epochs or not found.whole:  # the word was under way while a node was lost, or a newer one took over
            return
        promise, members = truth.protected, found.members(max(epochs))
        if promise is None or promise.save != save or [m for m, _ in promise.sets] != [m for m, _ in members]:
            truth.protected = Promise(save, members)
            self._bears(found, members)

    def _bears(self, found: Any, members: list[tuple[frozenset[str], int]]) -> None:
        """Each single member's loss is borne, and for ``double`` a few pairs."""
        random = self._world.clock.random.__class__(found.save.counter)  # own chance: checks never change the play
        for arenas, losses in members:
            idents = sorted(arenas)
            tries = [frozenset(random.sample(idents, min(losses, len(idents)))) for _ in range(3)]
            for lost in tries:
                assert found.restorable(lost), f"{found.save} was told protected; it does not bear the loss of {lost}"

    def welcomed(self, proc: "Proc", incarnation: int) -> None:
        """A rank was let in."""
        self._own(proc, incarnation)
        if proc.incarnation:
            same = incarnation == proc.incarnation or proc.loading  # the end of a load may have been lost
            assert same, f"{proc}: its incarnation changed behind its back"
        key = (proc.machine.life, proc.job)
        self._admitted[key] = max(self._admitted.get(key, 0), incarnation)

    def _own(self, proc: "Proc", incarnation: int) -> None:
        truth = self.of(proc.job)
        owner = truth.owners.setdefault(incarnation, proc.session.name)
        assert owner == proc.session.name, f"{proc} has incarnation {incarnation}, which is {owner}'s"

    def accepted(self, proc: "Proc", save: SaveId) -> None:
        """A hand-over was taken."""
        newest = self._admitted.get((proc.machine.life, proc.job), 0)
        assert save.incarnation >= newest, f"{proc} is of incarnation {save.incarnation}; here {newest} was let in"

    def granted(self, proc: "Proc", slot: str) -> None:
        """A slot has one writer."""
        for other in proc.machine.arena.job(proc.job).rank_files.values():
            clash = other is not proc and other.alive and slot in other.granted
            assert not clash, f"two writers of {slot}: {other}, {proc}"

    def read_from(self, proc: "Proc", order: LoadFrom) -> None:
        """A rank is sent to read."""
        if order.tier is Tier.PFS:
            assert order.save in self._world.store(proc.job).ever, f"{proc} is sent to {order.path}, which never was"

    def committed(self, job: JobKey, save: SaveId) -> None:
        """Under its final name: every file is what its rank wrote."""
        directory, found = self._world.store(job).committed[save], self.of(job).saves.get(save)
        assert found is None or not found.mismatched, f"{save} was committed, of which the slices do not make a whole"
        if found is not None and len(found.contents) == directory.world_size:
            wrong = [rank for rank, content in directory.files.items() if found.contents.get(rank) != content]
            assert not wrong, f"{save}: wrong bytes committed for ranks {wrong[:5]}"

    # --- loads

    def loaded(self, session: "Session", proc: "Proc", order: LoadFrom) -> None:
        """A rank's load ended well: with what the others' ends with, and its own right bytes."""
        self._own(proc, order.incarnation)
        session.outcomes.add((order.save, order.incarnation))
        assert len(session.outcomes) == 1, f"the ranks of {session.name} restored different things: {session.outcomes}"
        if order.save is None:
            return
        assert proc.read is not None, f"{proc} is told that all have read {order.save}, and it has not"
        save, _, images = proc.read
        assert save == order.save, f"{proc} read {save}, and {order.save} was agreed"
        found = self.of(proc.job).saves.get(save)
        if found is not None:
            assert not found.mismatched, f"{proc} restored {save}, of which the slices do not make a whole"
            lacking = self.needed(proc, save) - set(images)
            assert not lacking, f"{proc} restored {save} without the images of ranks {sorted(lacking)[:8]}"
            wrong = [rank for rank, content in images.items() if found.contents.get(rank) != content]
            assert not wrong, f"{proc} restored other bytes of {save}: those of ranks {wrong[:8]}"

    def agreed(self, session: "Session") -> None:
        """All ranks have it: it is the newest that there is, if nothing was wrong while they asked."""
        job, chosen = session.job, next(iter(session.orders.values())).save
        chaos, store = self._world.chaos, self._world.store(job)
        step, run = session.named
        asked = chosen is None or (step in (None, chosen.step) and run in (None, chosen.run))
        assert asked, f"{chosen} was loaded, and step {step} of run {run!r} was named"
        if session.began_load - chaos.calm_since < _CALM_S or session.named != (None, None):
            return
        idents = {m.arena.ident for m in session.homes}
        truth = self.of(job)
        gone = frozenset(m.arena.ident for m in self._world.nodes.values() if m.arena.ident not in idents)
        there = [s for s, t in truth.saves.items() if t.ever_whole and t.where and t.restorable(gone)]
        newest = max([*there, *store.committed], default=None)
        self.told_of["calm loads"] += 1
        assert newest is None or (chosen is not None and chosen >= newest), f"{chosen} was loaded, {newest} is there"
        if chosen in there and not chaos.active:
            self._near(session, truth.saves[chosen])

    def _near(self, session: "Session", found: SaveTruth) -> None:
        """Nobody reads from the store what all nodes together have in memory."""
        far = [proc.rank for proc in session.procs if proc.read is None or proc.read.tier is Tier.PFS]
        assert not far, f"ranks {far[:8]} read {found.save} from the store, and it lies in memory"
        self._world.counts["near loads"] += 1

    def anything_restorable(self, job: JobKey) -> bool:
        """Whether some checkpoint is left, wherever."""
        truth = self.of(job)
        if self._world.store(job).committed or any(t.ever_whole and t.restorable() for t in truth.saves.values()):
            return True
        truth.staged = truth.protected = None
        return False

    # --- the end

    def nothing_pulled(self, job: JobKey, machines: list["Machine"]) -> None:
        """Once all ranks have loaded, what was pulled for them is given back. (The end of a job gives all back.)"""
        left = {m.name: [*m.arena.jobs[job].pulled] for m in machines if job in m.arena.jobs}
        assert not any(left.values()), f"what was pulled for a load of {job.job} is still there: {left}"

    def nothing_left(self, machines: list["Machine"]) -> None:
        """After a close and what it makes durable, no node has anything of any job."""
        for machine in machines:
            for job, memory in machine.arena.jobs.items():
                slots = {s.name: s.save for s in memory.slots.values()}
                assert not slots, f"{machine.name} still has slots of {job.job}: {slots}"
                assert not memory.chunks, f"{machine.name} still has parity of {job.job}: {sorted(memory.chunks)}"
