"""What ranks were told of the end of each of their saves, kept longer than a handle is."""

from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from ckptd.shared.base.ids import SaveId
from ckptd.shared.protocol.messages import End

if TYPE_CHECKING:
    from tests.simulation.ranks import Proc

Entry = tuple[str, int, SaveId]  # session, rank, save


class Book:
    """Every save of every rank, and the ends that it heard, each once, in the order in which they came."""

    def __init__(self) -> None:
        self._ends: defaultdict[Entry, list[str]] = defaultdict(list)

    def begun(self, proc: "Proc", save: SaveId) -> None:
        """The rank saves."""
        self._ends[proc.session.name, proc.rank, save] = []

    def ended(self, proc: "Proc", save: SaveId, end: str) -> None:
        """The rank's handle says so."""
        heard = self._ends[proc.session.name, proc.rank, save]
        if end not in heard[-1:]:
            heard.append(end)

    def of_session(self, session: str) -> dict[Entry, list[str]]:
        """Entries of one session."""
        return {entry: ends for entry, ends in self._ends.items() if entry[0] == session}

    def totals(self) -> Counter[str]:
        """How many saves ended how, as rank 0 heard it last; what nothing was heard of is ``open``."""
        return Counter(ends[-1] if ends else "open" for (_, rank, _), ends in self._ends.items() if rank == 0)


def is_one_end(ends: list[str]) -> bool:
    """Whether a save ended once. What was kept, or given up, may be drained when it is asked for again; and what was
    superseded may turn out to lie on the store, because its commit was made and the answer lost.
    """
    known = [end for end in ends if end in set(End)]
    again = len(ends) == 2 and ends[0] in (End.KEPT, End.FAILED) and ends[1] in (End.DURABLE, End.SUPERSEDED)
    found = ends == [End.SUPERSEDED, End.DURABLE]
    return known == ends and (len(ends) == 1 or again or found)
