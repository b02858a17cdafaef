"""Protection of a job's checkpoints as its coordinator sees it: one save at a time is encoded by all sets. Pure."""

from collections.abc import Collection, Sequence

from ckptd.core import events as ev
from ckptd.core.actions import Action, Note, ToNode
from ckptd.core.coordinator.chunks import Key
from ckptd.core.coordinator.job_state import JobState
from ckptd.core.coordinator.protection_states import PROTECTION, Encoding, EncodingOn
from ckptd.core.coordinator.protection_view import ProtectionView, view_of
from ckptd.core.coordinator.save_record import Record, newest_whole, obsolete_since
from ckptd.shared.base.ids import SaveId
from ckptd.shared.format.schemes import Scheme
from ckptd.shared.protocol.topology import Topology


class ParityScheduler:
    """What is being encoded, and what is protected. Its column of the facts: ``protected`` of the saves."""

    def __init__(self, facts: JobState) -> None:
        self._facts, self._chunks = facts, facts.chunks
        self._job, self._node, self._policy = facts.job, facts.node, facts.policy
        self.topology: Topology | None = None  # of the sets that encode
        self.epoch = 0
        self.states: dict[Key, Encoding] = {}
        self.problems: dict[str, str] = {}  # node -> why it could not encode the active save
        self._done: set[str] = set()  # nodes of the sets that sealed their parity of it
        self._active_since = 0.0
        self._failures = 0  # orders to all nodes that some could not carry out
        self._failed = False  # whether the last of them is one
        self._retry_at: float | None = None
        self._sets: dict[str, tuple[str, ...]] = {}
        self._ranks: dict[tuple[str, ...], tuple[tuple[int, ...], ...]] = {}  # by set, of each member
        self._weighed: tuple[SaveId | None, SaveId | None, int] | None = None  # when it was asked what is of no use
        self._placed: tuple[SaveId, int, bool] | None = None  # the last answer of _is_placed, and for which holdings

    @property
    def on(self) -> bool:
        """Whether this job is to be protected, and can be."""
        return self.topology is not None and self.topology.scheme is not Scheme.NONE and len(self.topology.peers) > 1

    @property
    def active(self) -> SaveId | None:
        """That is being encoded."""
        return next((key[0] for key, state in self.states.items() if state is not Encoding.PROTECTED), None)

    @property
    def newest(self) -> Key | None:
        """That is protected, under the topology of its epoch."""
        return next((key for key, state in self.states.items() if state is Encoding.PROTECTED), None)

    def _move(self, key: Key, on: EncodingOn) -> bool:
        """Returns whether the table has that row; False: nothing else may follow."""
        step = PROTECTION.step(self.states.get(key), on)
        if step is None:
            return False
        self.states.pop(key, None)
        if step.after is not None:
            self.states[key] = step.after
        return True

    def react(self, now: float) -> list[Action]:
        """What follows from the facts, as they are now."""
        self._follow()
        newest, facts = self._facts.newest_staged, self._facts
        weighed = (newest.save if newest is not None else None, facts.restore.settled, facts.inventory.settled)
        if facts.inventory.doubts or weighed == self._weighed:
            return self.advance(now)
        self._weighed = weighed
        return [*self.obsolete(facts.restore.settled), *self.advance(now)]

    def _follow(self) -> None:
        """The sets are those of the nodes on which the job runs now."""
        topology, epoch = self._facts.session.topology, self._facts.session.epoch
        if (topology, epoch) == (self.topology, self.epoch):
            return
        self._end_active(EncodingOn.GIVEN_UP)
        self.topology, self.epoch, self._placed = topology, epoch, None
        placement = self._facts.session.placement
        sets = placement.sets if placement is not None else []
        self._sets = {node: members for members in sets for node in members}
        ranks = topology.by_node if topology is not None else {}
        self._ranks = {members: tuple(ranks[member] for member in members) for members in sets}

    def found(self, node: str) -> list[Action]:
        """A node has reported its parity. It may have missed what was ordered or reached."""
        self._follow()
        if not self.on or node not in self._sets:
            return []
        if self.newest is None:  # an earlier process of this coordinator may have seen it protected
            for key in self._chunks.of(node):
                if key[1] == self.epoch and self._chunks.lies_at_all(key, self._sets):
                    return self._protected(key, EncodingOn.FOUND)
        if self.active is not None:
            self._done.discard(node)
        return self.peer_up(node)

    def advance(self, now: float) -> list[Action]:
        """Has the newest staged save encoded, once what is being encoded is done, or cannot be."""
        newest, before, active = self._facts.newest_staged, self.newest, self.active
        if not self.on or newest is None:
            return []
        if before is not None and before[1] == self.epoch and newest.save <= before[0]:
            return []
        patient_until = self._active_since + self._policy.encode_patience_s
        if active is not None and newest.save <= active:
            return []
        if active is not None and not self.problems and now < patient_until:
            self._retry_at = min(self._retry_at or patient_until, patient_until)
            return []
        if not self._is_placed(newest):
            return []
        given_up = self._give_up_active()
        if not self._move((newest.save, self.epoch), EncodingOn.ORDERED):
            return given_up
        self._active_since = now
        self._retry_at = now + self._policy.encode_patience_s  # a node that has said nothing by then is asked again
        return [*given_up, *self._order(newest.save, self._sets)]

    def _give_up_active(self) -> list[Action]:
        """Chunks of what is stuck go, unless an earlier process of this coordinator may have called it protected."""
        key = (self.active, self.epoch) if self.active is not None and self.newest is not None else None
        self._end_active(EncodingOn.GIVEN_UP)
        return [] if key is None else self._drop({key})

    def _is_placed(self, record: Record) -> bool:
        """Whether every rank's segment lies at the rank's node, as the sets have it. Asked for each segment."""
        topology = self.topology
        if topology is None or record.world_size != len(topology.homes):
            return False
        if self._placed is None or self._placed[:2] != (record.save, record.changes):
            homes = enumerate(topology.homes)
            placed = all(topology.peers[home].node in record.held.get(rank, ()) for rank, home in homes)
            self._placed = (record.save, record.changes, placed)
        return self._placed[2]

    def encoded(self, node: str, event: ev.Encoded, now: float) -> list[Action]:
        """A node has sealed its parity, or could not make it."""
        if event.epoch != self.epoch or node not in self._sets:
            return []
        key = (event.save, event.epoch)
        if not event.problem:
            self._chunks.add(node, self._describe(node, key))
        if event.save != self.active:
            return []
        if event.problem:
            if not self._move(key, EncodingOn.FAILED):
                return []
            self.problems[node] = event.problem
            self._done.discard(node)
            return self._encode_failed(f"{event.save} is not protected yet: {node}: {event.problem}", now)
        if self.problems.pop(node, "") and not self.problems:
            self._move(key, EncodingOn.MENDED)
        self._done.add(node)
        if len(self._done) == len(self._sets):
            return self._protected(key, EncodingOn.SEALED)
        return []

    def _encode_failed(self, text: str, now: float) -> list[Action]:
        """However many nodes say so of one order: all members of a set that lacks one do."""
        if self._failed:
            return []
        self._failures, self._failed = self._failures + 1, True
        pause = min(self._policy.drain_retry_s * 2 ** min(self._failures, 10), self._policy.drain_retry_max_s)
        self._retry_at = now + pause
        return [Note(job=self._job, text=text)]

    def _describe(self, node: str, key: Key) -> ev.HeldChunk:
        members, topology = self._sets[node], self.topology
        assert topology is not None  # noqa: S101 - it has sets
        scheme = topology.scheme.among(len(members))
        return ev.HeldChunk(*key, scheme, members.index(node), self._ranks[members], members)

    def _protected(self, key: Key, on: EncodingOn) -> list[Action]:
        before = self.newest
        if not self._move(key, on):
            return []
        if before is not None:
            self._move(before, EncodingOn.SURPASSED)
        self._end_active(EncodingOn.GIVEN_UP)
        if key[0] in self._facts.records:
            self._facts.protect(self._facts.records[key[0]])
        self._chunks.drop(set(self._chunks.keys) - {key})
        return [self._tell_protected(key)]

    def _tell_protected(self, key: Key, node: str | None = None) -> Action:
        order = ev.SaveProtected(job=self._job, node=self._node, save=key[0], epoch=key[1])
        return ToNode(job=self._job, node=node, message=order)

    def _order(self, save: SaveId, nodes: Collection[str]) -> list[Action]:
        order = ev.EncodeOrdered(job=self._job, node=self._node, save=save, epoch=self.epoch)
        return [ToNode(job=self._job, node=name, message=order) for name in nodes]

    def _end_active(self, on: EncodingOn) -> None:
        if self.active is not None:
            self._move((self.active, self.epoch), on)
        self._retry_at, self._failures, self._failed = None, 0, False
        self._done, self.problems = set(), {}

    def peer_up(self, node: str) -> list[Action]:
        """It may not have received what is protected, or to be encoded."""
        if node not in self._sets:
            return []
        told = [self._tell_protected(self.newest, node)] if self.newest is not None else []
        return [*told, *(self._order(self.active, [node]) if self.active is not None else [])]

    def released(self) -> None:
        """Nothing of the job is in memory any more."""
        self._end_active(EncodingOn.RELEASED)
        if self.newest is not None:
            self._move(self.newest, EncodingOn.RELEASED)
        self._chunks.drop(self._chunks.keys)

    def view(self) -> ProtectionView:
        """For status."""
        if self.topology is None:
            return ProtectionView()
        return view_of(
            self.topology,
            unreachable=set(self.topology.nodes) - self._facts.links.up,
            encoded=self._chunks.newest,
            protected=[record.save for record in self._facts.records.values() if record.protected],
            problems=self.problems,
        )

    def next_deadline(self) -> float | None:
        """When the encode is tried again, or has had its time."""
        return self._retry_at

    def tick(self, now: float) -> list[Action]:
        """Tries again what failed, as far as it is still the newest."""
        if self._retry_at is None or now < self._retry_at:
            return []
        self._retry_at = None
        actions = self.advance(now)
        if actions or self.active is None:
            return actions
        self._retry_at, self._failed = now + self._policy.encode_patience_s, False
        return self._order(self.active, [node for node in self._sets if node not in self._done])

    # --- parity that is of no use

    def obsolete(self, loaded: SaveId | None) -> list[Action]:
        """Has the nodes give back parity that was left by sessions before and that nothing depends on.

        To be asked once all nodes that answer have said what they have.
        loaded: the newest that could be restored when the job went on from it; what is newer is lost, unless it can be
        rebuilt by what is there: that may have failed for a reason that passes.
        """
        facts, newest = self._facts, self.newest
        safe = {key: self._was_protected(key) for key in self._chunks.keys if key[1] != self.epoch}
        whole = newest_whole(facts.records.values(), facts.on_store)
        told = {newest} if newest is not None else set()
        best = max(told | {key for key, was in safe.items() if was}, default=None)
        gone = {key for key in safe if best is not None and key < best}
        gone |= {k for k, was in safe.items() if k != best and not was and whole is not None and k[0] < whole}
        lost = obsolete_since(facts.records.values(), loaded, facts.incarnation) if loaded is not None else []
        lost = [save for save in lost if not self._chunks.recoverable(facts.records[save], facts.links.up)]
        gone |= {key for key in self._chunks.keys if key[0] in lost and key not in told}
        if self.active in lost:  # it was ordered before it was known what is lost
            self._end_active(EncodingOn.RELEASED)
        return self._drop(gone, lost, loaded) if gone or lost else []

    def _was_protected(self, key: Key) -> bool:
        return self._chunks.was_protected(key, self._facts.records.get(key[0]))

    def _drop(self, keys: set[Key], lost: Sequence[SaveId] = (), newest: SaveId | None = None) -> list[Action]:
        self._chunks.drop(keys)
        order = ev.SavesObsolete(
            job=self._job, node=self._node, chunks=tuple(sorted(keys)), saves=tuple(lost), newest=newest
        )
        return [ToNode(job=self._job, message=order)]
