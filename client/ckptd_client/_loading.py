"""One rank's part in a load: asks where to read, reads and checks, reports, until all ranks agree."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ckptd.protocol.errors import CkptdError, DamagedError, MismatchError
from ckptd.protocol.ids import SaveId
from ckptd.protocol.layout import decode_layout, decode_leaves
from ckptd.protocol.manifest import FileRecord
from ckptd.protocol.messages import AskLoad, LoadFrom, ReportLoad, Request, Tier
from ckptd_client._channel import ChannelLostError
from ckptd_client._fit import Fit, OtherRanksNeededError, fit, saves_of
from ckptd_client._group import Group
from ckptd_client._link import Link
from ckptd_client._restore import copy_out, open_file, open_slot, read_manifest, vote_notes

_TRIES = 3  # a daemon that dies in the middle is asked again when it is back


@dataclass(frozen=True, slots=True)
class Segment:
    """What this rank has read: its bytes are in the state's tensors, the rest waits for ``fit.finish``."""

    save: SaveId
    tier: Tier
    fit: Fit
    nbytes: int
    notes: tuple[str, ...]


def load(link: Link, state: dict[str, Any], step: int | None) -> tuple[LoadFrom, Segment | None]:
    """Runs the load to its end; None when there is nothing to restore. Raises RestoreError, MismatchError."""
    for left in reversed(range(_TRIES)):
        try:
            return _run(link, state, step)
        except ChannelLostError:
            if not left:
                raise
    raise AssertionError("unreachable")


def _run(link: Link, state: dict[str, Any], step: int | None) -> tuple[LoadFrom, Segment | None]:
    order = _ask(link, lambda seq: AskLoad(seq=seq, step=step))
    segment: Segment | None = None
    while order.save is not None and not order.agreed:
        error: Exception | None = None
        if segment is None or (segment.save, segment.tier) != (order.save, order.tier):
            segment = None
            try:
                segment = _read(link, state, order)
            except (CkptdError, OSError) as problem:
                error = problem
        order = _report(link, order, error)
    return order, segment


def _ask(link: Link, make: Callable[[int], Request]) -> LoadFrom:
    # No deadline: the other ranks may be late, and the daemon ends a load that cannot be agreed.
    answer = link.ask(make, None)
    assert isinstance(answer, LoadFrom)  # noqa: S101 - the reply to AskLoad and ReportLoad
    return answer


def _report(link: Link, order: LoadFrom, error: Exception | None) -> LoadFrom:
    save, tier = order.save, order.tier
    assert save is not None  # noqa: S101 - only orders to read are reported

    def make(seq: int) -> Request:
        return ReportLoad(
            seq=seq,
            save=save,
            tier=tier,
            problem=str(error)[:4000] if error else "",
            fatal=isinstance(error, MismatchError),
            reshape=isinstance(error, OtherRanksNeededError),
        )

    try:
        return _ask(link, make)
    except CkptdError:
        if isinstance(error, MismatchError):
            raise error from None
        raise


def _read(link: Link, state: dict[str, Any], order: LoadFrom) -> Segment:
    assert order.save is not None  # noqa: S101 - the caller looked
    if order.tier is Tier.ARENA:
        return _read_slot(link, state, order, order.save)
    if not order.path:
        raise DamagedError(f"no copy of {order.save} is left for rank {link.group.rank}")
    fitted, nbytes, notes = read_checkpoint(order.path, state, save=order.save, group=link.group)
    return Segment(order.save, order.tier, fitted, nbytes, notes)


def _read_slot(link: Link, state: dict[str, Any], order: LoadFrom, save: SaveId) -> Segment:
    rank = link.group.rank
    source = open_slot(link.slots.path(order.slot), link.job, save, rank)
    try:
        saves = saves_of([source.layout], source.leaves, whole=link.group.world_size == 1)
        fitted = fit(state, saves, rank=rank, where=f"{order.slot} (step {save.step})")
        copy_out(source, fitted.targets.get(rank, []))
    finally:
        source.close()
    return Segment(save, order.tier, fitted, source.nbytes, ())


def read_checkpoint(
    directory: str, state: dict[str, Any], *, group: Group, save: SaveId | None = None
) -> tuple[Fit, int, tuple[str, ...]]:
    """Reads a committed checkpoint into the state. Returns the fit, still to be finished, its bytes, and notes.

    This rank's own image if that has all it needs, else the ranges it needs of every image.
    """
    manifest = read_manifest(directory, save)
    notes = vote_notes(directory, manifest)
    where = f"{directory} (step {manifest.save.step})"
    if manifest.world_size == group.world_size:
        own = manifest.files[group.rank]
        try:
            return *_read_files(
                directory, [own], state, rank=group.rank, whole=group.world_size == 1, where=where
            ), notes
        except OtherRanksNeededError:
            pass
    return *_read_files(directory, manifest.files, state, rank=group.rank, whole=True, where=where), notes


def _read_files(  # noqa: PLR0913 - what to read, and for whom
    directory: str, records: list[FileRecord], state: dict[str, Any], *, rank: int, whole: bool, where: str
) -> tuple[Fit, int]:
    layouts = [decode_layout(r.layout, where=os.path.join(directory, r.name)) for r in records]
    like = next((r for r in records if r.rank == rank), records[0])  # whose plain values this rank goes on with
    leaves = decode_leaves(like.leaves, where=os.path.join(directory, like.name))
    fitted = fit(state, saves_of(layouts, leaves, whole=whole), rank=rank, where=where)
    nbytes = 0
    for record in records:
        targets = fitted.targets.get(record.rank, [])
        if targets:
            source = open_file(directory, record)
            try:
                copy_out(source, targets)
            finally:
                source.close()
            nbytes += sum(target.nbytes for target in targets)
    return fitted, nbytes
