"""The file system that all nodes share: what one job's directory on it holds. Each call is one step."""

import hashlib
from dataclasses import dataclass, field

from ckptd.core import events as ev
from ckptd.shared.base.ids import SaveId, not_behind


def run_of(session: str, at_least: int) -> bytes:
    """The run id that the world draws when a number is asked for."""
    return hashlib.blake2b(f"{session} {at_least}".encode(), digest_size=16).digest()


class StoreError(Exception):
    """The call failed, and says why."""


@dataclass(slots=True)
class Directory:
    """A partial or committed checkpoint: what each rank's file holds, and who voted for which ranks."""

    world_size: int = 0
    files: dict[int, bytes] = field(default_factory=dict)
    votes: dict[str, tuple[int, tuple[int, ...]]] = field(default_factory=dict)  # node -> (world size, ranks)

    @property
    def missing(self) -> str:
        """Why it cannot be committed, empty when it can."""
        worlds = {world for world, _ in self.votes.values()}
        ranks = [rank for _, voted in self.votes.values() for rank in voted]
        if len(worlds) != 1:
            return "no votes" if not worlds else "votes disagree about the number of ranks"
        absent = set(range(max(worlds))) - set(ranks)
        if absent:
            return f"{len(absent)} ranks have no vote, one is {min(absent)}"
        return ""  # two votes for a rank agree: its file has one content, as the promises check


class Store:
    """``mode``: ok, slow, failing, silent or unmounted; the effects ask for it."""

    def __init__(self, keep_last: int, keep_every: int = 0) -> None:
        self.mode = "ok"
        self.bytes_per_s = 0.0  # of all nodes together; 0: the effects draw how long a drain takes
        self.pinned: set[SaveId] = set()
        self.numbers: set[int] = set()
        self.records: dict[int, ev.Recorded] = {}
        self.partials: dict[SaveId, Directory] = {}
        self.committed: dict[SaveId, Directory] = {}
        self.ever: set[SaveId] = set()
        self.taken: set[SaveId] = set()  # by hand: a daemon that has not looked since counts them
        self._keep_last, self._keep_every = keep_last, keep_every
        self._free_at = 0.0

    def written_after_s(self, now: float, nbytes: int) -> float:
        """How long from now until these bytes are written, behind those that came before; 0 without a speed."""
        if not self.bytes_per_s:
            return 0.0
        self._free_at = max(self._free_at, now) + nbytes / self.bytes_per_s
        return self._free_at - now

    def take(self, at_least: int, now: float, session: str) -> int:
        """A number that nobody has had, by exclusive create of its record."""
        used = [save.incarnation for save in (*self.partials, *self.committed)]
        number = max([at_least - 1, *self.numbers, *used]) + 1
        number = not_behind(number, now)
        assert number not in self.numbers
        self.numbers.add(number)
        self.records[number] = ev.Recorded(number, run_of(session, at_least), session)
        return number

    def claim(self, number: int, run: bytes, session: str) -> bool:
        """The record of a number that was made up; whether it is the session's."""
        self.numbers.add(number)
        found = self.records.get(number)
        if found is None or found.session == session:
            found = self.records[number] = ev.Recorded(number, run, session)
        return found.run == run

    def taken_over(self, save: SaveId, incarnation: int, session: str, void: tuple[str, ...]) -> int:
        """The highest number above the committer's that another session took, 0: none."""
        saved = next((r.session for r in self.records.values() if (r.incarnation, r.run) == save.owner), "")
        base = max(incarnation, save.incarnation)
        own = (session or saved, *void)
        return max((n for n, r in self.records.items() if n > base and r.session not in own), default=0)

    def scan(self) -> tuple[tuple[ev.OnStore, ...], tuple[ev.Partial, ...], tuple[ev.Recorded, ...]]:
        """What lies there."""
        found = tuple(ev.OnStore(s, d.world_size, 10, s.dirname) for s, d in sorted(self.committed.items()))
        incomplete = tuple(ev.Partial(s, not d.missing) for s, d in sorted(self.partials.items()))
        return found, incomplete, tuple(self.records.values())

    def make_partial(self, save: SaveId) -> bool:
        """The directory for a drain; False when the save is committed already."""
        if save in self.committed:
            return False
        self.partials.setdefault(save, Directory())
        return True

    def write(self, save: SaveId, files: dict[int, bytes]) -> None:
        """Images, synced."""
        if save not in self.partials:
            raise StoreError("ENOENT: the partial directory is gone")
        self.partials[save].files.update(files)

    def vote(self, save: SaveId, node: str, world_size: int, ranks: tuple[int, ...]) -> None:
        """A node's word that its files are there, synced."""
        if save not in self.partials:
            raise StoreError("ENOENT: the partial directory is gone")
        directory = self.partials[save]
        # The files may be gone again, with a partial directory that was removed and made anew: the commit looks.
        directory.votes[node] = (world_size, ranks)

    def commit(self, save: SaveId) -> None:
        """The final name, from the votes alone. Anybody may, and twice."""
        if save in self.committed:
            return
        directory = self.partials.get(save)
        if directory is None:
            raise StoreError("ENOENT: nothing to commit")
        if directory.missing:
            raise StoreError(directory.missing)
        if any(other.dirname == save.dirname for other in self.committed):
            raise StoreError("another save has this name")
        directory.world_size = next(world for world, _ in directory.votes.values())
        lacking = set(range(directory.world_size)) - set(directory.files)
        if lacking:
            raise StoreError(f"file of rank {min(lacking)} is missing, though its node voted for it")
        self.committed[save] = self.partials.pop(save)
        self.ever.add(save)

    def remove(self, save: SaveId) -> bool:
        """Retention; False: it is pinned."""
        if save not in self.committed:
            return True
        if save in self.pinned:
            return False
        if save == max(self.committed):
            raise StoreError("it is the newest")
        newer = sum(other > save for other in (*self.committed, *self.taken))
        assert newer >= self._keep_last, f"retention removes {save} with {newer} newer ones"
        kept = self._keep_every and save.step % self._keep_every == 0
        assert not kept, f"retention removes {save}, of which the step is a multiple of {self._keep_every}"
        del self.committed[save]
        return True

    def remove_partial(self, save: SaveId) -> None:
        """Also under a late writer, who gets ENOENT."""
        self.partials.pop(save, None)
