"""From where each rank can have its segment of a save: its node's arena, a peer's, parity, the store. Pure."""

from collections.abc import Container, Iterable
from typing import NamedTuple

from ckptd.core import events as ev
from ckptd.core.coordinator.job_state import JobState
from ckptd.core.coordinator.save_record import Record
from ckptd.shared.base.ids import SaveId
from ckptd.shared.base.wording import named_ranks
from ckptd.shared.protocol.messages import Tier
from ckptd.shared.protocol.rank_sets import runs_of

Damage = set[tuple[SaveId, Tier, int]]
Fetches = dict[tuple[int, str], ev.FetchOrdered]  # by rank and node


class Anywhere(NamedTuple):
    """One node for each segment of a save. Those that no node has come by ``fetches``."""

    homes: dict[int, str]
    fetches: Fetches

    @property
    def holders(self) -> tuple[ev.Holder, ...]:
        """The same for an order."""
        ranks: dict[str, list[int]] = {}
        for rank, node in self.homes.items():
            ranks.setdefault(node, []).append(rank)
        return tuple(ev.Holder(node, runs_of(there)) for node, there in sorted(ranks.items()))


class Routes:
    """What the coordinator knows of segments and parity, asked rank by rank."""

    def __init__(self, facts: JobState) -> None:
        self._job, self._node = facts.job, facts.node
        self._saves, self._parity = facts, facts.chunks

    def candidates(self) -> set[SaveId]:
        """Saves that were whole in memory once, as far as is known, and of which something is left there."""
        records, pieced = self._saves.records.values(), self._parity.pieced
        return {r.save for r in records if r.held and (r.staged or r.save in pieced)}

    def outlived_a_node(self, save: SaveId) -> bool:
        """Whether a rank may have received protected or durable: nothing else survives the loss of a node."""
        return self.on_store(save) or save in self._parity.pieced

    def on_store(self, save: SaveId) -> bool:
        """Whether it is committed there, as far as is known."""
        return save in self._saves.on_store

    def home(self, rank: int) -> str:
        """The node where the rank runs now."""
        topology = self._saves.session.topology
        if topology is None:
            return self._node
        return topology.home(rank % len(topology.homes))

    def nodes(self, world_size: int) -> list[str]:
        """Where the ranks run now."""
        return sorted({self.home(rank) for rank in range(world_size)})

    def lies_at(self, save: SaveId, rank: int, node: str) -> bool:
        """Whether the node has the segment."""
        record = self._saves.records.get(save)
        return record is not None and node in record.held.get(rank, set())

    def has(self, save: SaveId, rank: int) -> bool:
        """Whether some node that answers has the segment."""
        record = self._saves.records.get(save)
        return record is not None and bool(record.held.get(rank, set()) & self._saves.links.up)

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

    def fetch(self, save: SaveId, rank: int, damaged: Damage, at: str = "") -> ev.FetchOrdered | None:
        """How the segment comes to the rank's node, or to another one: from another arena, or from parity."""
        record = self._saves.records.get(save)
        if record is None:
            return None
        others = (record.held.get(rank, set()) & self._saves.links.up) - {at or self.home(rank)}
        if others and (save, Tier.PEER, rank) not in damaged:
            return ev.FetchOrdered(
                job=self._job, node=self._node, rank=rank, save=save, tier=Tier.PEER, holder=min(others)
            )
        if (save, Tier.REBUILT, rank) in damaged:
            return None
        return self._parity.rebuild(record, rank, self._unreadable(record, damaged), self._saves.links.up)

    def anywhere(self, record: Record, damaged: Damage, moved: Container[tuple[SaveId, int, str]]) -> Anywhere | None:
        """Where each segment can be read from; None: some cannot be had. moved: what came in place of a damaged one."""
        found, save = Anywhere({}, {}), record.save
        for rank in range(record.world_size):
            home, there = self.home(rank), record.held.get(rank, set()) & self._saves.links.up
            if (save, Tier.PEER, rank) in damaged:
                there = {node for node in there if (save, rank, node) in moved}
            if there:
                found.homes[rank] = home if home in there else min(there)
            elif (fetch := self.fetch(save, rank, damaged)) is not None:
                found.fetches[rank, home] = fetch
            else:
                return None
        return found

    def missing_at_homes(self, record: Record, damaged: Damage) -> Fetches | None:
        """How segments come to the nodes where their ranks run, of those that are not there; None: some cannot."""
        found: Fetches = {}
        for rank in range(record.world_size):
            tier, fetch = self.tier(record.save, rank, damaged) or (Tier.PFS, None)
            if tier is Tier.PFS:
                return None
            if fetch is not None:
                found[rank, self.home(rank)] = fetch
        return found

    def missing_at(self, record: Record, wanted: Iterable[tuple[int, str]], damaged: Damage) -> Fetches | None:
        """How segments come to nodes, of those that are not there; None: some cannot. wanted: ranks and nodes."""
        found: Fetches = {}
        for rank, node in wanted:
            if self.lies_at(record.save, rank, node):
                continue
            fetch = self.fetch(record.save, rank, damaged, node)
            if fetch is None:
                return None
            found[rank, node] = fetch
        return found

    def why_not(self, save: SaveId, ranks: list[int]) -> str:
        """In words, why these ranks' segments cannot be had."""
        record = self._saves.records.get(save)
        held = {node for rank in ranks for node in (record.held.get(rank, set()) if record is not None else set())}
        silent = sorted(held - self._saves.links.up)
        where = f"; nodes that do not answer have some: {', '.join(silent[:8])}" if silent else ""
        if not held and save in self._saves.on_store:
            return "what lies on the store is damaged, and no node has it in memory"
        store = "what lies on the store is damaged" if save in self._saves.on_store else "it is not on the store"
        lost = f"no node that answers has what {named_ranks(ranks)} saved in its memory, or it is damaged there"
        return f"{lost}; {self._parity.bears(save)}; {store}{where}"

    def why_from_store(self, save: SaveId, ranks: list[int]) -> str:
        """In words, why memory that other ranks have was of no use to these; empty when there is none."""
        record = self._saves.records.get(save)
        if record is None or not record.held or not ranks:
            return ""
        lost = f"no node that answers has what {named_ranks(ranks)} saved in its memory, or it is damaged there"
        return f"{lost}; {self._parity.bears(save)}; read from the store"

    @staticmethod
    def _unreadable(record: Record, damaged: Damage) -> set[int]:
        return {rank for save, tier, rank in damaged if save == record.save and tier is not Tier.PFS}
