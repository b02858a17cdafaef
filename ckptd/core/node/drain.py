"""This node's share of the drain that runs: which slots it writes, its vote for them, a commit in succession. Pure."""

from collections.abc import Callable

from ckptd.core import events as ev
from ckptd.core.actions import Action, Commit, Drain, ToNode, WriteVote
from ckptd.core.node.membership import Membership
from ckptd.core.node.parity import Protection
from ckptd.core.node.parity_share import ParityShare
from ckptd.core.node.ranks import LocalRanks
from ckptd.core.node.slots import Slot, SlotTable
from ckptd.shared.base.ids import JobKey, SaveId
from ckptd.shared.protocol.messages import End, Milestone, Progress


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

    def tick(self, now: float) -> list[Action]:
        """A vote that has waited long enough."""
        return self.vote() if self.parity.late(now) else []


_OTHERS_S = 2.0  # so much later, nodes that are in no set with the coordinator look whether the commit was made
_SET_S = 0.05  # and each set so much later than the one before


class Succession:
    """The commit of a coordinator that does not answer, made by the first node that does: one node's part in it.

    Nodes know who answers in their own set. So the first of the coordinator's set makes the commit, and the first of
    each other set makes it later: it then finds it made, and its set learns that without a link to the others.
    """

    def __init__(
        self, node: str, membership: Membership, drain: DrainShare, ranks: LocalRanks, protection: Protection
    ) -> None:
        self._job = drain.job
        self._node = node
        self._membership = membership
        self._drain = drain
        self._ranks = ranks
        self._protection = protection
        self._waits: int | None = None  # for its turn, to commit in the name of this incarnation
        self._due: float | None = None

    def lost(self, incarnation: int) -> list[Action]:
        """A node does not answer. incarnation: the job's present one, in whose name the commit is made."""
        member, members = self._membership, self._protection.members
        if member.coordinator not in member.down or not member.is_first(members):
            return []
        if member.coordinator in members:
            return self._drain.finish(incarnation, member.session)
        self._waits = incarnation if self._drain.voted is not None else None
        return []

    def peer_up(self, event: ev.PeerUp) -> list[Action]:
        """A coordinator that answers makes its commits itself."""
        if event.node == self._membership.coordinator:
            self._waits = self._due = None
        return []

    def next_deadline(self) -> float | None:
        """When to call tick; in the past: at once."""
        if self._waits is None:
            return None
        return float("-inf") if self._due is None else self._due

    def tick(self, now: float) -> list[Action]:
        """The turn of this set has come."""
        if self._waits is None:
            return []
        if self._due is None:
            nodes, first = self._membership.nodes, self._protection.members[0]
            place = nodes.index(first) if first in nodes else len(nodes)
            self._due = now + _OTHERS_S + _SET_S * place
        if now < self._due:
            return []
        incarnation, self._waits, self._due = self._waits, None, None
        return self._drain.finish(incarnation, self._membership.session)

    def finished(self, event: ev.CommitEnded) -> list[Action]:
        """This node has tried to finish the commit of a coordinator that it lost."""
        member = self._membership
        if event.problem or event.taken_over or event.save != self._drain.voted or member.coordinator == self._node:
            return []
        finished = ev.CommitFinished(job=self._job, node=self._node, save=event.save)
        others = [node for node in self._protection.members if node not in (self._node, member.coordinator)]
        told = [ToNode(job=self._job, node=node, message=finished) for node in others]
        return [*self.durable(event), *told]

    def durable(self, event: ev.CommitEnded | ev.CommitFinished) -> list[Action]:
        """Its commit was made, though not by the coordinator."""
        if event.save != self._drain.voted:
            return []
        self._drain.ended(event)
        return self._ranks.tell_all(Progress(save=event.save, milestone=Milestone.DURABLE, end=End.DURABLE))
