"""Processes of ranks that live, as their nodes have named them, and which nodes answer. Pure."""

from ckptd.core import events as ev

Key = tuple[int, str]  # rank, session


class Processes:
    """Of all sessions of a job. What lived at a node that does not answer is waited for by nobody."""

    def __init__(self) -> None:
        self.unreachable: set[str] = set()  # nodes
        self._found: dict[Key, tuple[str, ev.RankFound]] = {}  # with the node of each
        self._doubted: set[Key] = set()  # named before the node's link came up anew, and not since

    def found(self, node: str, event: ev.RankFound) -> None:
        """A live process of some session."""
        self._found[event.rank, event.session] = (node, event)
        self._doubted.discard((event.rank, event.session))

    def ended(self, rank: int, session: str) -> int:
        """The process ended. Returns its number, 0 when nobody named it."""
        _, found = self._found.pop((rank, session), ("", None))
        return found.pid if found is not None else 0

    def link_up(self, node: str) -> None:
        """Whatever it said may be out of date: it says anew which ranks live there, and until then they count."""
        self.unreachable.discard(node)
        self._doubted |= {key for key, (where, _) in self._found.items() if where == node}

    def confirm(self, node: str) -> None:
        """It has said who lives there: whom it has not named since its link came up lives no more."""
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
