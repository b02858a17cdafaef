"""One rank's part in a load: asks where to read, reads and checks, reports, until all ranks agree."""

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ckptd.protocol.errors import CkptdError, DamagedError, MismatchError
from ckptd.protocol.ids import SaveId
from ckptd.protocol.layout import Layout, decode_layout, decode_leaves
from ckptd.protocol.manifest import FileRecord, Manifest
from ckptd.protocol.messages import AskLoad, LoadFrom, ReportLoad, Request, Tier
from ckptd_client._channel import ChannelLostError
from ckptd_client._fit import Fit, OtherRanksNeededError, fit, saves_of
from ckptd_client._group import Group
from ckptd_client._link import Link
from ckptd_client._restore import Source, copy_out, open_file, open_slot, read_manifest, vote_notes

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
    source = open_slot(link.slots.path(order.slot), link.job, save, link.group.rank)
    fitted = _read_own(source, state, link.group, where=f"{order.slot} (step {save.step})")
    return Segment(save, order.tier, fitted, source.nbytes, ())


def _read_own(source: Source, state: dict[str, Any], group: Group, *, where: str) -> Fit:
    """All of this rank's own image into the state. Closes source."""
    try:
        saves = saves_of([source.layout], source.leaves, rank=group.rank, world_size=group.world_size)
        fitted = fit(state, saves, where=where)
        copy_out(source, fitted.targets.get(group.rank, []))
        fitted.settle_shared()
    finally:
        source.close()
    return fitted


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
        with contextlib.suppress(OtherRanksNeededError):
            source = open_file(directory, manifest.files[group.rank])
            return _read_own(source, state, group, where=where), source.nbytes, notes
    fitted = _fit_all(directory, manifest, state, group, where=where)
    for rank, targets in fitted.targets.items():
        source = open_file(directory, manifest.files[rank])
        try:
            copy_out(source, targets, sparse=True)
        finally:
            source.close()
    fitted.settle_shared()
    nbytes = sum(target.nbytes for targets in fitted.targets.values() for target in targets)
    return fitted, nbytes, notes


def _fit_all(directory: str, manifest: Manifest, state: dict[str, Any], group: Group, *, where: str) -> Fit:
    """The state and all images. A rank that there was not goes on with the plain values of rank 0."""
    layouts = [_layout(directory, record) for record in manifest.files]
    like = manifest.files[group.rank if group.rank < manifest.world_size else 0]
    leaves = decode_leaves(like.leaves, where=os.path.join(directory, like.name))
    return fit(state, saves_of(layouts, leaves, rank=like.rank, world_size=group.world_size), where=where)


def _layout(directory: str, record: FileRecord) -> Layout:
    where = os.path.join(directory, record.name)
    layout = decode_layout(record.layout, where=where)
    if layout.rank != record.rank:
        raise DamagedError(f"{where}: its layout is of rank {layout.rank}, not {record.rank}")
    return layout
