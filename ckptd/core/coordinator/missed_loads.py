"""Which nodes and ranks have missed the end of a load, because a daemon ended in between. Pure."""

from ckptd.core import events as ev
from ckptd.core.actions import Action, ToNode
from ckptd.core.coordinator.job_state import JobState


class MissedLoads:
    """Nodes get it as soon as they report; ranks get it when they ask."""

    def __init__(self, facts: JobState) -> None:
        self._facts = facts
        self._incarnations: dict[str, int] = {}  # the largest that each node knows of
        self._ranks: set[int] = set()  # that came back from before the load that was agreed
        self._told: set[str] = set()  # nodes that missed the end of a load and received it since
        self._sent: ev.LoadOrdered | None = None  # all nodes that had reported were looked at for this one
        self._asked_here = False  # a rank has asked for a load since this daemon started

    def came_back(self, event: ev.NodeAttached) -> int:
        """Ranks of a node come back, some from before the last load: their daemon ended first. Returns its number."""
        agreed = self._facts.restore.agreed
        loaded = agreed.incarnation if agreed is not None else 0
        self._ranks |= {one.rank for one in event.waiting if 0 < one.incarnation < loaded}
        return loaded

    def new_session(self) -> None:
        """Loads of the one before concern no process any more."""
        self._ranks, self._told = set(), set()

    def asked(self, node: str, event: ev.LoadsAsked) -> list[Action] | None:
        """The answer to ranks whose load has ended already; None: they ask for a new one."""
        if event.again and node in self._told:
            return []  # it was answered before it was said again
        agreed = self._facts.restore.agreed
        if self._ranks.intersection(event.ranks) and agreed is not None:
            self._ranks.difference_update(event.ranks)
            return [ToNode(job=event.job, node=node, message=agreed)]
        self._asked_here |= not event.again
        return None

    def ended_before(self, event: ev.NodeHas) -> ev.LoadOrdered | None:
        """The load that a node's job began with, of which this daemon does not know, since it restarted."""
        agreed, session = self._facts.restore.agreed, self._facts.session.session
        if event.resumed is None or session not in ("", event.session):
            return None
        if agreed is not None and event.incarnation <= agreed.incarnation:
            return None
        return ev.LoadOrdered(
            job=event.job,
            node=self._facts.node,
            incarnation=event.incarnation,
            run=event.run,
            save=event.resumed,
            agreed=True,
        )

    def later(self, ended: ev.LoadOrdered) -> set[int]:
        """Ranks of nodes that know the incarnation it began: what they ask for is another one."""
        session = self._facts.session
        nodes = [node for node, number in self._incarnations.items() if number >= ended.incarnation]
        return {rank for node in nodes for rank in session.members.at(node)}

    @property
    def asked_here(self) -> bool:
        """Whether a rank has asked for a load since this daemon started."""
        return self._asked_here

    def catch_up(self, node: str, event: ev.NodeHas) -> list[Action]:
        """Sends the end of a load to nodes that missed it."""
        self._incarnations[node] = event.incarnation
        if (agreed := self._facts.restore.agreed) is None:
            return []
        known = self._incarnations if agreed is not self._sent else {node: event.incarnation}
        self._sent = agreed
        late = [n for n, number in known.items() if number < agreed.incarnation]
        late = [n for n in late if n in self._facts.session.nodes]
        self._told |= set(late)
        self._incarnations |= dict.fromkeys(late, agreed.incarnation)
        return [ToNode(job=event.job, node=n, message=agreed) for n in late]
