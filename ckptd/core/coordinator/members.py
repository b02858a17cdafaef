"""The ranks of the session that is the job, by rank and by node. Pure."""

from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet


class Members(Mapping[int, str]):
    """rank -> node."""

    def __init__(self, homes: Mapping[int, str] | None = None) -> None:
        self._homes: dict[int, str] = {}
        self._at: dict[str, set[int]] = {}
        for rank, node in (homes or {}).items():
            self.add(rank, node)

    def add(self, rank: int, node: str) -> None:
        """The rank is in, at this node."""
        self.remove(rank)
        self._homes[rank] = node
        self._at.setdefault(node, set()).add(rank)

    def remove(self, rank: int) -> bool:
        """The rank is out. Returns whether it was in."""
        node = self._homes.pop(rank, None)
        if node is None:
            return False
        self._at[node].discard(rank)
        if not self._at[node]:
            del self._at[node]
        return True

    def at(self, node: str) -> AbstractSet[int]:
        """Ranks at the node."""
        return self._at.get(node, frozenset())

    @property
    def nodes(self) -> AbstractSet[str]:
        """Nodes with ranks."""
        return self._at.keys()

    def __getitem__(self, rank: int) -> str:
        return self._homes[rank]

    def __iter__(self) -> Iterator[int]:
        return iter(self._homes)

    def __len__(self) -> int:
        return len(self._homes)
