"""Processes of ranks that live, as their nodes report them. Pure."""

from ckptd.core import events as ev
from ckptd.core.links import Links

Key = tuple[int, str]  # rank, session


class Processes:
    """Of all sessions of a job. What lived at a node that does not answer is waited for by nobody."""

    def __init__(self, links: Links) -> None:
        self.unreachable = links.down
        self._found: dict[Key, tuple[str, ev.RankFound]] = {}  # with the node of each
        self._doubted: set[Key] = set()  # reported before the node's link came up again, and not since

    def found(self, node: str, event: ev.RankFound) -> None:
        """A live process of some session."""
        self._found[event.rank, event.session] = (node, event)
        self._doubted.discard((event.rank, event.session))

    def ended(self, rank: int, session: str) -> int:
        """The process ended. Returns its number, 0 if no node reported it."""
        _, found = self._found.pop((rank, session), ("", None))
        return found.pid if found is not None else 0

    def link_up(self, node: str) -> None:
        """Its reports may be out of date. It reports again which ranks live there; until then they count as alive."""
        self._doubted |= {key for key, (where, _) in self._found.items() if where == node}

    def confirm(self, node: str) -> None:
        """It has reported all its processes: those that it did not report since its link came up have ended."""
        for key in [key for key in self._doubted if key in self._found and self._found[key][0] == node]:
            del self._found[key]
            self._doubted.discard(key)

    def of(self, rank: int, session: str) -> ev.RankFound | None:
        """The living process of the rank."""
        return self._found.get((rank, session), ("", None))[1]

    def others(self, session: str) -> list[ev.RankFound]:
        """Those of other sessions whose nodes answer."""
        return [
            found for key, (node, found) in self._found.items() if key[1] != session and node not in self.unreachable
        ]

    def near(self, session: str | None = None) -> bool:
        """Whether any of the session, or of all sessions, lives at a node that answers."""
        return any(session in (None, key[1]) and node not in self.unreachable for key, (node, _) in self._found.items())

    @property
    def sessions(self) -> set[str]:
        """Those of which a process lives, whether its node answers or not."""
        return {session for _, session in self._found}
