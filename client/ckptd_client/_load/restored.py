"""The result of load."""

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
    """What `load` restored.

    Attributes:
        step: The step of the checkpoint.
        tier: Where the bytes of this rank came from: "arena" (this node's memory), "peer" (copied from another node's),
            "rebuilt" (from parity in the memory of other nodes) or "pfs". It may differ between ranks.
        seconds: How long `load` took on this rank.
        nbytes: Bytes of this rank's part.
        notes: What was damaged or missing on the way, what an object did not keep, and which values belonged to ranks
            that are gone. Empty when there was nothing of the kind. They are logged as warnings too.
        state: The very dict that `load` was given, with the loaded values in it; not a copy.
    """

    step: int
    tier: str
    seconds: float
    nbytes: int
    notes: list[str] = field(default_factory=list)
    state: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)


def finished(state: dict[str, Any], segment: "Segment", notes: Iterable[str], *, began: float, rank: int) -> Restored:
    """Completes the state of a rank from what it has read, and logs the notes. began: of ``time.perf_counter``.

    Raises MismatchError if an object refuses or changes saved values.
    """
    finished_notes = segment.fit.finish(state)
    common = [*notes, *segment.notes, *finished_notes]
    own = segment.fit.own_notes  # for this rank alone
    for note in [*common, *own] if rank == 0 else own:
        log.warning("ckptd: warning: restored step %d, but %s", segment.save.step, note)
    seconds = time.perf_counter() - began
    return Restored(segment.save.step, str(segment.tier), seconds, segment.nbytes, [*common, *own], state)
