"""Which nodes and ranks have missed the end of a load, because a daemon ended in between. Pure."""

from collections.abc import Container

from ckptd.core import events as ev


class MissedLoads:
    """Nodes are told as soon as they are heard of; ranks are told when they ask."""

    def __init__(self) -> None:
        self._incarnations: dict[str, int] = {}  # the largest that each node knows of
        self.ranks: set[int] = set()  # that came back from before the load that was agreed
        self.told: set[str] = set()  # nodes that missed the end of a load and heard it since

    def new_session(self) -> None:
        """Loads of the one before concern nobody any more."""
        self.ranks, self.told = set(), set()

    def behind(
        self, node: str, incarnation: int, agreed: ev.LoadOrdered | None, nodes: Container[str]
    ) -> list[tuple[str, ev.LoadOrdered]]:
        """The node knows this incarnation. Which nodes of the job are to be told how the last load ended."""
        self._incarnations[node] = incarnation
        if agreed is None:
            return []
        late = [n for n, number in self._incarnations.items() if number < agreed.incarnation and n in nodes]
        self.told |= set(late)
        self._incarnations |= dict.fromkeys(late, agreed.incarnation)
        return [(n, agreed) for n in late]


def agreed_by(event: ev.NodeHas, coordinator: str) -> ev.LoadOrdered:
    """The end of a load, as a node remembers it that has heard it."""
    return ev.LoadOrdered(
        job=event.job,
        node=coordinator,
        incarnation=event.incarnation,
        run=event.run,
        save=event.resumed,
        agreed=True,
    )
