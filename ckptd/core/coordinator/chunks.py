"""Which parity lies at which node, and what can be rebuilt from it: data and queries, no decisions. Pure."""

from collections.abc import Collection, Container, Iterable
from collections.abc import Set as AbstractSet

from ckptd.core import events as ev
from ckptd.core.coordinator.save_record import Record
from ckptd.core.redundancy_sets import recoverable
from ckptd.shared.base.ids import JobKey, SaveId
from ckptd.shared.format.schemes import Scheme
from ckptd.shared.protocol.messages import Tier

Key = tuple[SaveId, int]  # save, epoch
Group = tuple[int, Scheme, tuple[tuple[int, ...], ...]]  # epoch, scheme, ranks by member


class Chunks:
    """By node, as the nodes have reported; and by key, so that no question walks all nodes."""

    def __init__(self, job: JobKey, node: str) -> None:
        self._job = job
        self._node = node
        self._at: dict[str, dict[Key, ev.HeldChunk]] = {}
        self._holders: dict[Key, set[str]] = {}
        self._since: dict[str, int] = {}  # by node, the epoch in which the job first came to its arena
        self._index: dict[SaveId, dict[int, dict[Group, dict[int, set[str]]]]] = {}  # of _parity_of, made when asked

    # --- facts

    def found(self, node: str, chunks: Iterable[ev.HeldChunk], since: int) -> None:
        """These, and no others, lie at the node. since: when the job first came to its arena; 0: not known."""
        self._clear(node)
        self._since[node] = since
        for chunk in chunks:
            self.add(node, chunk)

    def add(self, node: str, chunk: ev.HeldChunk) -> None:
        """One more lies at the node."""
        key = (chunk.save, chunk.epoch)
        self._at.setdefault(node, {})[key] = chunk
        self._holders.setdefault(key, set()).add(node)
        self._index.pop(chunk.save, None)

    def drop(self, keys: Iterable[Key]) -> None:
        """These lie nowhere any more."""
        for key in list(keys):
            for node in self._holders.pop(key, ()):
                del self._at[node][key]
            self._index.pop(key[0], None)

    def known_nodes(self, nodes: Container[str]) -> None:
        """What lies elsewhere is out of reach."""
        for node in [node for node in self._at if node not in nodes]:
            self._clear(node)
        self._since = {node: since for node, since in self._since.items() if node in nodes}

    def _clear(self, node: str) -> None:
        for key in self._at.pop(node, {}):
            self._holders[key].discard(node)
            if not self._holders[key]:
                del self._holders[key]
            self._index.pop(key[0], None)

    # --- queries

    @property
    def keys(self) -> Collection[Key]:
        """Of which some chunk lies somewhere."""
        return self._holders.keys()

    @property
    def nodes(self) -> AbstractSet[str]:
        """That have some, as far as is known."""
        return self._at.keys()

    @property
    def pieced(self) -> set[SaveId]:
        """Saves of which some parity lies somewhere: they were staged by all their ranks."""
        return {save for save, _ in self._holders}

    @property
    def newest(self) -> dict[str, SaveId]:
        """By node, the newest that it has parity of."""
        return {node: max(held)[0] for node, held in self._at.items() if held}

    def of(self, node: str) -> list[Key]:
        """Of the node, the newest first."""
        return sorted(self._at.get(node, {}), reverse=True)

    def lies_at_all(self, key: Key, nodes: Collection[str]) -> bool:
        """Whether all of these nodes have their chunk."""
        holders = self._holders.get(key, set())
        return len(holders) >= len(nodes) and all(node in holders for node in nodes)

    def was_protected(self, key: Key, record: Record | None) -> bool:
        """Whether each member of its sets that is still there has its chunk.

        Then the save is as safe as it ever was, less the nodes that are lost.
        """
        covered: set[int] = set()
        holders = self._holders.get(key, set())
        sets = {chunk.members: chunk for node in holders for chunk in (self._at[node][key],)}
        for members, chunk in sets.items():
            missing = [node for node in members if node not in holders]
            if len(missing) <= chunk.scheme.losses and not any(self._survived(node, key[1]) for node in missing):
                covered |= {rank for ranks in chunk.ranks for rank in ranks}
        return record is not None and 0 < len(covered) == record.world_size

    def _survived(self, node: str, epoch: int) -> bool:
        """Whether the node's arena is the one that it had in that epoch."""
        return 0 < self._since.get(node, 0) <= epoch

    def rebuild(self, record: Record, rank: int, damaged: set[int], reachable: set[str]) -> ev.FetchOrdered | None:
        """How to rebuild the rank's segment without its own copy and those that are damaged; None: not at all."""
        for (epoch, scheme, ranks), holders in sorted(self._parity_of(record.save).get(rank, {}).items(), reverse=True):
            chunks = {index: min(able) for index, nodes in holders.items() if (able := nodes & reachable)}
            homes = {
                r: min(able)
                for members in ranks
                for r in members
                if r != rank and r not in damaged and (able := record.held.get(r, set()) & reachable)
            }
            column = next(i for i, members in enumerate(ranks) if rank in members)
            lost = {i for i, members in enumerate(ranks) if any(member not in homes for member in members)}
            missing = set(range(len(ranks))) - set(chunks)
            if chunks and recoverable(scheme, len(ranks), lost, missing, {column}):
                return ev.FetchOrdered(
                    job=self._job,
                    node=self._node,
                    rank=rank,
                    save=record.save,
                    tier=Tier.REBUILT,
                    holder=chunks[min(chunks)],
                    epoch=epoch,
                    homes=tuple((r, homes[r]) for i, m in enumerate(ranks) if i not in lost for r in m),
                    chunks=tuple(sorted(chunks.items())),
                )
        return None

    def recoverable(self, record: Record, reachable: set[str]) -> bool:
        """Whether all that is missing of the save can be rebuilt."""
        missing = set(range(record.world_size)) - record.held.keys()
        return all(self.rebuild(record, rank, set(), reachable) is not None for rank in missing)

    def _parity_of(self, save: SaveId) -> dict[int, dict[Group, dict[int, set[str]]]]:
        """By rank, the sets that encoded it, and which nodes have which member's chunk."""
        if save not in self._index:
            groups: dict[Group, dict[int, set[str]]] = {}
            keys = [key for key in self._holders if key[0] == save]
            held = [(node, self._at[node][key]) for key in keys for node in sorted(self._holders[key])]
            for node, chunk in held:
                group = groups.setdefault((chunk.epoch, chunk.scheme, chunk.ranks), {})
                group.setdefault(chunk.index, set()).add(node)
            index: dict[int, dict[Group, dict[int, set[str]]]] = {}
            for key, known in groups.items():
                for rank in (r for members in key[2] for r in members):
                    index.setdefault(rank, {})[key] = known
            self._index[save] = index
        return self._index[save]

    def bears(self, save: SaveId) -> str:
        """In words, what the parity of the save makes good for."""
        found = next(((key, min(nodes)) for key, nodes in self._holders.items() if key[0] == save), None)
        if found is None:
            return "no node that answers has parity of it"
        scheme = self._at[found[1]][found[0]].scheme
        nodes = "one node" if scheme.losses == 1 else f"{scheme.losses} nodes"
        return f"{scheme} makes good for {nodes} of a set"

    def check(self) -> None:
        """Asserts what must always hold."""
        by_key = {(node, key) for key, nodes in self._holders.items() for node in nodes}
        by_node = {(node, key) for node, held in self._at.items() for key in held}
        assert by_key == by_node, f"parity lies where it does not: {by_key ^ by_node}"  # noqa: S101
