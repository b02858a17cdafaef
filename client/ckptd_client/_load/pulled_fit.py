"""Fits a save in the memory of nodes to a state: by the layouts of few of its ranks, where these are enough."""

from typing import Any

from ckptd.shared.base.errors import MismatchError
from ckptd.shared.protocol.messages import LoadFrom
from ckptd_client._daemon.link import Link
from ckptd_client._load.candidates import candidates
from ckptd_client._load.checkpoint import Checkpoint, open_segments
from ckptd_client._load.fit import Fit, fit
from ckptd_client._load.memory import MemorySegments
from ckptd_client._load.saved_names import OtherRanksNeededError, saves_of

ALL_UP_TO = 64  # ranks: of so many every layout is read, which shows what each has of its own, too


def fit_pulled(
    link: Link, segments: MemorySegments, order: LoadFrom, state: dict[str, Any], *, strict: bool
) -> tuple[Checkpoint, Fit]:
    """The images whose layouts were read, and the reads that fill the state. Pulls no data yet.

    Raises as fit does, LackingError, DamagedError, OSError.
    """
    like = link.group.rank if link.group.rank < order.saved_by else 0
    if order.saved_by > ALL_UP_TO and (some := _candidates(segments, like, state)) is not None:
        try:
            found, fitted = _fit(link, segments, order, state, (like, some), strict=strict)
        except (MismatchError, OtherRanksNeededError):  # perhaps only by these layouts
            pass
        else:
            if link.group.world_size != order.saved_by:
                fitted.notes.append(
                    f"{order.saved_by} ranks saved it, and the layouts of {len(some)} were read: values that each rank "
                    "has of its own under one name were not compared"
                )
            return found, fitted
    return _fit(link, segments, order, state, (like, set(range(order.saved_by))), strict=strict)


def _candidates(segments: MemorySegments, like: int, state: dict[str, Any]) -> set[int] | None:
    source = segments.describe([like])[like]
    return candidates(state, source.layout, source.leaves, segments.layout_parts(like), source.where)


def _fit(  # noqa: PLR0913 - keyword-only
    link: Link, segments: MemorySegments, order: LoadFrom, state: dict[str, Any], of: tuple[int, set[int]], *,
    strict: bool,
) -> tuple[Checkpoint, Fit]:  # fmt: skip
    like, ranks = of
    group, settings = link.group, link.settings
    found = open_segments(segments, order, sorted(ranks), link.job, settings.integrity)
    leaves = found.leaves
    saves = saves_of(
        found.layouts.values(), leaves[like], rank=like, world_size=group.world_size, me=group.rank,
        named=settings.named, of_all=leaves,
    )  # fmt: skip
    where = f"step {found.save.step} of job {link.job.job}, in memory"
    return found, fit(state, saves, where=where, pickle_keys=settings.pickle_keys, strict=strict)
