"""Processes of ranks that live, as their nodes report them. Pure."""

from collections import Counter, defaultdict

from ckptd.core import events as ev
from ckptd.core.links import Links

Key = tuple[int, str]  # rank, session


class Processes:
    """Of all sessions of a job. What lived at a node that does not answer is waited for by nobody."""

    def __init__(self, links: Links) -> None:
        self._links = links
        self._found: dict[Key, tuple[str, ev.RankFound]] = {}  # with the node of each
        self._at: defaultdict[str, set[Key]] = defaultdict(set)  # by node
        self._doubted: dict[str, set[Key]] = {}  # by node: reported before its link came up again, and not since
        self._living: Counter[str] = Counter()  # by session

    def found(self, node: str, event: ev.RankFound) -> None:
        """A live process of some session."""
        key = (event.rank, event.session)
        before, _ = self._found.get(key, ("", None))
        if before:
            self._at[before].discard(key)
            self._doubted.get(before, set()).discard(key)
        else:
            self._living[event.session] += 1
        self._found[key] = (node, event)
        self._at[node].add(key)

    def ended(self, rank: int, session: str) -> int:
        """The process ended. Returns its number, 0 if no node reported it."""
        key = (rank, session)
        node, found = self._found.pop(key, ("", None))
        if found is None:
            return 0
        self._at[node].discard(key)
        self._doubted.get(node, set()).discard(key)
        self._living[session] -= 1
        if not self._living[session]:
            del self._living[session]
        return found.pid

    def link_up(self, node: str) -> None:
        """Its reports may be out of date. It reports again which ranks live there; until then they count as alive."""
        self._doubted[node] = set(self._at[node])

    def confirm(self, node: str) -> None:
        """It has reported all its processes: those that it did not report since its link came up have ended."""
        for key in self._doubted.pop(node, set()):
            self.ended(*key)

    def of(self, rank: int, session: str) -> ev.RankFound | None:
        """The living process of the rank."""
        return self._found.get((rank, session), ("", None))[1]

    def others(self, session: str) -> list[ev.RankFound]:
        """Those of other sessions whose nodes answer."""
        if not self._living.keys() - {session}:
            return []
        down = self._links.down
        return [found for key, (node, found) in self._found.items() if key[1] != session and node not in down]

    def near(self, session: str | None = None) -> bool:
        """Whether any of the session, or of all sessions, lives at a node that answers."""
        if not self._living or (session is not None and session not in self._living):
            return False
        down = self._links.down
        return any(session in (None, key[1]) and node not in down for key, (node, _) in self._found.items())

    @property
    def sessions(self) -> set[str]:
        """Those of which a process lives, whether its node answers or not."""
        return set(self._living)
