"""A node's memory read again: which block next, and from where a damaged one is made good. Pure.

Only what is digested, and not needed by a save, a drain, a load or an encode that runs, is read. What was staged or
came here is sound then: it is read when it has lain here for ``every_s``.
"""

from typing import NamedTuple

from ckptd.core import events as ev
from ckptd.core.actions import Action, CopyBlock, FetchSegment, ScrubBlock
from ckptd.core.coordinator.scrub_order import Pace, Read, due_at, next_of
from ckptd.core.coordinator.scrub_states import MEMORY_SCRUB, MemoryOn, MemoryScrubbing
from ckptd.core.links import Links
from ckptd.core.node.node import JobNode
from ckptd.core.node.slots import Slot
from ckptd.core.scrub.findings import Findings
from ckptd.shared.base.ids import SaveId
from ckptd.shared.protocol.messages import Tier
from ckptd.shared.protocol.parity_types import ParityChunk
from ckptd.shared.protocol.scrubbing import Place

TAIL = -1  # the block of a slot that stands for all that is not its image; it is read first
PAUSE_S = 1.0  # while something else is going on


class Item(NamedTuple):
    """What is read: a slot that holds a save, or (name empty) the parity of one."""

    name: str
    save: SaveId
    rank: int | None
    epoch: int = 0

    @property
    def tier(self) -> Tier:
        """As findings name it."""
        return Tier.ARENA if self.name else Tier.REBUILT


class MemoryScrub:
    """Of one job on one node."""

    def __init__(self, node: JobNode, links: Links, findings: Findings, pace: Pace, every_s: float) -> None:
        self._job, self._node, self._links = node.job, node, links
        self._findings, self._pace, self._every_s = findings, pace, every_s
        self.state: MemoryScrubbing | None = None
        self.nbytes = 0
        self.last: float | None = None  # when something was read to its end
        self._read: dict[Item, Read] = {}
        self._new_at: dict[SaveId, float] = {}  # when it was digested here: then it was sound
        self._at: tuple[Item, Place] | None = None  # what is read or mended
        self._what = ""  # is wrong with it
        self._not_before = float("-inf")

    # --- what is there

    def is_new(self, save: SaveId, now: float) -> None:
        """Something of the save was digested, or has come here: it is sound."""
        if self._pace.bytes_per_s:
            self._new_at[save] = now

    def _items(self) -> dict[Item, Read]:
        """All that can be read, and how far it is."""
        slots = [s for s in self._node.slots if s.save is not None and s.digested and not (s.foreign or s.copied)]
        chunks = self._node.protection.chunks
        found = [
            *(Item(s.name, s.save, s.rank) for s in slots if s.save is not None),
            *(Item("", save, None, epoch) for save, epoch in chunks),
        ]
        self._new_at = {save: at for save, at in self._new_at.items() if any(item.save == save for item in found)}
        self._read = {item: self._read.get(item, Read(self._new_at.get(item.save))) for item in found}
        return self._read

    def _is_quiet(self) -> bool:
        node = self._node
        moves = node.fetching.saves or node.gathering.saves or node.pulled.saves
        waits = node.slot_retention.pending or node.loads.save or node.drain.save
        return not (moves or waits or node.protection.is_encoding)

    # --- what is read next

    def due(self) -> float | None:
        """When ``turn`` has something to do; None: an answer is waited for, or there is nothing to read."""
        if self.state is not None or not self._pace.bytes_per_s:
            return None
        first = min((due_at(read, self._every_s) for read in self._items().values()), default=None)
        return None if first is None else max(first, self._pace.free_at, self._not_before)

    def turn(self, now: float) -> list[Action]:
        """Something is due."""
        if not self._is_quiet():
            self._not_before = now + PAUSE_S
            return []
        item = next_of(self._items(), now, self._every_s)
        if item is None or not self._move(MemoryOn.DUE):
            return []
        place = self._read[item].place or Place(0, TAIL if item.name else 0)
        self._at = item, place
        return [ScrubBlock(job=self._job, name=item.name, save=item.save, epoch=item.epoch, block=place.block)]

    def _move(self, on: MemoryOn) -> bool:
        step = MEMORY_SCRUB.step(self.state, on)
        if step is None:
            return False
        self.state = step.after
        return True

    # --- what came of it

    def scrubbed(self, event: ev.BlockScrubbed, now: float) -> list[Action]:
        """A block was read."""
        if self._at is None or self.state is not MemoryScrubbing.READING:
            return []
        item, place = self._at
        self.nbytes += event.nbytes
        self._pace.took(event.nbytes, now)
        if event.gone or item not in self._items():
            self._go_on(item, None, now)
            return self._end(MemoryOn.GONE)
        if event.damage:
            return self._damaged(item, place, event.damage, now)
        if event.last:
            self.last = now
            self._findings.sound(item.tier, item.save, (item.rank,))
        self._go_on(item, None if event.last else place.block + 1, now)
        return self._end(MemoryOn.SOUND)

    def _go_on(self, item: Item, block: int | None, now: float) -> None:
        """block None: it is read to its end."""
        known = self._read.get(item, Read())
        self._read[item] = Read(now, None) if block is None else known._replace(place=Place(0, block))

    def _end(self, on: MemoryOn) -> list[Action]:
        self._move(on)
        self._at = None
        return []

    def _damaged(self, item: Item, place: Place, what: str, now: float) -> list[Action]:
        self._what = what
        if not item.name:
            actions = self._node.protection.make_again((item.save, item.epoch))
            return actions if actions and self._move(MemoryOn.COVERED) else self._lost(item, now)
        slot = self._slot(item)
        chunk = self._chunk_for(slot) if slot is not None else None
        if slot is None or chunk is None:
            return self._from_store(item, place, now)
        fetch = FetchSegment(
            job=self._job, rank=slot.rank, save=item.save, tier=Tier.REBUILT, seal=slot.seal, chunk=chunk,
            homes=tuple((seal.rank, column.node) for column in chunk.columns for seal in column.seals),
            chunks=tuple((member, column.node) for member, column in enumerate(chunk.columns)),
        )  # fmt: skip
        return [fetch] if self._move(MemoryOn.COVERED) else []

    def _slot(self, item: Item) -> Slot | None:
        return next((s for s in self._node.slots.holding(item.save) if s.name == item.name), None)

    def _chunk_for(self, slot: Slot) -> ParityChunk | None:
        """Parity from which the slot can be made again with what other nodes have, if these answer."""
        for (save, _), chunk in self._node.protection.chunks.items():
            covers = save == slot.save and any(slot.seal in column.seals for column in chunk.columns)
            if covers and {column.node for column in chunk.columns} <= self._links.up:
                return chunk
        return None

    def _from_store(self, item: Item, place: Place, now: float) -> list[Action]:
        """A block of an image may be on the store; the tail is not there in one piece."""
        if item.rank is None or place.block == TAIL:
            return self._lost(item, now)
        self._move(MemoryOn.STORED)
        return [CopyBlock(job=self._job, name=item.name, save=item.save, rank=item.rank, block=place.block)]

    def fetched(self, event: ev.SegmentFetched, now: float) -> list[Action]:
        """A segment was rebuilt; the node has put it in the damaged one's place."""
        self.is_new(event.save, now) if not event.problem else None
        if self._at is None or self.state is not MemoryScrubbing.REBUILDING:
            return []
        item, place = self._at
        if (event.save, event.rank) != (item.save, item.rank):
            return []
        if not event.problem:
            return self._mended(item, "the parity of its set")
        self._what = f"{self._what}; {event.problem}"
        return self._from_store(item, place, now) if item in self._items() else self._end(MemoryOn.GONE)

    def encoded(self, event: ev.Encoded, now: float) -> list[Action]:
        """Parity was made again, if that was what was waited for."""
        if self._at is None or self.state is not MemoryScrubbing.REBUILDING or self._at[0].name:
            return []
        item = self._at[0]
        if (event.save, event.epoch) != (item.save, item.epoch):
            return []
        if event.problem:
            self._what = f"{self._what}; {event.problem}"
            return self._lost(item, now)
        self.is_new(event.save, now)
        self._read.pop(item, None)
        return self._mended(item, "the segments of its set")

    def copied(self, event: ev.BlockCopied, now: float) -> list[Action]:
        """A block came from the store, or did not."""
        if self._at is None or self.state is not MemoryScrubbing.COPYING:
            return []
        item, place = self._at
        if item not in self._items():
            return self._end(MemoryOn.GONE)
        if event.problem:
            self._what = f"{self._what}; {event.problem}"
            return self._lost(item, now)
        self._go_on(item, place.block + 1, now)
        return self._mended(item, "the store")

    def _mended(self, item: Item, by: str) -> list[Action]:
        self._end(MemoryOn.MENDED)
        return self._say(item, by)

    def _lost(self, item: Item, now: float) -> list[Action]:
        """It is said, and looked at again with the next turn of all."""
        self._go_on(item, None, now)
        self._end(MemoryOn.LOST)
        return self._say(item, "")

    def _say(self, item: Item, by: str) -> list[Action]:
        return self._findings.say(
            ev.ScrubFound(
                job=self._job, save=item.save, tier=item.tier, rank=item.rank, what=self._what[:1000], mended=by
            )
        )

    def is_there(self, tier: Tier, save: SaveId, rank: int | None) -> bool:
        """Whether what was found damaged here still lies here."""
        return any((item.tier, item.save, item.rank) == (tier, save, rank) for item in self._items())
