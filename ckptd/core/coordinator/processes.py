"""Processes of ranks that live, as their nodes report them. Pure."""

from collections.abc import Iterable

from ckptd.core import events as ev
from ckptd.core.links import Links

Key = tuple[int, str]  # rank, session


class Processes:
    """Of all sessions of a job. What lived at a node that does not answer is waited for by nobody."""

    def __init__(self, links: Links) -> None:
        self.unreachable = links.down
        self._living: dict[str, dict[int, tuple[str, ev.Living]]] = {}  # session -> rank -> node, process
        self._at: dict[str, set[Key]] = {}  # by node

    def report(self, node: str, living: Iterable[ev.Living]) -> None:
        """All processes that live at the node, in place of those that it reported before."""
        now = {(one.rank, one.session): one for one in living}
        for rank, session in self._at.get(node, set()) - now.keys():
            self._remove(rank, session, node)
        for (rank, session), one in now.items():
            before = self._living.setdefault(session, {}).get(rank)
            if before is not None and before[0] != node:
                self._at[before[0]].discard((rank, session))
            self._living[session][rank] = (node, one)
        self._at[node] = set(now)

    def ended(self, rank: int, session: str) -> int:
        """The process ended. Returns its number, 0 if no node reported it."""
        node, found = self._living.get(session, {}).get(rank, ("", None))
        if found is None:
            return 0
        self._remove(rank, session, node)
        self._at[node].discard((rank, session))
        return found.pid

    def _remove(self, rank: int, session: str, node: str) -> None:
        of_session = self._living.get(session, {})
        if rank in of_session and of_session[rank][0] == node:
            del of_session[rank]
            if not of_session:
                del self._living[session]

    def of(self, rank: int, session: str) -> ev.Living | None:
        """The living process of the rank."""
        return self._living.get(session, {}).get(rank, ("", None))[1]

    def others(self, session: str) -> list[ev.Living]:
        """Those of other sessions whose nodes answer."""
        others = [ranks for name, ranks in self._living.items() if name != session]
        return [found for ranks in others for node, found in ranks.values() if node not in self.unreachable]

    def near(self, session: str | None = None) -> bool:
        """Whether any of the session, or of all sessions, lives at a node that answers."""
        wanted = [ranks for name, ranks in self._living.items() if session in (None, name)]
        return any(node not in self.unreachable for ranks in wanted for node, _ in ranks.values())

    @property
    def sessions(self) -> set[str]:
        """Those of which a process lives, whether its node answers or not."""
        return set(self._living)
