"""Carries out what the core orders about scrubs: blocks of the arena in one thread, the store by its worker."""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from ckptd.arena.arena import Arena
from ckptd.arena.known_stores import KnownStores
from ckptd.core import actions as act
from ckptd.core import events as ev
from ckptd.daemon.background import Background
from ckptd.daemon.store_scans import problem_of
from ckptd.parity.scrub import Look, look_at_parity, look_at_slot
from ckptd.shared.base.errors import CkptdError
from ckptd.shared.base.ids import JobKey, StoreId
from ckptd.shared.base.log_line import line
from ckptd.shared.format.digest import BLOCK_NBYTES, DIGEST_NBYTES
from ckptd.shared.format.slot import SlotState
from ckptd.shared.protocol.scrubbing import Harm
from ckptd.store.messages import Done, Failed
from ckptd.store.scrub_messages import (
    BlockRead,
    MendCheckpoint,
    Mended,
    PieceRead,
    ReadBlock,
    ScrubCheckpoint,
    ScrubRequest,
)
from ckptd.store.workers import Stores

log = logging.getLogger("ckptd")
_BLOCK_S = 60.0  # a store that takes longer for a block has none
_PIECE_S = 240.0  # without a word, for a piece
_MEND_S = 3600.0  # and for files written again: a sync of a large one is such a silence
_MAX_CHARS = 4000  # of a problem
R = TypeVar("R", BlockRead, PieceRead, Mended)


class ScrubExecutor:
    """``deliver`` is called with each outcome, in the main thread; nothing here blocks.

    bytes_per_s: of files written again.
    """

    def __init__(
        self,
        arena: Arena,
        stores: Stores,
        known_stores: KnownStores,
        deliver: Callable[[ev.Event], None],
        bytes_per_s: int,
    ) -> None:
        self._arena, self._stores, self._known_stores = arena, stores, known_stores
        self._deliver, self._bytes_per_s = deliver, bytes_per_s
        self.work = Background(1, "scrub")
        self.table: dict[type[act.Action], Callable[[Any], None]] = {
            act.ScrubBlock: self._scrub_block,
            act.CopyBlock: self._copy_block,
            act.ScrubPiece: self._scrub_piece,
            act.Mend: self._mend,
        }

    def perform(self, action: act.Action) -> None:
        """Starts the action."""
        self.table[type(action)](action)

    # --- memory

    def _scrub_block(self, action: act.ScrubBlock) -> None:
        job, name, save = action.job, action.name, action.save

        def look() -> Look:
            if name:
                return look_at_slot(self._arena, job, name, save, action.block)
            return look_at_parity(self._arena, job, save, action.epoch, action.block)

        def done(found: Look | Exception) -> None:
            if isinstance(found, Exception):
                log.error(line("could not scrub", job=job.job, slot=name, error=repr(found)), exc_info=found)
                found = Look(gone=True)
            self._deliver(ev.BlockScrubbed(job=job, name=name, save=save, **found._asdict()))

        self.work.run(look, done)

    def _copy_block(self, action: act.CopyBlock) -> None:
        job, save = action.job, action.save
        copied = partial(ev.BlockCopied, job=job, name=action.name, save=save)
        self._ask(
            job,
            lambda i, store_id: ReadBlock(
                id=i, store_id=store_id, job=job.job, save=save, rank=action.rank, block=action.block
            ),
            BlockRead,
            lambda found: copied(problem=self._put(action, found.data)),
            lambda problem: copied(problem=problem),
            _BLOCK_S,
        )  # fmt: skip

    def _put(self, action: act.CopyBlock, data: bytes) -> str:
        """The block into the slot, if that holds the save still and wants these very bytes. Returns why not.

        In the main thread, which lets slots go: so nobody else writes to it.
        """
        try:
            seal, view = self._arena.seal_of(action.job, action.name), self._arena.view(action.job, action.name)
        except (OSError, CkptdError) as error:
            return f"the slot is gone: {error}"
        if (seal.save, seal.state) != (action.save, SlotState.DIGESTED):
            return "the slot holds something else by now"
        at = seal.table_offset + action.block * DIGEST_NBYTES
        start = action.block * BLOCK_NBYTES
        stop = min(start + BLOCK_NBYTES, seal.image_nbytes)
        wanted = view[at : at + DIGEST_NBYTES]
        if len(data) != stop - start or self._arena.integrity.digest(data) != wanted:
            return "the store has other bytes"
        view[start:stop] = data
        kept = self._arena.integrity.digest(view[start:stop]) == wanted
        return "" if kept else "the memory does not keep what is written to it"

    # --- the store

    def _scrub_piece(self, action: act.ScrubPiece) -> None:
        job, save = action.job, action.save
        scrubbed = partial(ev.PieceScrubbed, job=job, save=save)

        def read(found: PieceRead) -> ev.Event:
            harms = tuple(Harm(harm.path, harm.what, harm.rank) for harm in found.harms)
            return scrubbed(next=found.next, nbytes=found.nbytes, harms=harms, gone=found.gone)

        def waits(problem: str) -> ev.Event:
            log.info(line("scrub waits for the store", job=job.job, problem=problem))
            return scrubbed(problem=problem)

        self._ask(
            job,
            lambda i, store_id: ScrubCheckpoint(
                id=i, store_id=store_id, job=job.job, save=save, place=action.place, nbytes=action.nbytes
            ),
            PieceRead, read, waits, _PIECE_S,
        )  # fmt: skip

    def _mend(self, action: act.Mend) -> None:
        job, save = action.job, action.save
        slots = [(rank, self._arena.slot_path(job, name)) for rank, name in action.slots]
        ended = partial(ev.MendEnded, job=job, number=action.number, save=save)

        def mended(found: Mended) -> ev.Event:
            memory, parity, lost = map(tuple, (found.memory, found.parity, found.lost))
            return ended(memory=memory, parity=parity, lost=lost, problem=found.problem[:_MAX_CHARS])

        self._ask(
            job,
            lambda i, store_id: MendCheckpoint(
                id=i, store_id=store_id, job=job.job, save=save, ranks=list(action.ranks), slots=slots,
                bytes_per_s=self._bytes_per_s,
            ),
            Mended, mended, lambda problem: ended(lost=action.ranks, problem=problem[:_MAX_CHARS]), _MEND_S,
        )  # fmt: skip

    def _ask(  # noqa: PLR0913, PLR0917 - what differs between three requests
        self,
        job: JobKey,
        request: Callable[[int, StoreId], ScrubRequest],
        kind: type[R],
        done: Callable[[R], ev.Event],
        failed: Callable[[str], ev.Event],
        patience_s: float,
    ) -> None:
        """Asks the worker of the job's store, and delivers what a result of that kind, or a problem, comes to."""

        def answer(reply: Done | Failed) -> None:
            found = reply.result if isinstance(reply, Done) else None
            self._deliver(done(found) if isinstance(found, kind) else failed(problem_of(reply) or "no answer"))

        if store_id := self._known_stores.of(job):
            self._stores.ask(job.store, lambda i: request(i, store_id), answer, patience_s=patience_s)
        else:
            self._deliver(failed("no store is known"))
