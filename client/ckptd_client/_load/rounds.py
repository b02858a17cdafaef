"""One rank's part in a load: it asks for an order, reads and checks, and reports, until all ranks agree."""

import contextlib
import errno
import logging
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from ckptd.shared.base.errors import CkptdError, DamagedError, RestoreError
from ckptd.shared.base.ids import RunId, SaveId
from ckptd.shared.files.refused import REFUSALS, why_refused
from ckptd.shared.format import arena_paths
from ckptd.shared.format.integrity import XXH3, Integrity
from ckptd.shared.protocol.messages import AskLoad, LoadFrom, ReportLoad, Request, Tier
from ckptd.shared.stores.kinds import open_files, real
from ckptd_client._daemon.channel import ChannelLostError
from ckptd_client._daemon.link import Link
from ckptd_client._load.checkpoint import Checkpoint, open_arena, open_directory, open_segments
from ckptd_client._load.dropped import told_of_dropped
from ckptd_client._load.fit import Fit, fit
from ckptd_client._load.image_ranges import images_in
from ckptd_client._load.memory import LackingError, MemorySegments
from ckptd_client._load.pulled_fit import fit_pulled
from ckptd_client._load.reader import (
    Source,
    check_files,
    copy_out,
    open_file,
    open_slot,
    read_records,
)
from ckptd_client._load.saved_names import OtherRanksNeededError, saves_of
from ckptd_client._load.shared_read.participants import Ask, Participants, participants_of_order, taking_part
from ckptd_client._load.shared_read.read import copy_out_together
from ckptd_client._load.stored_fit import fit_to_stored
from ckptd_client._local.rank import Group
from ckptd_client._state.naming import NOTHING_NAMED, Named
from ckptd_client._state.pickle import NO_PICKLE, PickleKeys
from ckptd_client._state.replica_choice import notes_of

_OURS = (errno.EMFILE, errno.ENFILE)
log = logging.getLogger("ckptd_client")
_TRIES = 3  # attempts if the daemon ends during a load
_SILENT_S = 6.0  # a load that has not begun warns after this, unless the daemon has reported the reason


@dataclass(frozen=True, slots=True)
class Segment:
    """The data that this rank has read: bytes are in the state's tensors, ``fit.finish`` does the rest."""

    save: SaveId
    tier: Tier
    fit: Fit
    nbytes: int
    notes: tuple[str, ...]


T = TypeVar("T", Segment, Checkpoint)  # what a rank has read or found


def load(
    link: Link, state: dict[str, Any], step: int | None, run: RunId | None = None, *, strict: bool = True
) -> tuple[LoadFrom, Segment | None]:
    """Runs the load to its end; None if there is nothing to restore. Raises RestoreError, MismatchError."""
    return _agree(link, (step, run), lambda order: _read(link, state, order, strict=strict))


def find(link: Link, step: int | None, ask: Ask, *, whole: bool) -> tuple[LoadFrom, Checkpoint | None]:
    """Agrees with all ranks on a checkpoint of which all records can be read. Reads no data yet.

    ask: as Link.ask, for its reader. whole: each rank reads all records, also where each of them a part would do.
    """
    return _agree(link, (step, None), lambda order: _find(link, order, ask, whole=whole))


def _agree(
    link: Link,
    wanted: tuple[int | None, RunId | None],
    read: Callable[[LoadFrom], T],
) -> tuple[LoadFrom, T | None]:
    """Runs the load, again if the daemon ends. Rank 0 logs why nothing was restored. Raises what _run does."""
    step, run = wanted
    for left in reversed(range(_TRIES)):
        try:
            order, found = _run(link, lambda seq: AskLoad(seq=seq, step=step, run=run), read)
        except ChannelLostError:
            if not left:
                raise
            continue
        for note in order.notes if found is None and link.group.rank == 0 else ():
            log.warning("ckptd: nothing was restored: %s", note)
        return order, found
    raise AssertionError("unreachable")


def _run(link: Link, ask: Callable[[int], Request], read: Callable[[LoadFrom], T]) -> tuple[LoadFrom, T | None]:
    warning = threading.Timer(_SILENT_S, _warn_of_wait, (link,))
    warning.daemon, link.waits_for = True, _waits_for(link)
    with contextlib.suppress(RuntimeError):  # no thread can be started: the load continues without the warning
        warning.start()
    try:
        order = _ask(link, ask)
    finally:
        warning.cancel()
    found: T | None = None
    try:
        while order.save is not None and not order.agreed:
            error: Exception | None = None
            if found is None or (found.save, found.tier) != (order.save, order.tier):
                _drop(found)
                found = None
                try:
                    found = read(order)
                except ChannelLostError:
                    raise
                except (CkptdError, OSError) as problem:
                    error = problem
            order = _report(link, order, error)
    except BaseException:
        _drop(found)
        raise
    return order, found


def _waits_for(link: Link) -> str:
    """What a load waits for, as far as this rank knows. It names a load that only one rank calls, which never ends."""
    where = f"for the store {link.job.store} to answer"
    if link.group.world_size > 1:
        return f"for other ranks, or {where}; every rank must call load (one rank alone: connect(alone=True))"
    return where


def _warn_of_wait(link: Link) -> None:
    if link.waits_for:  # else the daemon has reported it
        log.warning("ckptd: load of job %s waits on rank %d %s", link.job.job, link.group.rank, link.waits_for)


def _drop(found: Segment | Checkpoint | None) -> None:
    """Closes a checkpoint on which the ranks have not agreed."""
    if isinstance(found, Checkpoint):
        found.close()


def _ask(link: Link, make: Callable[[int], Request]) -> LoadFrom:
    # No deadline: the other ranks may be late, and the daemon ends a load without agreement.
    answer = link.ask(make, None)
    assert isinstance(answer, LoadFrom)  # noqa: S101 - the reply to AskLoad and ReportLoad
    return answer


def _report(link: Link, order: LoadFrom, error: Exception | None) -> LoadFrom:
    save, tier = order.save, order.tier
    problem = error.message if isinstance(error, DamagedError) else str(error or "")  # a note of another checkpoint
    assert save is not None  # noqa: S101 - only orders to read are reported

    def make(seq: int) -> Request:
        return ReportLoad(
            seq=seq,
            save=save,
            tier=tier,
            problem=problem[:4000],
            fatal=isinstance(error, RestoreError),  # no older checkpoint suits this process better
            reshape=isinstance(error, OtherRanksNeededError),
            lacks=list(error.ranks) if isinstance(error, LackingError) else [],
        )

    try:
        return _ask(link, make)
    except CkptdError:
        if isinstance(error, RestoreError):
            raise error from None
        raise


def _read(link: Link, state: dict[str, Any], order: LoadFrom, *, strict: bool) -> Segment:
    assert order.save is not None  # noqa: S101 - the caller has checked
    if order.saved_by:
        return _read_pulled(link, state, order, order.save, strict=strict)
    if order.whole:
        return _read_whole(link, state, order, order.save, strict=strict)
    if order.tier is not Tier.PFS:
        return _read_slot(link, state, order, order.save, strict=strict)
    if not order.path:
        raise DamagedError(f"no copy of {order.save} is left for rank {link.group.rank}")
    settings = link.settings
    fitted, nbytes, notes = read_checkpoint(
        order.path, state, save=order.save, group=link.group, keys=settings.pickle_keys,
        participants=participants_of_order(link, order, link.ask),
        integrity=settings.integrity, named=settings.named, strict=strict,
    )  # fmt: skip
    return Segment(order.save, order.tier, fitted, nbytes, notes)


def _find(link: Link, order: LoadFrom, ask: Ask, *, whole: bool) -> Checkpoint:
    assert order.save is not None  # noqa: S101 - the caller has checked
    if order.saved_by:
        segments = _segments(link, order.save)
        try:
            every = open_segments(segments, order, range(order.saved_by), link.job, link.settings.integrity)
        except BaseException:
            segments.release()
            raise
        segments.ask = ask
        return every
    if order.tier is not Tier.PFS:
        return _open_arena(link, order, order.save)
    if not order.path:
        raise DamagedError(f"no copy of {order.save} is left for rank {link.group.rank}")
    with contextlib.ExitStack() as stack:
        participants = stack.enter_context(participants_of_order(link, order, ask))
        found = open_directory(order.path, order.save, link.settings.integrity)
        found.check(range(found.world_size) if whole else _share(link.group, found.world_size))
        found.read_with(participants)
        stack.pop_all()  # the checkpoint has them now
    return found


def _share(group: Group, count: int) -> range:
    """This rank's part of the images of so many ranks: those that load look at all together."""
    return range(group.rank * count // group.world_size, (group.rank + 1) * count // group.world_size)


def _open_arena(link: Link, order: LoadFrom, save: SaveId, *, complete: bool = True) -> Checkpoint:
    """The images in the directory of the order's slot."""
    rank, _ = arena_paths.parse_slot_name(order.slot) or (link.group.rank, 0)
    directory = os.path.dirname(link.slots.path(order.slot))
    return open_arena(
        directory, order.slot, link.job, save, rank, tier=order.tier, complete=complete,
        integrity=link.settings.integrity,
    )  # fmt: skip


def _segments(link: Link, save: SaveId) -> MemorySegments:
    """Of the images that lie in the memory of nodes."""
    return MemorySegments(link.ask, link.slots.directory, link.job, save, link.settings.integrity)


def _read_pulled(link: Link, state: dict[str, Any], order: LoadFrom, save: SaveId, *, strict: bool) -> Segment:
    """Reads what this rank needs of images that lie in the memory of nodes."""
    segments = _segments(link, save)
    try:
        found, fitted = fit_pulled(link, segments, order, state, strict=strict)
        segments.pull(fitted.targets)  # what lacks is had in another way for all ranks
        return _filled(found, fitted)
    finally:
        segments.release()


def _read_whole(link: Link, state: dict[str, Any], order: LoadFrom, save: SaveId, *, strict: bool) -> Segment:
    """Reads what this rank needs of all images from the slots of this node."""
    found, group = _open_arena(link, order, save, complete=False), link.group
    try:
        like = group.rank if group.rank in found.leaves else min(found.leaves)
        leaves = found.leaves
        saves = saves_of(
            [*found.layouts.values()], leaves[like], rank=like, world_size=group.world_size, me=group.rank,
            named=link.settings.named, of_all=leaves,
        )  # fmt: skip
        where = f"step {save.step} of job {link.job.job}, in memory"
        fitted = fit(state, saves, where=where, pickle_keys=link.settings.pickle_keys, strict=strict)
        return _filled(found, fitted)
    finally:
        found.close()


def _filled(found: Checkpoint, fitted: Fit) -> Segment:
    found.read_all(fitted.targets)
    fitted.settle()
    fitted.compare(found.images)
    notes = notes_of(fitted.taken, found.replicas)
    return Segment(found.save, found.tier, fitted, fitted.nbytes, tuple(notes))


def _read_slot(link: Link, state: dict[str, Any], order: LoadFrom, save: SaveId, *, strict: bool) -> Segment:
    source = open_slot(link.slots.path(order.slot), link.job, save, link.group.rank, link.settings.integrity)
    where = f"step {save.step} of job {link.job.job}, in memory"
    keys, named = link.settings.pickle_keys, link.settings.named
    fitted = _read_own(source, state, link.group, keys, where=where, named=named, strict=strict)
    return Segment(save, order.tier, fitted, source.nbytes, ())


def _read_own(  # noqa: PLR0913 - keyword-only
    source: Source, state: dict[str, Any], group: Group, keys: PickleKeys, *, where: str, named: Named, strict: bool,
    fits: Callable[[], None] = lambda: None,
) -> Fit:  # fmt: skip
    """Reads this rank's own image into the state. Closes source. fits: called when the image is known to be enough."""
    try:
        saves = saves_of([source.layout], source.leaves, rank=group.rank, world_size=group.world_size, named=named)
        fitted = fit(state, saves, where=where, pickle_keys=keys, strict=strict)
        fits()
        copy_out(source, fitted.targets.get(group.rank, []))
        fitted.settle()
    finally:
        source.close()
    return fitted


def read_checkpoint(  # noqa: PLR0913 - keyword-only
    directory: str, state: dict[str, Any], *, group: Group, save: SaveId | None = None, keys: PickleKeys = NO_PICKLE,
    participants: Participants | None = None, integrity: Integrity = XXH3, named: Named = NOTHING_NAMED,
    strict: bool = True,
) -> tuple[Fit, int, tuple[str, ...]]:  # fmt: skip
    """Reads a committed checkpoint into the state. Returns the fit, before its finish, its bytes, and notes.

    Reads this rank's own image if that has all it needs, else the ranges it needs of every image, each block once for
    all participants of a cooperative read, which this rank enters and leaves.
    Raises DamagedError, also for an unreadable file, and MismatchError.
    """
    with taking_part(participants):
        stored = open_files(real(directory), integrity)
        with contextlib.ExitStack() as stack, _damage_of(stored.location):
            records = read_records(stored, save)
            where = f"{stored.location} (step {records.manifest.save.step})"
            stack.enter_context(told_of_dropped(state, records.manifest.dropped))
            if len(records) == group.world_size:
                with contextlib.suppress(OtherRanksNeededError):
                    own = records[group.rank]
                    check_files(stored, [own])
                    source = open_file(records, own.rank)
                    alone = participants.leave if participants is not None else lambda: None
                    fitted = _read_own(source, state, group, keys, where=where, named=named, strict=strict, fits=alone)
                    return fitted, source.nbytes, ()
            fitted = fit_to_stored(records, state, group, named, where=where, keys=keys, strict=strict)

            def open_source(rank: int) -> Source:
                return open_file(records, rank)

            copy_out_together(open_source, fitted.targets, records, participants, integrity)
            fitted.settle()
            fitted.compare(images_in(records))
            notes = notes_of(fitted.taken, records.manifest.replicas)
            return fitted, fitted.nbytes, tuple(notes)


@contextlib.contextmanager
def _damage_of(directory: str) -> Iterator[None]:
    """Turns OSError into DamagedError, but for refused permissions and missing descriptors."""
    try:
        yield
    except OSError as error:
        if error.errno in _OURS:  # the checkpoint is sound
            raise RestoreError(f"{error.filename or directory}: {error.strerror}", hint="ulimit -n 4096") from error
        if error.errno in REFUSALS:  # also sound; an older checkpoint in its place would hide that
            refused = why_refused(error.filename or directory)
            text = f"{error.filename or directory}: {error.strerror}: {refused.text}"
            raise RestoreError(text, hint=f"{refused.hint}; the checkpoint need not be damaged") from error
        raise DamagedError(f"{error.filename or directory}: {error.strerror}") from error
