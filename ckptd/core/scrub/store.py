"""A job's committed checkpoints read again on the store, by its coordinator: what next, who mends it. Pure.

Each image is written again by a node that has it in memory, else by this one from parity that lies beside it. What is
no image is said and left.
"""

from collections.abc import Callable

from msgspec.structs import replace

from ckptd.core import events as ev
from ckptd.core.actions import Action, Note, ScrubPiece, ToNode
from ckptd.core.coordinator.coordinator import Coordinator
from ckptd.core.coordinator.save_states import State
from ckptd.core.coordinator.scrub_order import Pace, Read, due_at, next_of
from ckptd.core.coordinator.scrub_states import STORE_SCRUB, StoreOn, StoreScrubbing
from ckptd.core.scrub.findings import Findings
from ckptd.shared.base.ids import SaveId
from ckptd.shared.format.digest import BLOCK_NBYTES
from ckptd.shared.protocol.messages import Tier
from ckptd.shared.protocol.scrubbing import BEGIN, Harm, Place

PAUSE_S = 5.0  # while something else is going on
SILENT_S = 60.0  # after a store that did not answer; doubled each time
MEND_S = 3600.0  # after which a node that writes files again is asked whether it does
_PIECE_NBYTES = 4 * BLOCK_NBYTES  # at most: a slow store answers in time, too


class StoreScrub:
    """Of one job, at its coordinator. quiet: whether no job of this daemon has the store write."""

    def __init__(
        self, coordinator: Coordinator, findings: Findings, pace: Pace, every_s: float, quiet: Callable[[], bool]
    ) -> None:
        self._job, self._coordinator, self._quiet = coordinator.job, coordinator, quiet
        self._findings, self._pace, self._every_s = findings, pace, every_s
        self.state: StoreScrubbing | None = None
        self.nbytes = 0
        self.last: float | None = None  # when a checkpoint was read to its end
        self._read: dict[SaveId, Read] = {}
        self._new_at: dict[SaveId, float] = {}  # when it was committed here: then it was sound
        self._at: tuple[SaveId, Place] | None = None  # what is read or mended
        self._harmed = False  # something was found in the checkpoint that is being read
        self._order = 0  # its number; those of an earlier daemon of this node are smaller
        self._harms: dict[int, Harm] = {}  # being mended, by rank
        self._asked: dict[str, tuple[int, ...]] = {}  # nodes that have not answered, for which ranks
        self._until: float | None = None
        self._not_before = float("-inf")
        self._silent = 0  # pieces in a row that were not answered

    def is_new(self, save: SaveId, now: float) -> None:
        """It was committed now."""
        if self._pace.bytes_per_s:
            self._new_at[save] = now

    def _saves(self) -> dict[SaveId, Read]:
        """Newest first: a load would take that."""
        found = sorted(self._coordinator.facts.on_store, reverse=True)
        self._new_at = {save: at for save, at in self._new_at.items() if save in found}
        self._read = {save: self._read.get(save, Read(self._new_at.get(save))) for save in found}
        return self._read

    def _is_quiet(self) -> bool:
        facts = self._coordinator.facts
        stages = facts.of(State.STAGING, State.QUEUED)
        return self._quiet() and not stages and self._coordinator.restores.running is None

    # --- what is read next

    def due(self) -> float | None:
        """When ``turn`` has something to do; None: an answer is waited for, or there is nothing to read."""
        if self.state is StoreScrubbing.MENDING:
            return self._until
        if self.state is not None or not self._pace.bytes_per_s or not self._coordinator.facts.ready:
            return None
        first = min((due_at(read, self._every_s) for read in self._saves().values()), default=None)
        return None if first is None else max(first, self._pace.free_at, self._not_before)

    def turn(self, now: float) -> list[Action]:
        """Something is due."""
        if self.state is StoreScrubbing.MENDING:
            return self._late(now)
        if not self._is_quiet():
            self._not_before = now + PAUSE_S
            return []
        save = next_of(self._saves(), now, self._every_s)
        if save is None or not self._move(StoreOn.DUE):
            return []
        place = self._read[save].place or BEGIN
        self._at = save, place
        nbytes = max(BLOCK_NBYTES, min(self._pace.bytes_per_s, _PIECE_NBYTES))
        return [ScrubPiece(job=self._job, save=save, place=place, nbytes=nbytes)]

    def _move(self, on: StoreOn) -> bool:
        step = STORE_SCRUB.step(self.state, on)
        if step is None:
            return False
        self.state = step.after
        return True

    def _end(self, on: StoreOn) -> list[Action]:
        self._move(on)
        self._at = None
        return []

    # --- what came of it

    def scrubbed(self, event: ev.PieceScrubbed, now: float) -> list[Action]:
        """A piece was read."""
        if self._at is None or self.state is not StoreScrubbing.READING:
            return []
        save = self._at[0]
        self.nbytes += event.nbytes
        self._pace.took(event.nbytes, now)
        if event.problem:  # this one has its next turn with all others: a read of it may hang
            self._read[save] = Read(now)
            self._silent += 1
            self._not_before = now + min(SILENT_S * 2 ** (self._silent - 1), self._every_s)
            return self._end(StoreOn.SILENT)
        self._silent = 0
        if event.gone or save not in self._saves():  # a look at the store will find that, too
            self._harmed = False
            self._read[save] = Read(now)
            return self._end(StoreOn.GONE)
        self._harmed |= bool(event.harms)
        self._go_on(save, event.next, now)
        images = {harm.rank: harm for harm in event.harms if harm.rank is not None}
        others = [action for harm in event.harms if harm.rank is None for action in self._say(save, harm, "")]
        if not images:
            self._end(StoreOn.LOST if event.harms else StoreOn.SOUND)
            return others
        return [*others, *self._mend(save, images, now)]

    def _go_on(self, save: SaveId, place: Place | None, now: float) -> None:
        if place is not None:
            self._read[save] = self._read[save]._replace(place=place)
            return
        self._read[save] = Read(now, None)
        self.last = now
        if not self._harmed:
            self._findings.sound(Tier.PFS, save)
        self._harmed = False

    def _mend(self, save: SaveId, harms: dict[int, Harm], now: float) -> list[Action]:
        """Each image by a node that has it; those that none has here, from parity."""
        if not self._move(StoreOn.IMAGES):
            return []
        facts = self._coordinator.facts
        record = facts.records.get(save)
        by_node: dict[str, list[int]] = {}
        for rank in sorted(harms):
            holders = record.held.get(rank, set()) & facts.links.up if record is not None else set()
            node = facts.node if facts.node in holders or not holders else min(holders)
            by_node.setdefault(node, []).append(rank)
        self._harms, self._order = harms, max(self._order + 1, int(now * 1000))
        self._asked = {node: tuple(ranks) for node, ranks in by_node.items()}
        return self._ask(save, now)

    def _ask(self, save: SaveId, now: float) -> list[Action]:
        """All that have not answered. A node that carries the order out does not begin again."""
        self._until = now + MEND_S
        order = ev.MendOrdered(
            job=self._job, node=self._coordinator.facts.node, number=self._order, save=save, ranks=()
        )
        return [
            ToNode(job=self._job, node=node, message=replace(order, ranks=ranks)) for node, ranks in self._asked.items()
        ]

    def mended(self, node: str, event: ev.MendEnded) -> list[Action]:
        """A node has written what it could."""
        if self._at is None or event.number != self._order or node not in self._asked:
            return []
        save = self._at[0]
        actions = [action for rank in self._asked.pop(node) for action in self._became(save, rank, event)]
        if not self._asked:
            self._end(StoreOn.ANSWERED)
        return actions

    def _became(self, save: SaveId, rank: int, event: ev.MendEnded) -> list[Action]:
        harm = self._harms.pop(rank)
        if rank in event.memory or rank in event.parity:
            return self._say(save, harm, "memory" if rank in event.memory else "parity on the store")
        if rank in event.lost:
            return self._say(save, harm._replace(what="; ".join(filter(None, (harm.what, event.problem)))), "")
        self._findings.sound(Tier.PFS, save, (rank,))
        text = f"scrub: {harm.path}: {harm.what}; sound when it was read again: nothing was written"
        return [Note(job=self._job, text=text)]

    def went(self, event: ev.PeerDown, _now: float) -> list[Action]:
        """The node is lost, and with it what it was to write."""
        if self._at is None or event.node not in self._asked:
            return []
        lost, text = self._asked[event.node], f"node {event.node} was to write it again, and is lost"
        ended = ev.MendEnded(job=self._job, number=self._order, save=self._at[0], lost=lost, problem=text)
        return self.mended(event.node, ended)

    def _late(self, now: float) -> list[Action]:
        """What is not made good yet is said."""
        if self._at is None or not self._move(StoreOn.LATE):
            return []
        save = self._at[0]
        said = [action for harm in self._harms.values() for action in self._say(save, harm, "")]
        return [*said, *self._ask(save, now)]

    def _say(self, save: SaveId, harm: Harm, by: str) -> list[Action]:
        what = f"{harm.path}: {harm.what}"[:1000]
        return self._findings.say(
            ev.ScrubFound(job=self._job, save=save, tier=Tier.PFS, rank=harm.rank, what=what, mended=by)
        )
