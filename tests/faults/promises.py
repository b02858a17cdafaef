"""What a job was promised, and what of it a lost node takes away. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tests.faults.event_logs import Told
from tests.faults.verdicts import Saved

_SURVIVES = {"staged": 0, "protected": 1}  # so many lost nodes
_IN_MEMORY = {"arena", "peer", "rebuilt"}


@dataclass
class _Promise:
    saved: Saved
    spare: int


class Promises:
    """The newest checkpoint of each milestone that any rank was told of, and that must still be there."""

    def __init__(self) -> None:
        self._held: dict[str, _Promise] = {}
        self._durable: Saved | None = None

    def told(self, words: Iterable[Told]) -> None:
        """Milestones that ranks were told; before nodes_lost of the same time."""
        for word in sorted(words):
            saved = (word.run, word.step)
            if word.milestone == "durable":
                self._durable = max(saved, self._durable or saved)
            self._hold("staged", saved)
            if word.milestone == "protected":
                self._hold("protected", saved)

    def _hold(self, milestone: str, saved: Saved) -> None:
        held = self._held.get(milestone)
        if held is None or held.saved < saved:
            self._held[milestone] = _Promise(saved, _SURVIVES[milestone])

    def node_lost(self) -> None:
        """One, memory and all."""
        for milestone, held in list(self._held.items()):
            held.spare -= 1
            if held.spare < 0:
                del self._held[milestone]

    def loaded(self, saved: Saved, tiers: Sequence[str]) -> None:
        """A load gave this: what all ranks have in memory is staged again."""
        if set(tiers) <= _IN_MEMORY:
            self._hold("staged", saved)

    @property
    def durable(self) -> Saved | None:
        """The newest durable one."""
        return self._durable

    @property
    def floor(self) -> Saved | None:
        """No load may give an older one."""
        held = [promise.saved for promise in self._held.values()]
        return max([*held, *filter(None, [self._durable])], default=None)

    def __str__(self) -> str:
        held = [f"{milestone} {promise.saved}" for milestone, promise in self._held.items()]
        return ", ".join([*held, f"durable {self._durable}"])
