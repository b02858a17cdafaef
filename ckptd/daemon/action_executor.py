"""Carries out the catalogue's actions on the arena and the stores; each outcome comes back as an event."""

import logging
import secrets
import time
from collections.abc import Callable
from typing import Any

from ckptd import __version__
from ckptd.arena.arena import Arena, Fragments
from ckptd.arena.incarnation_numbers import Numbers
from ckptd.arena.known_stores import KnownStores
from ckptd.arena.saved_topology import Kept, keep_topology
from ckptd.core import actions as act
from ckptd.core import events as ev
from ckptd.daemon.background import Background, Rounds
from ckptd.daemon.publishing import Publishing
from ckptd.daemon.step_boards import StepBoards
from ckptd.daemon.store_scans import StoreLooks, problem_of
from ckptd.parity.files import open_parity
from ckptd.shared.base.errors import BudgetError, CkptdError, DamagedError, WrongStoreError
from ckptd.shared.base.ids import MAX_INCARNATION, JobKey, RunId, SaveId, file_name, incarnation_at
from ckptd.shared.base.log_line import line
from ckptd.shared.files.spare_pages import limit_met
from ckptd.shared.format import arena_paths
from ckptd.shared.format.layout import extents
from ckptd.shared.format.manifest import STOCK_OBJECTS, FileRecord, StockObjects, Vote, decode_objects
from ckptd.shared.format.packed_layout import parted
from ckptd.shared.format.replica_attestations import as_recorded
from ckptd.shared.format.sealed_record import VERSION
from ckptd.store.facts import CommitOutcome, Committer, Taker
from ckptd.store.messages import (
    Commit,
    Done,
    Drain,
    Drained,
    DrainFile,
    DrainParity,
    Failed,
    RemoveCheckpoint,
    Removed,
    RemovePartial,
    TakeIncarnation,
    Taken,
    WriteVote,
)
from ckptd.store.workers import Stores

log = logging.getLogger("ckptd")
_DIGEST_TRIES = 3
_HOPELESS = frozenset({"ENOENT", "ENOTDIR", "EACCES", "EPERM", "EROFS", "ELOOP", "ENAMETOOLONG"})
Deliver = Callable[[ev.Event], None]


class ActionExecutor:
    """Everything but talking to ranks. ``deliver`` is called with each outcome, in the main thread."""

    def __init__(  # noqa: PLR0913 - the daemon's parts, by name
        self,
        *,
        node: str,
        arena: Arena,
        known_stores: KnownStores,
        stores: Stores,
        digesting: Background,
        allocating: Rounds,
        cleaning: Background,
        deliver: Deliver,
        store_timeout_s: float,
        bandwidth: int,
        note: Callable[[JobKey, str], None] = lambda _job, _text: None,
    ) -> None:
        self._note = note  # of what the user should know of a job
        self._node = node
        self._arena = arena
        self._known_stores = known_stores
        self._stores = stores
        self._digesting = digesting
        self._allocating = allocating
        self._cleaning = cleaning
        self._deliver = deliver
        self._store_timeout_s = store_timeout_s
        self._bandwidth = bandwidth
        self.numbers = Numbers(arena.path)
        self.boards = StepBoards(arena.job_path, deliver, lambda job, text: self._note_all(job, [text]))
        self.publishing = Publishing(arena.publications, stores, self._note_all)
        self.looks = StoreLooks(node, stores, deliver, self._note_all, self.publishing.finish_left, store_timeout_s)
        self.table = self._table()

    def hear(self, action: act.ToRank) -> None:
        """Sends to a rank; something here may wait for the same message."""
        self.publishing.hear(action.job, action.message)

    def perform(self, action: act.Action) -> None:
        """Starts the action; none of them blocks. One that cannot even start fails as if it had been tried."""
        try:
            self.table[type(action)](action)
        except (OSError, CkptdError, ValueError) as error:
            log.exception(line("could not start", action=action))
            if failure := _FAILURES.get(type(action)):
                self._deliver(failure(action, str(error)))

    def _table(self) -> dict[type[act.Action], Callable[[Any], None]]:
        return {
            # After what is being unlinked has made room.
            act.AllocateSlots: lambda a: self._cleaning.run(lambda: None, lambda _: self._allocate(a)),
            act.FreeSlot: lambda a: self._arena.free(a.job, a.slot),
            act.UnlinkSlot: self._unlink,
            act.TakeDigests: self._digest,
            act.TakeIncarnation: self._take_incarnation,
            act.ScanStore: self.looks.scan,
            act.Drain: self._drain,
            act.DrainParity: self._drain_parity,
            act.WriteVote: self._vote,
            act.Commit: self._commit,
            act.RemoveCheckpoint: self._remove,
            act.RemovePartial: self._remove_partial,
            act.KeepTopology: self._keep,  # queues behind the removal of the job's earlier run
            act.KeepNumber: lambda a: self.numbers.keep(a.job, a.number),
            act.ForgetJob: lambda a: self._clean(lambda: self._arena.forget_job(a.job)),
            act.HoldRanks: self.boards.hold,
            act.AnnounceStep: self.boards.announce,
            act.RememberStore: lambda a: self._clean(lambda: self._known_stores.remember(a.job, a.store_id)),
        }

    # --- arena

    def _unlink(self, action: act.UnlinkSlot) -> None:
        self._arena.forget_mapping(action.job, action.slot)
        self._clean(lambda: self._arena.unlink(action.job, action.slot))

    def _keep(self, action: act.KeepTopology) -> None:
        def done(outcome: Exception | None) -> None:
            if outcome is not None:
                text = f"the job's topology could not be kept: {outcome}; it is protected until this daemon restarts"
                self._note_all(action.job, [text])

        kept = Kept(
            action.job, action.session, action.topology, action.epoch, action.since, action.outside, action.former
        )
        self._cleaning.run(lambda: keep_topology(self._arena.path, kept), done)

    def _note_all(self, job: JobKey, notes: list[str]) -> None:
        """What is not as it should be, though nothing is lost."""
        for text in notes:
            log.error(line("note", job=job.job, text=text))
            self._note(job, text)

    def _clean(self, work: Callable[[], None]) -> None:
        """In order, one after the other: to give gigabytes back to the system takes a while."""

        def done(outcome: Exception | None) -> None:
            if outcome is not None:
                log.error(line("could not clean up", error=repr(outcome)))

        self._cleaning.run(work, done)

    def _allocate(self, action: act.AllocateSlots) -> None:
        job, rank, capacity = action.job, action.rank, action.capacity
        spare = sum(self._arena.nbytes_of(job, slot) for slot in action.instead)
        try:
            self._arena.reserve(rank, action.count, capacity, spare_nbytes=spare)
        except BudgetError as error:
            self._slots_failed(action, action.count, error)
            return
        if action.instead:
            self._deliver(ev.SlotsFit(job=job, rank=rank))
            self._cleaning.run(lambda: None, lambda _: self._fill(action))
        else:
            self._fill(action)

    def _fill(self, action: act.AllocateSlots) -> None:
        """The slots that memory was set aside for."""
        job, rank, capacity = action.job, action.rank, action.capacity
        for number in range(action.count):  # the first of each rank, then the second

            def done(outcome: str | Exception) -> None:
                if isinstance(outcome, Exception):
                    self._slots_failed(action, 1, outcome)
                else:
                    self._deliver(ev.SlotReady(job=job, rank=rank, slot=outcome, capacity=capacity))

            self._allocating.run(number, lambda: self._arena.allocate(job, rank, capacity), done)

    def _slots_failed(self, action: act.AllocateSlots, count: int, error: Exception) -> None:
        code, message, hint = _describe(error)
        if isinstance(error, OSError):
            code, hint = "budget", limit_met(error.errno) or self._arena.budget().tightest.how_to_raise
            message = f"rank {action.rank}: no slot of {action.capacity} bytes in {self._arena.path}: {message}"
        self._deliver(
            ev.SlotsFailed(job=action.job, rank=action.rank, count=count, code=code, message=message, hint=hint)
        )

    def _digest(self, action: act.TakeDigests, tries: int = _DIGEST_TRIES) -> None:
        job, slot, save = action.job, action.slot, action.save

        def done(table: bytes | Exception | None) -> None:
            if not self._holds(job, slot, save):
                return  # it was freed meanwhile
            if isinstance(table, bytes):
                self._arena.seal_digests(job, slot, table)
                seal = self._arena.seal_of(job, slot)
                self._deliver(ev.DigestsSealed(job=job, slot=slot, save=save, seal=seal))
            elif tries > 1:
                log.error(line("digests failed, trying again", job=job.job, slot=slot, error=repr(table)))
                self._digest(action, tries - 1)
            else:
                problem = f"digests of {slot} could not be taken: {table}"
                self._deliver(ev.DigestsFailed(job=job, slot=slot, save=save, problem=problem))

        self._digesting.run(lambda: self._arena.digests(job, slot, save), done)

    def _holds(self, job: JobKey, slot: str, save: SaveId) -> bool:
        try:
            return self._arena.seal_of(job, slot).save == save
        except FileNotFoundError:
            return False

    # --- stores

    def _take_incarnation(self, action: act.TakeIncarnation) -> None:
        job, run = action.job, secrets.token_bytes(16)

        def answer(reply: Done | Failed) -> None:
            if isinstance(reply, Done) and isinstance(reply.result, Taken):
                taken, store = reply.result, reply.result.store
                self._deliver(
                    ev.IncarnationTaken(
                        job=job, session=action.session, number=taken.incarnation, run=run, store_id=store.store_id,
                        warnings=tuple(store.warnings),
                    )
                )  # fmt: skip
            elif isinstance(reply, Failed):
                hopeless = reply.errno in _HOPELESS or reply.code == WrongStoreError.code
                self._deliver(_no_number(action, run, reply.message, reply.hint, hopeless=hopeless))

        self._stores.ask(
            job.store,
            lambda i: TakeIncarnation(
                id=i,
                job=job.job,
                by=Taker(run, action.session, self._node),
                at_least=min(action.at_least, MAX_INCARNATION),
                remembered=list(action.remembered),
                wanted=action.wanted,
                until=time.monotonic() + self._store_timeout_s,
            ),
            answer,
            patience_s=self._store_timeout_s,
        )

    def _drain(self, action: act.Drain) -> None:
        job, save = action.job, action.save
        files = []
        for slot in action.slots:
            seal = self._arena.seal_of(job, slot)
            path = self._arena.slot_path(job, slot)
            found = extents(seal.rank, seal.image_nbytes, seal.parts, raw=seal.raw)
            files += [DrainFile(path, *extent) for extent in found]
        self._stores.ask(
            job.store,
            lambda i: Drain(
                id=i,
                store_id=action.store_id,
                job=job.job,
                save=save,
                folder=action.folder,
                files=files,
                bytes_per_s=self._bandwidth,
            ),
            lambda reply: self._deliver(
                ev.Drained(job=job, save=save, problem=problem_of(reply), committed=_was_committed(reply))
            ),
            progress=lambda progress: self._deliver(ev.DrainMoved(job=job, save=save, by_rank=progress.by_rank)),
        )

    def _drain_parity(self, action: act.DrainParity) -> None:
        job, save, epoch = action.job, action.save, action.epoch
        file = open_parity(self._arena, job, save, epoch)
        if file is None:
            self._deliver(ev.ParityDrained(job=job, save=save, problem="it is not in the arena any more"))
            return
        path, parity = self._arena.slot_path(job, arena_paths.parity_name(save, epoch)), file.store_record

        def answer(reply: Done | Failed) -> None:
            problem = problem_of(reply)
            self._deliver(ev.ParityDrained(job=job, save=save, parity=None if problem else parity, problem=problem))

        self._stores.ask(
            job.store,
            lambda i: DrainParity(
                id=i,
                store_id=action.store_id,
                job=job.job,
                save=save,
                path=path,
                parity=parity,
                bytes_per_s=self._bandwidth,
            ),
            answer,
        )

    def _vote(self, action: act.WriteVote) -> None:
        job, save = action.job, action.save
        vote = self._make_vote(action)
        self._stores.ask(
            job.store,
            lambda i: WriteVote(id=i, vote=vote),
            lambda reply: self._deliver(ev.VoteWritten(job=job, save=save, problem=problem_of(reply))),
        )

    def _make_vote(self, action: act.WriteVote) -> Vote:
        files, world_size, objects = [], 1, None
        for slot in action.slots:
            found = self._arena.fragments(action.job, slot)
            world_size = found.seal.world_size
            files.append(_file_record(found))
            if found.objects:
                objects = _stock_objects(found.objects, slot)
        return Vote(
            version=VERSION,
            digest_kind=self._arena.integrity.kind,
            store_id=action.store_id,
            job=action.job.job,
            save=action.save,
            node=self._node,
            folder=action.folder,
            world_size=world_size,
            files=files,
            stock_objects=objects,
            parity=action.parity,
            key_id=self._arena.integrity.key_id,
        )

    def _commit(self, action: act.Commit) -> None:
        job, save = action.job, action.save

        def answer(reply: Done | Failed) -> None:
            nbytes, taken_over, left_out = 0, 0, ""
            if isinstance(reply, Done) and isinstance(reply.result, CommitOutcome):
                nbytes, taken_over = reply.result.committed.nbytes, reply.result.taken_over
                left_out = reply.result.committed.left_out
                self._note_all(job, [reply.result.note] if reply.result.note else [])
                self.publishing.committed(job, save, intents, published=reply.result.published)
            problem = problem_of(reply)
            self._deliver(
                ev.CommitEnded(
                    job=job, save=save, nbytes=nbytes, taken_over=taken_over, problem=problem, left_out=left_out
                )
            )

        writer, intents = f"ckptd {__version__}", self.publishing.intents(job, save)
        by = Committer(action.incarnation, action.session, action.store_id, list(action.void))
        self._stores.ask(
            job.store, lambda i: Commit(id=i, job=job.job, save=save, writer=writer, by=by, intents=intents), answer
        )

    def _remove_partial(self, action: act.RemovePartial) -> None:
        job, save = action.job, action.save
        self._stores.ask(job.store, lambda i: RemovePartial(id=i, job=job.job, save=save), lambda _: None)

    def _remove(self, action: act.RemoveCheckpoint) -> None:
        job, save = action.job, action.save

        def answer(reply: Done | Failed) -> None:
            stays = isinstance(reply, Done) and isinstance(reply.result, Removed) and reply.result.pinned
            self._deliver(ev.CheckpointRemoved(job=job, save=save, problem=problem_of(reply), pinned=stays))

        intents = self.publishing.intents(job, save)
        self._stores.ask(job.store, lambda i: RemoveCheckpoint(id=i, job=job.job, save=save, intents=intents), answer)


def _file_record(found: Fragments) -> FileRecord:
    seal = found.seal
    return FileRecord(
        name=file_name(seal.rank),
        rank=seal.rank,
        nbytes=seal.image_nbytes,
        digests=found.table,
        **parted(found.layout, file_name(seal.rank))._asdict(),
        leaves=found.leaves,
        parts=seal.parts,
        raw=seal.raw,
        attestations=as_recorded(seal.attestations),
    )


def _stock_objects(data: bytes, slot: str) -> StockObjects | None:
    """None for what is not readable: stock readers then miss the leaves, ckptd misses nothing."""
    try:
        return decode_objects(data, where=slot)
    except DamagedError as error:
        log.error(line("checkpoint goes without", file=STOCK_OBJECTS, error=error))  # noqa: TRY400 - no bug of ours
        return None


def _no_number(
    action: act.TakeIncarnation, run: RunId, problem: str, hint: str = "", *, hopeless: bool = False
) -> ev.IncarnationTaken:
    """The clock's, with a run of its own."""
    return ev.IncarnationTaken(
        job=action.job, session=action.session, number=incarnation_at(time.time()), run=run,
        problem=problem, hint=hint, hopeless=hopeless,
    )  # fmt: skip


# What is delivered for an action that could not even start; without a row nobody waits for its outcome.
_FAILURES: dict[type[act.Action], Callable[[Any, str], ev.Event]] = {
    act.Drain: lambda a, problem: ev.Drained(job=a.job, save=a.save, problem=problem),
    act.DrainParity: lambda a, problem: ev.ParityDrained(job=a.job, save=a.save, problem=problem),
    act.WriteVote: lambda a, problem: ev.VoteWritten(job=a.job, save=a.save, problem=problem),
    act.AllocateSlots: lambda a, problem: ev.SlotsFailed(
        job=a.job, rank=a.rank, count=a.count, code="os", message=problem, hint=""
    ),
    act.TakeIncarnation: lambda a, problem: _no_number(a, secrets.token_bytes(16), problem),
    act.ScanStore: lambda a, problem: ev.StoreScanned(job=a.job, after=a.after, problem=problem),
    act.Commit: lambda a, problem: ev.CommitEnded(job=a.job, save=a.save, problem=problem),
    act.RemoveCheckpoint: lambda a, problem: ev.CheckpointRemoved(job=a.job, save=a.save, problem=problem),
}


def _was_committed(reply: Done | Failed) -> bool:
    return isinstance(reply, Done) and isinstance(reply.result, Drained) and reply.result.committed


def _describe(error: Exception) -> tuple[str, str, str]:
    if isinstance(error, CkptdError):
        return error.code, error.message, error.hint
    return ("os" if isinstance(error, OSError) else "bug"), str(error) or repr(error), ""
