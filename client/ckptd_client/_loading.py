"""One rank's part in a load: asks where to read, reads and checks, reports, until all ranks agree."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ckptd.protocol.errors import CkptdError, DamagedError, MismatchError
from ckptd.protocol.ids import SaveId
from ckptd.protocol.messages import AskLoad, LoadFrom, ReportLoad, Request, Tier
from ckptd_client._channel import ChannelLostError
from ckptd_client._fit import Fit, fit
from ckptd_client._link import Link
from ckptd_client._restore import Source, copy_out, open_file, open_slot

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
        problem, misfit = "", None
        if segment is None or (segment.save, segment.tier) != (order.save, order.tier):
            try:
                segment = _read(link, state, order)
            except MismatchError as error:
                problem, misfit = str(error), error
            except (CkptdError, OSError) as error:
                problem = str(error)
        order = _report(link, order, problem, misfit)
        if problem:
            segment = None
    return order, segment


def _ask(link: Link, make: Callable[[int], Request]) -> LoadFrom:
    # No deadline: the other ranks may be late, and the daemon ends a load that cannot be agreed.
    answer = link.ask(make, None)
    assert isinstance(answer, LoadFrom)  # noqa: S101 - the reply to AskLoad and ReportLoad
    return answer


def _report(link: Link, order: LoadFrom, problem: str, misfit: MismatchError | None) -> LoadFrom:
    save, tier = order.save, order.tier
    assert save is not None  # noqa: S101 - only orders to read are reported

    def make(seq: int) -> Request:
        return ReportLoad(seq=seq, save=save, tier=tier, problem=problem[:4000], fatal=misfit is not None)

    try:
        return _ask(link, make)
    except CkptdError:
        if misfit is not None:
            raise misfit from None
        raise


def _read(link: Link, state: dict[str, Any], order: LoadFrom) -> Segment:
    assert order.save is not None  # noqa: S101 - the caller looked
    source = _source(link, order.save, order)
    try:
        where = f"{order.path if order.tier is Tier.PFS else order.slot} (step {order.save.step})"
        fitted = fit(state, source.layout, source.leaves, where=where)
        copy_out(source, fitted.targets)
        fitted.settle_shared()
    finally:
        source.close()
    return Segment(order.save, order.tier, fitted, source.nbytes, source.notes)


def _source(link: Link, save: SaveId, order: LoadFrom) -> Source:
    if order.tier is Tier.ARENA:
        return open_slot(link.slots.path(order.slot), link.job, save, link.group.rank)
    if not order.path:
        raise DamagedError(f"no copy of {save} is left for rank {link.group.rank}")
    return open_file(order.path, save, link.group.rank, link.group.world_size)
