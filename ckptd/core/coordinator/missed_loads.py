"""Which nodes and ranks have missed the end of a load, because a daemon ended in between. Pure."""

from ckptd.core import events as ev
from ckptd.core.actions import Action, ToNode
from ckptd.core.coordinator.restores import Restores
from ckptd.core.coordinator.sessions import Sessions


class MissedLoads:
    """Nodes get it as soon as they report; ranks get it when they ask."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._incarnations: dict[str, int] = {}  # the largest that each node knows of
        self.ranks: set[int] = set()  # that came back from before the load that was agreed
        self.told: set[str] = set()  # nodes that missed the end of a load and received it since
        self._sent: ev.LoadOrdered | None = None  # all nodes that had reported were looked at for this one
        self.asked_here = False  # a rank has asked for a load since this daemon started

    def new_session(self) -> None:
        """Loads of the one before concern nobody any more."""
        self.ranks, self.told = set(), set()

    def catch_up(self, node: str, event: ev.NodeHas, restores: Restores, sessions: Sessions) -> list[Action]:
        """Sends the end of a load to a node that missed it; takes it from one, if this daemon has restarted since."""
        ours = event.resumed is not None and sessions.session in ("", event.session)
        if ours and (restores.agreed is None or event.incarnation > restores.agreed.incarnation):
            restores.agreed = ev.LoadOrdered(
                job=event.job,
                node=self._node,
                incarnation=event.incarnation,
                run=event.run,
                save=event.resumed,
                agreed=True,
            )
            if not self.asked_here:
                restores.forget_round()
        self._incarnations[node] = event.incarnation
        if (agreed := restores.agreed) is None:
            return []
        known = self._incarnations if agreed is not self._sent else {node: event.incarnation}
        self._sent = agreed
        late = [n for n, number in known.items() if number < agreed.incarnation]
        late = [n for n in late if n in sessions.nodes]
        self.told |= set(late)
        self._incarnations |= dict.fromkeys(late, agreed.incarnation)
        return [ToNode(job=event.job, node=n, message=agreed) for n in late]
