"""Segments in arenas that are not the job's, or of which it is not known: kept separate from its saves. Pure."""

from collections import defaultdict
from collections.abc import Container, Iterable

from ckptd.core.coordinator.lineage import Lineage
from ckptd.core.coordinator.protection_view import few_names
from ckptd.shared.base.ids import Run, SaveId

_MOST = 4  # runs named in one note


class Strangers:
    """By node, as the nodes have reported. What is not here is the job's."""

    def __init__(self, lineage: Lineage) -> None:
        self.lineage = lineage
        self._lie: dict[SaveId, dict[str, set[int]]] = {}  # save -> node -> ranks

    def heard(self, node: str, segments: Iterable[tuple[SaveId, int]]) -> None:
        """These strange segments, and no others, lie at the node."""
        for save in list(self._lie):
            self._lie[save].pop(node, None)
            if not self._lie[save]:
                del self._lie[save]
        for save, rank in segments:
            self.add(node, save, rank)

    def add(self, node: str, save: SaveId, rank: int) -> None:
        """One more lies at the node."""
        self._lie.setdefault(save, defaultdict(set))[node].add(rank)

    def released(self, node: str, save: SaveId, rank: int) -> None:
        """The node has given it up."""
        ranks = self._lie.get(save, {}).get(node, set())
        ranks.discard(rank)

    def known_nodes(self, nodes: Container[str]) -> None:
        """What lies elsewhere is out of reach."""
        for node in {n for by_node in self._lie.values() for n in by_node if n not in nodes}:
            self.heard(node, ())

    def disputed(self, step: int | None) -> list[SaveId]:
        """Saves, of this step if one is named, of which no record shows whether they are the job's."""
        lie = [save for save, nodes in self._lie.items() if any(nodes.values())]
        found = [save for save in lie if step is None or save.step == step]
        return [save for save in found if self.lineage.is_disputed(save)]

    @property
    def notes(self) -> list[str]:
        """One sentence for each run that left something here, for the user who loads."""
        runs: dict[Run, set[str]] = defaultdict(set)
        for save, nodes in self._lie.items():
            strange = not self.lineage.is_ours(save)
            runs[save.owner] |= {node for node, ranks in nodes.items() if ranks and strange}
        told = [(number, run, nodes) for (number, run), nodes in sorted(runs.items()) if nodes]
        return [
            f"node {few_names(sorted(nodes))}: segments of another run of this job (incarnation {number}, run "
            f"{run.hex()}) are set apart; load(run=...) restores them, ckptd forget gives their memory back"
            for number, run, nodes in told[:_MOST]
        ]
