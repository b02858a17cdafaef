"""What load tells of what it brought back."""

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckptd_client._load.rounds import Segment

log = logging.getLogger("ckptd_client")


@dataclass(frozen=True, slots=True)
class Restored:
    """What load brought back.

    ``tier``: where this rank's bytes came from, which may differ from rank to rank: "arena" (they were in this node's
    memory), "peer" (copied from another node's), "rebuilt" (from parity in other nodes' memory), "pfs". ``nbytes``: of
    this rank. ``notes`` says what was damaged or missing on the way, what an object did not take over, and which values
    belonged to ranks that are gone; empty when nothing was. They are logged as warnings too.
    ``state`` is the caller's own state, with the loaded values in it: the very dict that load was given, not a copy.
    """

    step: int
    tier: str
    seconds: float
    nbytes: int
    notes: list[str] = field(default_factory=list)
    state: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)


def finished(state: dict[str, Any], segment: "Segment", notes: Iterable[str], *, began: float, rank: int) -> Restored:
    """Puts what a rank has read into its state, and logs what there is to say. began: of ``time.perf_counter``.

    Raises MismatchError when an object does not take, or does not keep, what was saved.
    """
    told = segment.fit.finish(state)
    common = [*notes, *segment.notes, *told]
    own = segment.fit.own_notes  # of this rank alone
    for note in [*common, *own] if rank == 0 else own:
        log.warning("ckptd: warning: restored step %d, but %s", segment.save.step, note)
    seconds = time.perf_counter() - began
    return Restored(segment.save.step, str(segment.tier), seconds, segment.nbytes, [*common, *own], state)
