"""One save of a job as its coordinator knows it. Pure."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from ckptd.core.coordinator.save_states import ENDS, OPEN, State
from ckptd.shared.base.errors import joined
from ckptd.shared.base.ids import SaveId
from ckptd.shared.format.replica_attestations import Attestation, Compared, Where, compared
from ckptd.shared.protocol.messages import End, Milestone


@dataclass(slots=True)
class Record:
    """One save."""

    save: SaveId
    world_size: int
    since: float
    state: State = State.STAGING
    staged: bool = False  # every rank's segment was sealed, once
    staged_at: float | None = None  # None: it is not, or was before this daemon looked at its clock
    held: dict[int, set[str]] = field(default_factory=dict)  # rank -> nodes whose arenas have it
    changes: int = 0  # of held
    delivered: dict[int, int] = field(default_factory=dict)  # rank -> bytes
    attestations: dict[int, tuple[Attestation, ...]] = field(default_factory=dict)  # rank -> what it said of them
    adopted: bool = False  # found in the arena at start
    protected: bool = False  # by all sets, as the ranks' nodes were then
    due: bool = False  # to be drained, once it is whole
    lent: bool = False  # it is due in place of an older one alone
    forced: bool = False  # somebody asked for this very one: a newer one does not take its turn
    reason: str = ""  # of its end
    waits_for: str = ""  # the ranks that are missing, once that is worth a line
    mismatched: bool = False  # the slices did not make a whole
    where: Where | None = None  # as far as that is known
    drainers: dict[str, tuple[int, ...]] = field(default_factory=dict)  # node -> ranks whose segments it writes
    writes: dict[str, int] = field(default_factory=dict)  # node -> bytes that it writes
    voters: set[str] = field(default_factory=set)
    stall_s: float = 0.0  # the longest that a rank was held up for it, as far as they report
    stalls_s: float = 0.0  # of all ranks
    late_nbytes: int = 0  # copied while the training went on
    left: float = math.inf  # when the training of its first rank went on
    drain_since: float | None = None  # None: not here: its commit may be made of an earlier coordinator's votes
    first_failure: float | None = None
    failures: int = 0
    commit_failures: int = 0
    error: str = ""
    _compared: tuple[int, Compared] | None = None  # and as of which change
    _nbytes: tuple[int, int] | None = None  # likewise

    @property
    def nbytes(self) -> int:
        """Bytes of all segments delivered so far. Summed up once for what is held."""
        if self._nbytes is None or self._nbytes[0] != self.changes:
            self._nbytes = self.changes, sum(self.delivered.values())
        return self._nbytes[1]

    @property
    def shared(self) -> bool:
        """Whether ranks saved slices of what they all hold, so that each needs the others' to load."""
        return any(self._binding.values())

    @property
    def _binding(self) -> dict[int, list[Attestation]]:
        """By rank, the attestations without which an image is not whole."""
        return {
            rank: [attestation for attestation in said if not attestation.only_told]
            for rank, said in self.attestations.items()
        }

    @property
    def compared(self) -> Compared:
        """How far the attestations prove that what its ranks hold alike is the same. Sought once for what is held."""
        if self._compared is None or self._compared[0] != self.changes:  # each attestation comes with a segment
            self._compared = self.changes, compared(self.attestations)
        return self._compared[1]

    @property
    def end(self) -> End | None:
        """How it ended, if it has."""
        return ENDS.get(self.state)

    @property
    def missing(self) -> list[int]:
        """Ranks that have not delivered it, as far as is known."""
        return sorted(set(range(self.world_size)) - self.delivered.keys())

    def missing_runs(self, most: int) -> list[tuple[int, int]]:
        """The first of them, as runs from first to last. It looks no further than these: there may be many."""
        found: list[tuple[int, int]] = []
        there, begin = self.delivered, None
        for rank in range(self.world_size if len(there) < self.world_size else 0):
            if rank in there:
                if begin is not None:
                    found.append((begin, rank - 1))
                    if len(found) == most:
                        return found
                begin = None
            elif begin is None:
                begin = rank
        return found if begin is None else [*found, (begin, self.world_size - 1)]

    @property
    def in_memory(self) -> bool:
        """Whether every rank's segment still lies in an arena: ``held`` has none but ranks of the save."""
        return 0 < self.world_size == len(self.held)

    @property
    def why(self) -> str:
        """Of its end, or why there is none yet."""
        return self.reason or (self.waits_for if self.state is State.STAGING else "")

    @property
    def milestone(self) -> Milestone | None:
        """What was reached."""
        if self.state is State.DURABLE:
            return Milestone.DURABLE
        if self.protected:
            return Milestone.PROTECTED
        return Milestone.STAGED if self.staged else None

    def drained_s(self, now: float) -> float:
        """How long its drain has taken here, with its commit; 0: it has none here."""
        return now - self.drain_since if self.drain_since is not None else 0.0

    def lost(self, rank: int, node: str) -> None:
        """The node no longer has the rank's segment."""
        self.changes += 1
        self.held[rank].discard(node)
        if not self.held[rank]:
            del self.held[rank]
            if not self.staged:  # then it is not delivered any more
                self.delivered.pop(rank, None)


def disagreement(one: Record, other: Record) -> str:
    """Why two saves of one place have failed, and what to type."""
    name = [f"rank {min(r.delivered, default=0)} saved step {r.save.step}" for r in (one, other)]
    text = f"ranks disagree about the step of one save: {', '.join(name)}"
    return joined(text, "call save(state, step) with the same step on all ranks")


def newest_whole(records: Iterable[Record], on_store: Iterable[SaveId]) -> SaveId | None:
    """The newest that lies in memory with all its ranks, or on the store."""
    return max([*(r.save for r in records if r.staged and r.in_memory), *on_store], default=None)


def obsolete_since(records: Iterable[Record], loaded: SaveId, incarnation: int) -> list[SaveId]:
    """Saves of older incarnations than this one, of which too much is lost: an older one was loaded.

    A coordinator that took over knows one that was staged, and is not whole any more, as incomplete and given up.
    """
    newer = [r for r in records if loaded < r.save and r.save.incarnation < incarnation and r.held and not r.in_memory]
    return sorted(r.save for r in newer if (r.staged and r.state in OPEN) or r.state is State.ABANDONED)


def few(ranks: list[int], most: int = 8) -> str:
    """The first of many numbers, for a sentence."""
    shown = ", ".join(map(str, ranks[:most]))
    return f"{shown}, ... ({len(ranks)} in all)" if len(ranks) > most else shown
