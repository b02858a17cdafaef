"""This node's parity of the save that is drained, written to the store beside the images. Pure.

The vote names it. A vote without parity is a whole vote, so nothing waits for it longer than ``wait_s``, nor at all
once it is known not to come. While it is copied the chunk stays in the arena, whatever is protected meanwhile.
"""

from ckptd.core import events as ev
from ckptd.core.actions import Action, DrainParity, Note
from ckptd.core.node.parity import Protection
from ckptd.shared.base.ids import JobKey, SaveId, StoreId
from ckptd.shared.format.manifest import ParityRecord
from ckptd.shared.format.schemes import Scheme


class ParityShare:
    """``on``: whether parity is drained at all. wait_s: how long a vote that is due otherwise waits for it."""

    def __init__(self, job: JobKey, protection: Protection, *, on: bool, wait_s: float) -> None:
        self._job = job
        self._protection = protection
        self._on = on
        self._wait_s = wait_s
        self._save: SaveId | None = None  # being drained
        self._store_id = ""  # to this store
        self._over = False  # nothing more is to come of it
        self._waiting = False  # the vote is due but for it
        self._since: float | None = None  # when that was first seen
        self.record: ParityRecord | None = None  # of what lies on the store, for the vote

    def begin(self, save: SaveId, store_id: StoreId) -> list[Action]:
        """The save is drained to this store from now on."""
        self._store_id = store_id
        if save != self._save or self._protection.has(save):
            self._save, self.record = save, None  # again, though it lies there: a copy that is found is not repeated
        self._over, self._waiting, self._since = not self._on, False, None
        return self.advance()

    def advance(self) -> list[Action]:
        """Copies the chunk, once it is sealed."""
        save, protection = self._save, self._protection
        if self._over or save is None or self.record is not None or protection.copying is not None:
            return []
        keys = [key for key in protection.chunks if key[0] == save]
        if not keys:
            return []
        protection.copying = max(keys)
        return [DrainParity(job=self._job, store_id=self._store_id, save=save, epoch=protection.copying[1])]

    def copied(self, event: ev.ParityDrained) -> list[Action]:
        """It lies on the store, synced, or why not. ``vote`` may be due now."""
        actions: list[Action] = list(self._protection.copied())
        if event.problem:
            text = f"{event.save} is drained without this node's parity: {event.problem}"
            actions.append(Note(job=self._job, text=text))
        if event.save == self._save:
            self.record, self._over = event.parity, True
        return [*actions, *self.advance()]

    def failed(self, save: SaveId | None = None) -> bool:
        """The encode of the save (none: of whatever runs) has failed. Whether a vote that waited is due now."""
        copying = self._protection.copying is not None
        if save in (None, self._save) and not copying:
            self._over = self._over or not self._protection.has(self._save)
        return self._waiting and self._over

    def is_of_set(self, node: str) -> bool:
        """Whether parity of this node is made with that one."""
        return node in self._protection.members

    def settled(self) -> bool:
        """Whether the vote need not wait. To be asked when it is due otherwise."""
        self._waiting = not (self._over or self.record is not None or not self._may_come())
        return not self._waiting

    def _may_come(self) -> bool:
        protection, save = self._protection, self._save
        if save is None:
            return False
        if (protection.copying is not None and protection.copying[0] == save) or protection.has(save):
            return True
        later = [key[0] for key in (protection.ordered, protection.newest) if key is not None]
        return protection.scheme is not Scheme.NONE and not any(save < other for other in later)

    def next_deadline(self) -> float | None:
        """When a vote has waited long enough; at once while it is not known since when it waits."""
        if not self._waiting:
            return None
        return 0.0 if self._since is None else self._since + self._wait_s

    def late(self, now: float) -> bool:
        """Whether a vote has waited long enough: it goes without parity."""
        if not self._waiting:
            return False
        self._since = now if self._since is None else self._since
        self._over = now - self._since >= self._wait_s
        return self._over
