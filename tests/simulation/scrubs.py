"""Bits that flip in memory and on stores, what scrubs make of them, and that they raise no alarm for anything else.

Only scrubs see the damage: to ranks, drains and encodes it is as if they had read before the bit flipped.
"""

from random import Random
from typing import TYPE_CHECKING, Any

from ckptd.core import actions as act
from ckptd.shared.base.ids import JobKey, SaveId
from ckptd.shared.format.slot import SlotState
from ckptd.shared.protocol import journal as log
from ckptd.shared.protocol.messages import Tier
from ckptd.shared.protocol.scrubbing import Harm

if TYPE_CHECKING:
    from tests.simulation.arena import SlotFile
    from tests.simulation.machine import Machine
    from tests.simulation.world import World

_IMAGE = 0  # the block of an image; what stands before it is the tail


class Scrubs:
    """``every_s``: seconds between two bits that flip, on average; 0: none does. Raises AssertionError for an alarm."""

    def __init__(self, world: "World", every_s: float) -> None:
        self._world, self._every_s = world, every_s
        self._random = Random(f"{world.seed}/scrubs")
        self._slots: set[tuple[str, JobKey, str, SaveId]] = set()  # arena, job, slot and save in it
        self._images: set[tuple[JobKey, SaveId, int]] = set()  # on the store
        self._ever: set[tuple[Tier, int, int]] = set()  # step and rank

    def begin(self) -> None:
        """The first is a while from now."""
        if self._every_s:
            self._world.clock.after(self._random.expovariate(1 / self._every_s), self._flip)

    def stop(self) -> None:
        """No more of them flip."""
        self._every_s = 0.0

    def _flip(self) -> None:
        if not self._every_s:
            return
        if self._random.random() < 0.5:
            self._flip_in_memory()
        else:
            self._flip_on_store()
        self.begin()

    def _flip_in_memory(self) -> None:
        found = [
            (machine, job, slot)
            for machine in self._world.nodes.values()
            for job, memory in machine.arena.jobs.items()
            for slot in memory.slots.values()
            if slot.save is not None and slot.seal.state is SlotState.DIGESTED
        ]
        if found:
            machine, job, slot = self._random.choice(found)
            assert slot.save is not None
            self._world.counts["bits flipped in memory"] += 1
            self._slots.add((machine.arena.ident, job, slot.name, slot.save))
            self._ever.add((Tier.ARENA, slot.save.step, slot.rank))

    def _flip_on_store(self) -> None:
        job, store = self._random.choice(list(self._world.stores.items()))
        if store.committed:
            save = self._random.choice(sorted(store.committed))
            rank = self._random.randrange(store.committed[save].world_size)
            self._world.counts["bits flipped on the store"] += 1
            self._images.add((job, save, rank))
            self._ever.add((Tier.PFS, save.step, rank))

    # --- what becomes of them

    def on_record(self, entry: log.Damaged) -> None:
        """What a node's scrub found."""
        self._world.counts[f"scrubs: {entry.tier} made good from {entry.mended or 'nothing'}"] += 1
        assert (entry.tier, entry.step, entry.rank) in self._ever, f"no bit of this flipped: {entry}"

    def rebuilt(self, machine: "Machine", job: JobKey, slot: "SlotFile") -> None:
        """All bytes of the slot were written again."""
        if slot.save is not None:
            self._slots.discard((machine.arena.ident, job, slot.name, slot.save))

    # --- effects: what an action comes to

    def block(self, machine: "Machine", action: act.ScrubBlock) -> dict[str, Any]:
        """Of BlockScrubbed."""
        if not action.name:
            there = (action.save, action.epoch) in machine.arena.job(action.job).chunks
            return {"nbytes": 10, "last": True, "gone": not there}
        slot = machine.arena.slot(action.job, action.name)
        if slot is None or slot.save != action.save or slot.seal.state is not SlotState.DIGESTED:
            return {"gone": True}
        image = action.block == _IMAGE
        bad = image and (machine.arena.ident, action.job, action.name, action.save) in self._slots
        return {"nbytes": 10, "last": image, "damage": "a bit flipped" if bad else ""}

    def copy(self, machine: "Machine", action: act.CopyBlock) -> dict[str, Any]:
        """Of BlockCopied."""
        slot, store = machine.arena.slot(action.job, action.name), self._world.store(action.job)
        if slot is None or slot.save != action.save:
            return {"problem": "the slot holds something else"}
        if action.save not in store.committed or (action.job, action.save, action.rank) in self._images:
            return {"problem": "the store does not have it"}
        self.rebuilt(machine, action.job, slot)
        return {}

    def piece(self, _machine: "Machine", action: act.ScrubPiece) -> dict[str, Any]:
        """Of PieceScrubbed."""
        if action.save not in self._world.store(action.job).committed:
            return {"gone": True}
        bad = sorted(rank for job, save, rank in self._images if (job, save) == (action.job, action.save))
        return {"nbytes": 10, "harms": tuple(Harm(f"rank {rank}", "a bit flipped", rank) for rank in bad)}

    def mend(self, machine: "Machine", action: act.Mend) -> dict[str, Any]:
        """Of MendEnded."""
        lost, made = list(action.ranks), []
        for rank, name in action.slots:
            slot = machine.arena.slot(action.job, name)
            bad = (machine.arena.ident, action.job, name, action.save) in self._slots
            if slot is not None and slot.save == action.save and not bad:
                self._images.discard((action.job, action.save, rank))
                lost.remove(rank)
                made.append(rank)
        return {"lost": tuple(lost), "memory": tuple(made), "problem": "no memory has it" if lost else ""}
