"""Protection of a job's checkpoints as its coordinator sees it: one save at a time is encoded by all sets. Pure."""

from collections.abc import Sequence

from ckptd.core import events as ev
from ckptd.core.actions import Action, Note, ToNode
from ckptd.core.coordinator.protection_view import ProtectionView, view_of
from ckptd.core.coordinator.save_record import Record, newest_whole, obsolete_since
from ckptd.core.coordinator.saves import Saves
from ckptd.core.policy import Policy
from ckptd.core.redundancy_sets import recoverable, redundancy_sets
from ckptd.shared.base.ids import JobKey, SaveId
from ckptd.shared.format.schemes import Scheme
from ckptd.shared.protocol.messages import Tier
from ckptd.shared.protocol.topology import Topology

Key = tuple[SaveId, int]  # save, epoch
Group = tuple[int, Scheme, tuple[tuple[int, ...], ...]]  # epoch, scheme, ranks by member


class ParityScheduler:
    """What is being encoded, what is protected, and where which parity lies."""

    def __init__(self, job: JobKey, node: str, policy: Policy, saves: Saves) -> None:
        self._job = job
        self._node = node
        self._policy = policy
        self._saves = saves
        self.topology: Topology | None = None
        self.epoch = 0
        self.active: SaveId | None = None
        self.newest: Key | None = None  # protected, under the topology of its epoch
        self.problems: dict[str, str] = {}  # node -> why it could not encode the active save
        self.done: set[str] = set()
        self._active_since = 0.0
        self._failures = 0
        self._retry_at: float | None = None
        self._chunks: dict[str, dict[Key, ev.HeldChunk]] = {}
        self._sets: dict[str, tuple[str, ...]] = {}
        self._ranks: dict[tuple[str, ...], tuple[tuple[int, ...], ...]] = {}  # by set, of each member
        self._since: dict[str, int] = {}  # by node, the epoch in which the job first came to its arena
        self._index: dict[SaveId, dict[int, dict[Group, dict[int, set[str]]]]] = {}  # of _pieces, made when asked for

    @property
    def on(self) -> bool:
        """Whether this job is to be protected, and can be."""
        return self.topology is not None and self.topology.scheme is not Scheme.NONE and len(self.topology.peers) > 1

    def opened(self, topology: Topology | None, epoch: int) -> None:
        """The job runs on these nodes now."""
        if (topology, epoch) == (self.topology, self.epoch):
            return
        self.topology, self.epoch = topology, epoch
        self._forget_active()
        sets = redundancy_sets(topology.peers, topology.set_size) if topology is not None else []
        self._sets = {node: members for members in sets for node in members}
        ranks = topology.by_node() if topology is not None else {}
        self._ranks = {members: tuple(ranks[member] for member in members) for members in sets}

    def known_nodes(self, nodes: set[str]) -> None:
        """What lies elsewhere is out of reach."""
        self._since = {node: since for node, since in self._since.items() if node in nodes}
        self._chunks = {node: held for node, held in self._chunks.items() if node in nodes}
        self._index.clear()

    def heard(self, node: str, since: int) -> None:
        """The job first came to the node's arena, as it is now, in this epoch; 0: that is not known."""
        self._since[node] = since

    def found(self, node: str, chunks: tuple[ev.HeldChunk, ...], now: float) -> list[Action]:
        """These chunks, and no others, lie at the node. It may have missed what was ordered or reached."""
        self._chunks[node] = {(chunk.save, chunk.epoch): chunk for chunk in chunks}
        self._index.clear()
        if not self.on or self.topology is None or node not in self._sets:
            return []
        actions: list[Action] = []
        if self.newest is None:  # an earlier process of this coordinator may have seen it protected
            for key in sorted(self._chunks[node], reverse=True):
                if key[1] == self.epoch and all(key in self._chunks.get(n, {}) for n in self._sets):
                    return [*self._protected(key), *self.advance(now)]
        else:
            order = ev.SaveProtected(job=self._job, node=self._node, save=self.newest[0], epoch=self.newest[1])
            actions.append(ToNode(job=self._job, node=node, message=order))
        if self.active is not None:
            self.done.discard(node)
            actions += self._order(self.active, node)
        return actions

    def advance(self, now: float) -> list[Action]:
        """Has the newest staged save encoded, once what is being encoded is done, or cannot be."""
        newest = self._saves.newest_staged
        if not self.on or newest is None:
            return []
        if self.newest is not None and self.newest[1] == self.epoch and newest.save <= self.newest[0]:
            return []
        patient_until = self._active_since + self._policy.encode_patience_s
        if self.active is not None and newest.save <= self.active:
            return []
        if self.active is not None and not self.problems and now < patient_until:
            self._retry_at = min(self._retry_at or patient_until, patient_until)
            return []
        if not self._is_placed(newest):  # last: it looks at every rank, and segments come one by one
            return []
        given_up = self._give_up_active()
        self.active, self._active_since = newest.save, now
        self._retry_at = now + self._policy.encode_patience_s  # a node that has said nothing by then is asked again
        return [*given_up, *self._order(newest.save, None)]

    def _give_up_active(self) -> list[Action]:
        """Chunks of what is stuck go, unless an earlier process of this coordinator may have called it protected."""
        key = (self.active, self.epoch) if self.active is not None and self.newest is not None else None
        self._forget_active()
        return [] if key is None else self._drop({key})

    def _is_placed(self, record: Record) -> bool:
        """Whether every rank's segment lies at the rank's node, as the sets have it."""
        topology = self.topology
        if topology is None or record.world_size != len(topology.homes):
            return False
        return all(topology.home(rank) in record.held.get(rank, set()) for rank in range(record.world_size))

    def encoded(self, node: str, event: ev.Encoded, now: float) -> list[Action]:
        """A node has sealed its parity, or could not make it."""
        key = (event.save, event.epoch)
        if not event.problem and self.topology is not None and event.epoch == self.epoch and node in self._sets:
            self._chunks.setdefault(node, {})[key] = self._describe(node, key)
            self._index.clear()
        if event.save != self.active or event.epoch != self.epoch:
            return []
        if event.problem:
            self.problems[node] = event.problem
            self._failures += 1
            pause = min(self._policy.drain_retry_s * 2 ** min(self._failures, 10), self._policy.drain_retry_max_s)
            self._retry_at = now + pause
            note = Note(job=self._job, text=f"{event.save} is not protected yet: {node}: {event.problem}")
            return [note, *self.advance(now)]
        self.problems.pop(node, None)
        self.done.add(node)
        if self.done >= set(self._sets):
            return [*self._protected(key), *self.advance(now)]
        return []

    def _describe(self, node: str, key: Key) -> ev.HeldChunk:
        members, topology = self._sets[node], self.topology
        assert topology is not None  # noqa: S101 - the caller looked
        scheme = topology.scheme.among(len(members))
        return ev.HeldChunk(*key, scheme, members.index(node), self._ranks[members], members)

    def _protected(self, key: Key) -> list[Action]:
        self.newest = key
        self._forget_active()
        if key[0] in self._saves.records:
            self._saves.records[key[0]].protected = True
        for held in self._chunks.values():
            for old in [k for k in held if k != key]:
                del held[old]
        self._index.clear()
        order = ev.SaveProtected(job=self._job, node=self._node, save=key[0], epoch=key[1])
        return [ToNode(job=self._job, message=order)]

    def _order(self, save: SaveId, node: str | None) -> list[Action]:
        order = ev.EncodeOrdered(job=self._job, node=self._node, save=save, epoch=self.epoch)
        return [ToNode(job=self._job, node=name, message=order) for name in ([node] if node else self._sets)]

    def _forget_active(self) -> None:
        self.active, self._retry_at, self._failures = None, None, 0
        self.done, self.problems = set(), {}

    def peer_up(self, node: str) -> list[Action]:
        """It may not have received what is to be encoded, or protected."""
        if node not in self._sets:
            return []
        actions = self._order(self.active, node) if self.active is not None else []
        if self.newest is not None:
            order = ev.SaveProtected(job=self._job, node=self._node, save=self.newest[0], epoch=self.newest[1])
            actions.insert(0, ToNode(job=self._job, node=node, message=order))
        return actions

    def released(self) -> None:
        """Nothing of the job is in memory any more."""
        self._forget_active()
        self.newest, self._chunks = None, {}
        self._index.clear()

    def view(self) -> ProtectionView:
        """For status."""
        if self.topology is None:
            return ProtectionView()
        newest = {node: max(held)[0] for node, held in self._chunks.items() if held}
        return view_of(
            self.topology,
            unreachable=set(self.topology.nodes) - self._saves.links.up,
            encoded=newest,
            protected=[record.save for record in self._saves.records.values() if record.protected],
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
        self._retry_at = now + self._policy.encode_patience_s
        return [action for node in self._sets if node not in self.done for action in self._order(self.active, node)]

    # --- what a lost segment can be rebuilt from

    def rebuild(self, record: Record, rank: int, damaged: set[int], reachable: set[str]) -> ev.FetchOrdered | None:
        """How to rebuild the rank's segment without its own copy and those that are damaged; None: not at all."""
        for (epoch, scheme, ranks), holders in sorted(self._parity_of(record.save).get(rank, {}).items(), reverse=True):
            chunks = {index: min(able) for index, nodes in holders.items() if (able := nodes & reachable)}
            homes = {
                r: min(able)
                for members in ranks
                for r in members
                if r != rank and r not in damaged and (able := record.held.get(r, set()) & reachable)
            }
            column = next(i for i, members in enumerate(ranks) if rank in members)
            lost = {i for i, members in enumerate(ranks) if any(member not in homes for member in members)}
            missing = set(range(len(ranks))) - set(chunks)
            if chunks and recoverable(scheme, len(ranks), lost, missing, {column}):
                return ev.FetchOrdered(
                    job=self._job,
                    node=self._node,
                    rank=rank,
                    save=record.save,
                    tier=Tier.REBUILT,
                    holder=chunks[min(chunks)],
                    epoch=epoch,
                    homes=tuple((r, homes[r]) for i, m in enumerate(ranks) if i not in lost for r in m),
                    chunks=tuple(sorted(chunks.items())),
                )
        return None

    def _recoverable(self, record: Record, reachable: set[str]) -> bool:
        missing = set(range(record.world_size)) - record.held.keys()
        return all(self.rebuild(record, rank, set(), reachable) is not None for rank in missing)

    def _parity_of(self, save: SaveId) -> dict[int, dict[Group, dict[int, set[str]]]]:
        """By rank, the sets that encoded it, and which nodes have which member's chunk."""
        if save not in self._index:
            index: dict[int, dict[Group, dict[int, set[str]]]] = {}
            for node, held in self._chunks.items():
                for chunk in held.values():
                    if chunk.save != save:
                        continue
                    group = (chunk.epoch, chunk.scheme, chunk.ranks)
                    known = next((index[r][group] for m in chunk.ranks for r in m if group in index.get(r, {})), {})
                    known.setdefault(chunk.index, set()).add(node)
                    for rank in (r for members in chunk.ranks for r in members):
                        index.setdefault(rank, {})[group] = known
            self._index[save] = index
        return self._index[save]

    def obsolete(self, loaded: SaveId | None) -> list[Action]:
        """Has the nodes give back parity that was left by sessions before and that nothing depends on.

        To be asked once all nodes that answer have said what they have. A save counts as protected if each member of
        its sets that is still there has its chunk: then it is as safe as it ever was, less the nodes that are lost.
        loaded: the newest that could be restored when the job went on from it; what is newer is lost, unless it can be
        rebuilt by what is there: that may have failed for a reason that passes.
        """
        keys = {key for held in self._chunks.values() for key in held if key[1] != self.epoch}
        whole = newest_whole(self._saves.records.values(), self._saves.on_store)
        told = {self.newest} if self.newest is not None else set()
        best = max(told | {key for key in keys if self._was_protected(key)}, default=None)
        gone = {key for key in keys if best is not None and key < best}
        gone |= {k for k in keys - {best} if whole is not None and k[0] < whole and not self._was_protected(k)}
        lost = (
            obsolete_since(self._saves.records.values(), loaded, self._saves.incarnation) if loaded is not None else []
        )
        lost = [save for save in lost if not self._recoverable(self._saves.records[save], self._saves.links.up)]
        gone |= {key for held in self._chunks.values() for key in held if key[0] in lost and key not in told}
        if self.active in lost:  # it was ordered before it was known what is lost
            self._forget_active()
        return self._drop(gone, lost, loaded) if gone or lost else []

    def _drop(self, keys: set[Key], lost: Sequence[SaveId] = (), newest: SaveId | None = None) -> list[Action]:
        for held in self._chunks.values():
            for key in keys & held.keys():
                del held[key]
        self._index.clear()
        order = ev.SavesObsolete(
            job=self._job, node=self._node, chunks=tuple(sorted(keys)), saves=tuple(lost), newest=newest
        )
        return [ToNode(job=self._job, message=order)]

    def _was_protected(self, key: Key) -> bool:
        covered: set[int] = set()
        record = self._saves.records.get(key[0])
        sets = {held[key].members: held[key] for held in self._chunks.values() if key in held}
        for members, chunk in sets.items():
            missing = [node for node in members if key not in self._chunks.get(node, {})]
            if len(missing) <= chunk.scheme.losses and not any(self._survived(node, key[1]) for node in missing):
                covered |= {rank for ranks in chunk.ranks for rank in ranks}
        return record is not None and 0 < len(covered) == record.world_size

    def _survived(self, node: str, epoch: int) -> bool:
        """Whether the node's arena is the one that it had in that epoch."""
        return 0 < self._since.get(node, 0) <= epoch

    def bears(self, save: SaveId) -> str:
        """In words, what the parity of the save makes good for."""
        scheme = next((p.scheme for held in self._chunks.values() for p in held.values() if p.save == save), None)
        if scheme is None:
            return "no node that answers has parity of it"
        nodes = "one node" if scheme.losses == 1 else f"{scheme.losses} nodes"
        return f"{scheme} makes good for {nodes} of a set"

    @property
    def pieced(self) -> set[SaveId]:
        """Saves of which some parity lies somewhere: they were staged by all their ranks."""
        return {save for held in self._chunks.values() for save, _ in held}
