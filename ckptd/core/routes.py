"""From where each rank can have its segment of a save: its node's arena, a peer's, parity, the store. Pure."""

from ckptd.core import events as ev
from ckptd.core.encodes import Encodes
from ckptd.core.saves import Record, Saves
from ckptd.protocol.ids import JobKey, SaveId
from ckptd.protocol.messages import Tier

Damage = set[tuple[SaveId, Tier, int]]


class Routes:
    """What the coordinator knows of segments and parity, asked rank by rank."""

    def __init__(self, job: JobKey, saves: Saves, encodes: Encodes, node: str) -> None:
        self._job = job
        self._saves = saves
        self._encodes = encodes
        self._node = node

    def candidates(self) -> set[SaveId]:
        """Saves that may be had from memory: whole, or with parity for what is missing."""
        records = self._saves.records.values()
        pieced = self._encodes.pieced
        return {r.save for r in records if r.held and ((r.staged and r.in_memory) or r.save in pieced)}

    def home(self, rank: int) -> str:
        """The node where the rank runs now."""
        topology = self._encodes.topology
        if topology is None:
            return self._node
        return topology.home(rank % len(topology.homes))

    def has(self, save: SaveId, rank: int) -> bool:
        """Whether some node that answers has the segment."""
        record = self._saves.records.get(save)
        return record is not None and bool(record.held.get(rank, set()) & self._saves.reachable)

    def tier(self, save: SaveId, rank: int, damaged: Damage) -> tuple[Tier, ev.FetchOrdered | None] | None:
        """The nearest route by which the rank can have its own segment, and what must be fetched for it first."""
        record = self._saves.records.get(save)
        here = record is not None and self.home(rank) in record.held.get(rank, set())
        if here and (save, Tier.ARENA, rank) not in damaged:
            return Tier.ARENA, None
        fetch = self.fetch(save, rank, damaged)
        if fetch is not None:
            return fetch.tier, fetch
        if save in self._saves.on_store and (save, Tier.PFS, rank) not in damaged:
            return Tier.PFS, None
        return None

    def fetch(self, save: SaveId, rank: int, damaged: Damage) -> ev.FetchOrdered | None:
        """How the segment comes to the rank's node: from another arena, or from parity."""
        record = self._saves.records.get(save)
        if record is None:
            return None
        others = (record.held.get(rank, set()) & self._saves.reachable) - {self.home(rank)}
        if others and (save, Tier.PEER, rank) not in damaged:
            return ev.FetchOrdered(
                job=self._job, node=self._node, rank=rank, save=save, tier=Tier.PEER, holder=min(others)
            )
        if (save, Tier.REBUILT, rank) in damaged:
            return None
        return self._encodes.rebuild(record, rank, self._unreadable(record, damaged), self._saves.reachable)

    def why_not(self, save: SaveId, rank: int, damaged: Damage) -> str:
        """Why no node's memory gives the rank's segment; empty when nothing of the save lies in memory anywhere."""
        record = self._saves.records.get(save)
        if record is None or not record.held or not (self._encodes.on or save in self._encodes.pieced):
            return ""
        return self._encodes.why_not(record, rank, self._unreadable(record, damaged), self._saves.reachable)

    @staticmethod
    def _unreadable(record: Record, damaged: Damage) -> set[int]:
        return {rank for save, tier, rank in damaged if save == record.save and tier is not Tier.PFS}
