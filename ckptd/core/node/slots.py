"""The slots of one job on one node: which rank may write which, which hold what, which can be had again. Pure."""

from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass

from ckptd.core.actions import Action, AllocateSlots, FreeSlot, TakeDigests, UnlinkSlot
from ckptd.core.events import SegmentFetched, SegmentsStaged, SegmentStaged, SlotAdopted
from ckptd.shared.base.ids import JobKey, Run, SaveId
from ckptd.shared.format.replica_attestations import Attestation
from ckptd.shared.format.slot import Seal
from ckptd.shared.protocol.node_messages import StagedSegment


@dataclass(slots=True)
class Slot:
    """One slot file. It is held (has a save), granted (a rank may write it), or idle."""

    name: str
    rank: int
    capacity: int
    granted: bool = False
    save: SaveId | None = None
    world_size: int = 1
    nbytes: int = 0
    attestations: tuple[Attestation, ...] = ()
    seal: Seal | None = None  # once its digests are taken
    unreadable: str = ""  # why its digests cannot be taken
    offered: bool = False  # an allocation that is on its way counts its memory as free
    unsure: bool = False  # a rank may have sealed it since it was last known to be free
    copied: bool = False  # of a rank of another node, for one load: goes once that or another ends well
    reported: bool = False  # copied, and the coordinator knows
    foreign: bool = False  # holds a segment of a run that is not the job's: neither reused nor freed with its saves

    @property
    def digested(self) -> bool:
        """Whether the digest of every block is sealed in it."""
        return self.seal is not None


class SlotTable:
    """Slots by name and demands by rank. Methods return the actions that make the change real."""

    def __init__(self, job: JobKey, slots_per_rank: int) -> None:
        self._job = job
        self._per_rank = slots_per_rank
        self._slots: dict[str, Slot] = {}
        self._demands: dict[int, int] = {}  # rank -> capacity that it asked for
        self._allocating: dict[int, int] = {}  # rank -> slots on their way, also those that a former one asked for

    def __bool__(self) -> bool:
        return bool(self._slots)

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._slots.values())

    def of_rank(self, rank: int) -> list[Slot]:
        """Slots that belong to a rank, but for those of foreign runs: they count beside its share."""
        return [slot for slot in self._slots.values() if slot.rank == rank and not slot.foreign]

    def holding(self, save: SaveId) -> list[Slot]:
        """Slots that hold a segment of the save, by rank."""
        return sorted((s for s in self._slots.values() if s.save == save), key=lambda s: s.rank)

    def adopt(self, event: SlotAdopted) -> SegmentsStaged | None:
        """Takes a slot file found at start into the table. Returns the report of it, if it holds a save."""
        save = event.save if event.rank < event.world_size else None  # no checkpoint has such a rank
        self._slots[event.slot] = Slot(
            event.slot,
            event.rank,
            event.capacity,
            save=save,
            world_size=event.world_size,
            nbytes=event.nbytes,
            attestations=event.attestations,
            seal=event.seal,
            unsure=True,
        )
        if save is None:
            return None
        segments = (StagedSegment(event.rank, event.nbytes, event.attestations),)
        return SegmentsStaged(job=self._job, save=save, world_size=event.world_size, segments=segments)

    def fetched(self, event: SegmentFetched, seal: Seal, *, copied: bool = False) -> list[Action]:
        """Takes a segment that came from elsewhere, in place of a copy that cannot be read, if there was one."""
        others = [
            slot for slot in self.holding(event.save) if slot.name != event.slot
        ]  # it may lie in this one already
        replaced = [slot for slot in others if slot.rank == event.rank]
        self._slots[event.slot] = Slot(
            event.slot,
            event.rank,
            event.capacity,
            save=event.save,
            world_size=seal.world_size,
            nbytes=seal.image_nbytes,
            attestations=seal.attestations,
            seal=seal,
            unsure=True,
            copied=copied,
        )
        actions: list[Action] = []
        for slot in replaced:
            actions += self.free(slot)
            actions += self._unlink(slot) if len(self.of_rank(slot.rank)) > self._per_rank else []
        return actions

    def drop_copies(
        self, needed: Container[SaveId], drained: Container[Slot], released: Callable[[int, SaveId], None]
    ) -> list[Action]:
        """Unlinks what was copied for loads that are over, all but needed. released: notes what was reported."""
        copies = [slot for slot in self._slots.values() if slot.copied]
        over = [slot for slot in copies if slot.save not in needed and slot not in drained]
        for slot in over:
            if slot.reported and slot.save is not None:
                released(slot.rank, slot.save)
        return [action for slot in over for action in self._unlink(slot)]

    @property
    def foreign(self) -> list[Slot]:
        """Slots that hold segments of runs that are not the job's."""
        return [slot for slot in self._slots.values() if slot.foreign]

    def mark_foreign(self, runs: Container[Run]) -> set[SaveId]:
        """Isolates what these runs left, and takes back what is the job's after all: those saves are returned."""
        back: set[SaveId] = set()
        for slot in self._slots.values():
            foreign = slot.save is not None and slot.save.owner in runs
            back |= {slot.save} if slot.save is not None and slot.foreign and not foreign else set()
            slot.foreign = foreign
        return back

    def drop_foreign(self, runs: Container[Run]) -> list[Action]:
        """Gives up what these foreign runs left."""
        gone = [slot for slot in self.foreign if slot.save is not None and slot.save.owner in runs]
        return [action for slot in gone for action in self._unlink(slot)]

    def demand(self, rank: int, capacity: int) -> list[Action]:
        """The rank wants slots of this capacity and has given back what was granted to it."""
        self._demands[rank] = capacity
        for slot in self.of_rank(rank):
            slot.unsure |= slot.granted
            slot.granted = False
        return self.provision(rank)

    def provision(self, rank: int) -> list[Action]:
        """Asks for as many slots as the rank is short of.

        Idle ones that are too small stay until it is known that the new ones fit: else a state that was too large would
        leave the rank without the slots of those before it.
        """
        capacity = self._demands.get(rank)
        if capacity is None:
            return []
        allocating = self._allocating.get(rank, 0)
        missing = self._missing(rank) - allocating
        if missing > 0:
            self._allocating[rank] = allocating + missing
            instead = tuple(slot.name for slot in self._outgrown(rank) if not slot.offered)
            for name in instead:
                self._slots[name].offered = True
            return [AllocateSlots(job=self._job, rank=rank, count=missing, capacity=capacity, instead=instead)]
        return [] if allocating else self._give_way(rank)

    def fit(self, rank: int) -> list[Action]:
        """There is room for the larger slots. Smaller ones that the rank wants again stay, and may be offered again."""
        self._offers_end(rank)
        return self._give_way(rank)

    def _give_way(self, rank: int) -> list[Action]:
        """Unlinks the rank's idle slots that are too small, and those beyond its share.

        The larger ones are there, or fit for sure. A daemon that died while it made these left both kinds.
        """
        return [action for slot in (*self._outgrown(rank), *self._surplus(rank)) for action in self._unlink(slot)]

    def asks(self, rank: int) -> bool:
        """Whether the rank has asked for slots, so that what it has is no more than its share."""
        return rank in self._demands

    def _surplus(self, rank: int) -> list[Slot]:
        capacity = self._demands.get(rank)
        if capacity is None:  # it may still be writing to one that an earlier daemon granted
            return []
        idle = [s for s in self.of_rank(rank) if s.save is None and not s.granted and s.capacity >= capacity]
        return idle[: max(0, self.fitting(rank) - self._per_rank)]

    def _outgrown(self, rank: int) -> list[Slot]:
        capacity = self._demands.get(rank, 0)
        return [s for s in self.of_rank(rank) if s.save is None and not s.granted and s.capacity < capacity]

    def _missing(self, rank: int) -> int:
        """How many the rank is short of its share."""
        return self._per_rank - self.fitting(rank)

    def fitting(self, rank: int) -> int:
        """How many of its share the rank has, not counting what is idle and too small for it."""
        return len(self.of_rank(rank)) - len(self._outgrown(rank))

    def ready(self, name: str, rank: int, capacity: int) -> list[Action]:
        """An allocation ended well. A slot nobody wants any more is unlinked at once."""
        self._arrived(rank, 1)
        if rank not in self._demands or self._missing(rank) <= 0:
            return [UnlinkSlot(job=self._job, slot=name), *self.provision(rank)]
        self._slots[name] = Slot(name, rank, capacity)
        return self.provision(rank)

    def failed(self, rank: int, count: int) -> None:
        """count allocations ended without a slot; they are asked for again when the rank asks again."""
        self._arrived(rank, count)
        self._offers_end(rank)

    def _offers_end(self, rank: int) -> None:
        for slot in self.of_rank(rank):
            slot.offered = False

    def _arrived(self, rank: int, count: int) -> None:
        self._allocating[rank] = max(0, self._allocating.get(rank, 0) - count)

    @property
    def awaited(self) -> tuple[int, ...]:
        """Ranks that asked for slots, have none granted, and for which some are on their way."""
        asking = {rank for rank in self._demands if self._allocating.get(rank, 0) > 0}
        granted = {slot.rank for slot in self._slots.values() if slot.granted} if asking else set()
        return tuple(sorted(asking - granted))

    def coming(self, rank: int) -> int:
        """Slots the rank can count on: all of its share but those that hold a save."""
        return self._per_rank - sum(slot.save is not None for slot in self.of_rank(rank))

    def grantable(self, rank: int) -> list[Slot]:
        """Marks the rank's idle slots of sufficient size granted, and returns them."""
        capacity = self._demands.get(rank)
        if capacity is None:
            return []
        idle = [s for s in self.of_rank(rank) if s.save is None and not s.granted and s.capacity >= capacity]
        for slot in idle:
            slot.granted = True
        return idle

    def hold(self, event: SegmentStaged) -> str:
        """The slot holds the save now. Returns why not, if it cannot; empty when it does (also when it did already)."""
        slot = self._slots.get(event.slot)
        if slot is None or slot.rank != event.rank:
            return f"slot {event.slot} does not belong to rank {event.rank}"
        if slot.save == event.save:
            return ""
        if slot.save is not None:
            return f"slot {event.slot} still holds {slot.save}"
        if event.rank >= event.world_size:
            return f"slot {event.slot} is of rank {event.rank}, and says that the job has {event.world_size} ranks"
        if others := [other for other in self.holding(event.save) if other.world_size != event.world_size]:
            said = f"rank {others[0].rank} says that {event.save} has {others[0].world_size} ranks"
            return f"{said}, rank {event.rank} that it has {event.world_size}"
        if any(other.save == event.save for other in self.of_rank(event.rank)):
            return f"another slot of rank {event.rank} holds {event.save} already"
        slot.granted, slot.save, slot.nbytes, slot.seal = False, event.save, event.nbytes, None
        slot.world_size, slot.attestations = event.world_size, event.attestations
        return ""

    def digests_due(self) -> list[Action]:
        """A digest for every held slot that has none; asked once, when the slot is taken over or adopted."""
        return [
            TakeDigests(job=self._job, slot=s.name, save=s.save)
            for s in self._slots.values()
            if s.save is not None and not s.digested
        ]

    def digested(self, name: str, save: SaveId, seal: Seal) -> bool:
        """Notes that the slot's digests are sealed; False when it holds something else by now."""
        slot = self._slots.get(name)
        if slot is None or slot.save != save:
            return False
        slot.seal = seal
        return True

    def free(self, slot: Slot) -> list[Action]:
        """The slot's save is needed no more."""
        slot.save, slot.nbytes, slot.seal, slot.unsure, slot.unreadable = None, 0, None, False, ""
        return [FreeSlot(job=self._job, slot=slot.name)]

    def trim(self, first_rank: int = 0) -> list[Action]:
        """Unlinks the idle slots of ranks from first_rank on that ask for none."""
        idle = [
            s
            for s in self._slots.values()
            if s.rank >= first_rank and s.save is None and not s.granted and s.rank not in self._demands
        ]
        return [action for slot in idle for action in self._unlink(slot)]

    def trim_moved(self, here: Container[int]) -> list[Action]:
        """Unlinks the idle slots of ranks that run elsewhere."""
        idle = [s for s in self._slots.values() if s.rank not in here and s.save is None and not s.granted]
        return [action for slot in idle if slot.rank not in self._demands for action in self._unlink(slot)]

    def rank_left(self, rank: int, *, writer_gone: bool) -> list[Action]:
        """The rank's demand and grants end. A writer that may still live keeps its mapping of an unlinked file.

        Not only what is granted goes then: what a former daemon granted looks idle after a restart.
        """
        self._demands.pop(rank, None)
        actions: list[Action] = []
        for slot in self.of_rank(rank):
            slot.unsure |= slot.granted
            slot.granted = False
            if not writer_gone and slot.save is None:
                actions += self._unlink(slot)
        return actions

    def _unlink(self, slot: Slot) -> list[Action]:
        del self._slots[slot.name]
        return [UnlinkSlot(job=self._job, slot=slot.name)]

    def check(self) -> None:
        """Asserts what must always hold."""
        for slot in self._slots.values():
            assert not (slot.granted and slot.save is not None), f"{slot} is granted and held"  # noqa: S101
            assert slot.save is not None or not slot.digested, f"{slot} has digests of nothing"  # noqa: S101
