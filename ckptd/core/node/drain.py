"""This node's share of the drain that runs: which slots it writes, and its vote for them. Pure."""

from collections.abc import Callable

from ckptd.core import events as ev
from ckptd.core.actions import Action, Commit, Drain, WriteVote
from ckptd.core.node.membership import Membership
from ckptd.core.node.parity_share import ParityShare
from ckptd.core.node.slots import Slot, SlotTable
from ckptd.shared.base.ids import JobKey, SaveId
from ckptd.shared.protocol.messages import End


class DrainShare:
    """This node's share of the drain; see the module."""

    def __init__(self, job: JobKey, slots: SlotTable, membership: Membership, parity: ParityShare) -> None:
        self.job = job
        self._slots = slots
        self._membership = membership
        self._report: Callable[[ev.Fact], Action] = membership.report
        self.parity = parity
        self.save: SaveId | None = None  # being drained
        self.store_id = ""  # of the store that it goes to
        self._void: tuple[str, ...] = ()  # sessions that take nothing over
        self.voted: SaveId | None = None  # synced and voted for; its commit was not reported yet
        self._written = False  # the files are synced
        self._busy = False  # the store's worker reads the slots, or writes the vote
        self._flying: dict[SaveId, frozenset[str]] = {}  # what it writes, from which slots, also when nobody wants it
        self._orphan = False  # the node that ordered it coordinates no more
        self._mine: frozenset[int] = frozenset()  # ranks whose segments this node drains
        self.done: dict[int, int] = {}  # rank -> bytes of its images that are written

    @property
    def at_work(self) -> bool:
        """Whether this node writes something to the store, or has voted for it and received no report of the commit."""
        return self._busy or self.voted is not None

    def ended(self, event: ev.SaveEnded | ev.CommitEnded | ev.CommitFinished) -> list[Action]:
        """The save's end is known."""
        self.voted = None if event.save == self.voted else self.voted
        return self.dropped(event) if isinstance(event, ev.SaveEnded) and event.end is End.DURABLE else []

    def forget(self) -> None:
        """The job is over."""
        self.save = self.voted = None

    def dropped(self, event: ev.DrainDropped | ev.SaveEnded) -> list[Action]:
        """The drain is over, well or not."""
        if event.save == self.save:
            self.save, self.done = None, {}
        return []

    def orphaned(self) -> None:
        """Another node coordinates the job now: nobody will say that the drain is over."""
        self._orphan = self._busy
        self.save = self.save if self._busy else None

    def _rested(self, save: SaveId) -> None:
        if save == self.save:
            self._busy = False
            if self._orphan:
                self.save, self._orphan = None, False

    def wrote_vote(self, event: ev.VoteWritten) -> list[Action]:
        """The vote is synced, or why not."""
        self._rested(event.save)
        self.voted = event.save if not event.problem else self.voted
        return [self._report(event)]

    def finish(self, incarnation: int, session: str) -> list[Action]:
        """The coordinator does not answer: the commit that it was to make is made here, if all votes are there.

        In the name of this session and its incarnation.
        """
        if self.voted is None:
            return []
        return [
            Commit(
                job=self.job,
                store_id=self.store_id,
                incarnation=incarnation,
                session=session,
                save=self.voted,
                void=self._void,
            )
        ]

    def order(self, order: ev.DrainOrdered) -> list[Action]:
        """Writes the segments of these ranks."""
        save, mine, self.store_id, self._void = order.save, frozenset(order.ranks), order.store_id, order.void
        if save == self.save and mine == self._mine:  # said again, since it may have been lost, or by a successor
            self._orphan = False
            if self._busy or self._written:
                return []
            if save == self.voted:
                return [self._report(ev.VoteWritten(job=self.job, save=save))]
        self._mine = mine
        names = tuple(slot.name for slot in self._share(save))
        if not names:
            problem = f"no slot of this node holds {save}"
            return [self._report(ev.Drained(job=self.job, save=save, problem=problem))]
        self.save, self._written, self._busy, self._orphan = save, False, True, False
        self.done = {}
        return [*self._write(save, names), *self.parity.begin(save, self.store_id)]

    def _write(self, save: SaveId, names: tuple[str, ...]) -> list[Action]:
        """One at a time: two that write the same files would remove each other's."""
        if save in self._flying:
            return []
        self._flying[save] = frozenset(names)
        folder = self._membership.folder
        return [Drain(job=self.job, store_id=self.store_id, save=save, folder=folder, slots=names)]

    def share(self) -> list[Slot]:
        """Slots that this node writes to the store now, one of each rank."""
        return self._share(self.save) if self.save is not None else []

    def _share(self, save: SaveId) -> list[Slot]:
        """One slot of each rank whose segment this node drains."""
        return [slot for slot in self._slots.holding(save) if slot.rank in self._mine]

    def moved(self, event: ev.DrainMoved) -> list[Action]:
        """Bytes that are written, for a status to ask for."""
        if event.save == self.save:
            self.done = dict(event.by_rank)
        return []

    def drained(self, event: ev.Drained) -> list[Action]:
        """The files are synced, or why not. It may have been begun before it was ordered again, for fewer ranks."""
        written = self._flying.pop(event.save, frozenset())
        self._rested(event.save)
        if event.save != self.save:
            return []
        if event.problem or event.committed:
            return [self._report(event)]
        names = tuple(slot.name for slot in self._share(event.save))
        if not written.issuperset(names):
            self._busy = True
            return self._write(event.save, names)
        self._written = True
        return self.vote()

    def vote(self) -> list[Action]:
        """The vote, once the files are synced and every digest is known."""
        save = self.save
        if save is None or not self._written:
            return []
        held = self._share(save)
        bad = next((slot.unreadable for slot in held if slot.unreadable), "")
        if bad:
            self._written = False
            return [self._report(ev.Drained(job=self.job, save=save, problem=bad))]
        if not held or not all(slot.digested for slot in held) or not self.parity.settled():
            return []
        self._written, self._busy = False, True
        return [
            WriteVote(
                job=self.job, store_id=self.store_id, save=save, folder=self._membership.folder,
                slots=tuple(slot.name for slot in held), parity=self.parity.record,
            )
        ]  # fmt: skip

    def encoded(self, event: ev.Encoded) -> list[Action]:
        """Parity of this node is sealed, or why not."""
        return self.parity_failed(event.save) if event.problem else self.parity.advance()

    def copied(self, event: ev.ParityDrained) -> list[Action]:
        """It lies on the store, or why not."""
        return [*self.parity.copied(event), *self.vote()]

    def parity_failed(self, save: SaveId | None = None) -> list[Action]:
        """No parity will come of the save (none: of whatever is drained) as things stand."""
        return self.vote() if self.parity.failed(save) else []

    def peer_down(self, event: ev.PeerDown) -> list[Action]:
        """A node does not answer. Of its set no parity comes."""
        return self.parity_failed() if self.parity.is_of_set(event.node) else []

    def next_deadline(self) -> float | None:
        """When tick has something to do; in the past: at once."""
        return self.parity.next_deadline()

    def tick(self, now: float) -> list[Action]:
        """A vote that has waited long enough."""
        return self.vote() if self.parity.late(now) else []
