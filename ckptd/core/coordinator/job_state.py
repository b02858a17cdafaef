"""What a coordinator knows of its job, as tables: data and queries, no decisions. Pure.

A turn costs what changed, not what the job has: what lies where is kept both ways, by rank and by node.
"""

from collections import Counter
from collections.abc import Collection, Container, Iterable
from typing import TYPE_CHECKING, NamedTuple

from ckptd.core import events as ev
from ckptd.core.coordinator.chunks import Chunks
from ckptd.core.coordinator.inventory_barrier import InventoryBarrier
from ckptd.core.coordinator.save_record import Record
from ckptd.core.coordinator.save_states import SAVE, WHOLE, On, State
from ckptd.core.coordinator.sessions import Sessions
from ckptd.core.policy import Policy
from ckptd.shared.base.ids import JobKey, Run, SaveId
from ckptd.shared.format.replica_attestations import doubt
from ckptd.shared.protocol.messages import End, Progress

if TYPE_CHECKING:
    from ckptd.core.coordinator.restores import Restores
    from ckptd.core.preemption import Preemption

MAX_RECORDS = 64


class LastDrain(NamedTuple):
    """The last drain of the job that ended well, and its commit."""

    save: SaveId
    began: float
    seconds: float
    nbytes: int

    @property
    def bytes_per_s(self) -> float:
        """Of all nodes together."""
        return self.nbytes / max(self.seconds, 1e-6)


class JobState:
    """Records by save, what lies at which node, and the committed checkpoints on the store."""

    def __init__(self, job: JobKey, node: str, policy: Policy, session: Sessions, inventory: InventoryBarrier) -> None:
        self.job, self.node, self.policy = job, node, policy
        self.session = session
        self.links = session.links
        self.inventory = inventory
        self.chunks = Chunks(job, node)
        self.restore: Restores  # both are given by the coordinator
        self.preemption: Preemption
        # of the store
        self.ready = False  # it was seen once: what is durable already is known, so drains may begin
        self.store_problem = ""  # of the last look
        self.silent_since: float | None = None  # it was asked then, and has never answered
        self.on_store: dict[SaveId, ev.OnStore] = {}
        self.partials: set[SaveId] = set()  # unfinished directories there
        self.disputed = -1  # an incarnation number that an older run on the store has too
        self.active: SaveId | None = None  # being drained or committed
        self.last_drain: LastDrain | None = None
        self.due_since: float | None = None  # for the store; if others wait as a save becomes durable, from then on
        self.retry_at: float | None = None  # no drain begins, no commit is made again before
        self.lacked_a_node = False  # that is why: it need not wait for longer than the node is away
        # of the saves
        self.incarnation = 0  # of those that are made now
        self.awaited: Container[SaveId] = ()  # not whole as far as is known, but more may be found
        self.records: dict[SaveId, Record] = {}
        self._in: dict[State, dict[SaveId, Record]] = {state: {} for state in State}
        self.places: dict[str, dict[SaveId, set[int]]] = {}  # node -> ranks whose segments it has, by save
        self._in_order: dict[tuple[Run, int], set[SaveId]] = {}  # by owner and counter
        self._past: Counter[End] = Counter()  # of records that were dropped
        self.moves = 0  # of all saves, from state to state, and to protected
        self._newest: Record | None = None  # of newest_staged
        self._newest_is_known = True

    def give_away(self, save: SaveId) -> dict[int, set[str]]:
        """The save is another run's: what lies where of it, by rank. Nothing while it is on its way to the store."""
        record = self.records[save]
        if not SAVE.takes(record.state, On.FORGOTTEN):
            return {}
        held = record.held
        for rank, nodes in held.items():
            for node in nodes:
                self._unlist(node, save, rank)
        self._drop(save)
        return held

    def _drop(self, save: SaveId) -> Record:
        place = (save.owner, save.counter)
        self._in_order[place].discard(save)
        if not self._in_order[place]:
            del self._in_order[place]
        record = self.records.pop(save)
        SAVE.step(record.state, On.FORGOTTEN)  # the callers looked
        del self._in[record.state][save]
        self._newest_is_known = False
        return record

    # --- what lies where

    def put(self, record: Record, rank: int, node: str) -> None:
        """The rank's segment lies at the node."""
        nodes = record.held.setdefault(rank, set())
        self._newest_is_known &= bool(nodes) or not record.staged
        nodes.add(node)
        record.changes += 1
        self.places.setdefault(node, {}).setdefault(record.save, set()).add(rank)

    def take(self, record: Record, ranks: Iterable[int], node: str) -> bool:
        """Segments of these ranks lie there no longer. Returns whether one did."""
        lay = [rank for rank in ranks if node in record.held.get(rank, ())]
        for rank in lay:
            self._lost(record, rank, node)
            self._unlist(node, record.save, rank)
        return bool(lay)

    def clear(self, node: str) -> None:
        """Nothing lies at the node, as far as is known."""
        for save, ranks in self.places.pop(node, {}).items():
            for rank in ranks:
                self._lost(self.records[save], rank, node)

    def known_nodes(self, nodes: Container[str]) -> None:
        """What lies elsewhere is out of reach."""
        for node in [node for node in self.places if node not in nodes]:
            self.clear(node)

    def _lost(self, record: Record, rank: int, node: str) -> None:
        record.lost(rank, node)
        self._newest_is_known &= record is not self._newest

    def _unlist(self, node: str, save: SaveId, rank: int) -> None:
        ranks = self.places[node][save]
        ranks.discard(rank)
        if not ranks:
            del self.places[node][save]
        if not self.places[node]:
            del self.places[node]

    # --- saves

    def move(self, record: Record, on: On) -> bool:
        """The save's state follows from its table. Returns whether it has that row; False: nothing else may follow."""
        step = SAVE.step(record.state, on)
        if step is None:
            return False
        after = step.after
        assert after is not None  # noqa: S101 - what is forgotten is dropped
        del self._in[record.state][record.save]
        record.state = after
        self._in[after][record.save] = record
        record.staged |= after in WHOLE
        self.due_since = None if after is State.DURABLE else self.due_since
        self.moves += 1
        self._newest_is_known = False
        return True

    @property
    def waits_for_store(self) -> bool:
        """Whether a save is on its way there."""
        return self.active is not None or bool(self._in[State.QUEUED])

    def protect(self, record: Record) -> None:
        """Every set has encoded the save."""
        record.protected = True
        self.moves += 1

    def of(self, *states: State) -> list[Record]:
        """Saves that are in these states, each since when it came there."""
        return [record for state in states for record in self._in[state].values()]

    def clash_of(self, save: SaveId) -> Record | None:
        """Another save in the same place of the order."""
        others = self._in_order.get((save.owner, save.counter), set()) - {save}
        return self.records[min(others, key=lambda other: other.step)] if others else None

    def record_of(self, save: SaveId, world_size: int, now: float) -> Record:
        """Of a save that is known, or is from now on. world_size 0: not known."""
        if save not in self.records:
            record = self.records[save] = Record(save, world_size, now)
            record.state = SAVE.begin(On.BEGUN)
            self._in[record.state][save] = record
            self._in_order.setdefault((save.owner, save.counter), set()).add(save)
            self._prune()
        record = self.records[save]
        if not record.world_size:  # that of what was found on the store is not known
            record.world_size = world_size
            self._newest_is_known = False
        return record

    @property
    def judged_incomplete(self) -> list[Record]:
        """Those that wait for ranks, and of which is known what there is.

        What was found may be whole with what a silent node has.
        """
        return [
            r
            for r in self.of(State.STAGING)
            if not (r.adopted and self.inventory.doubts) and r.save not in self.awaited
        ]

    @property
    def anything_held(self) -> bool:
        """Whether some segment of some save lies in an arena."""
        return bool(self.places)

    @property
    def holders(self) -> set[str]:
        """Nodes that have some segment or parity, as far as is known."""
        return self.places.keys() | self.chunks.nodes

    def rebuildable(self, record: Record) -> bool:
        """Whether parity has all that is lost of the save, with what lies at nodes that do not answer now."""
        return self.chunks.recoverable(record, self.holders)

    @property
    def newest_staged(self) -> Record | None:
        """The newest save that every rank delivered and that still lies in memory."""
        if not self._newest_is_known:
            whole = (r for r in self.records.values() if r.staged and r.in_memory)
            self._newest, self._newest_is_known = max(whole, key=lambda r: r.save, default=None), True
        return self._newest

    def only_here(self, seen: Collection[SaveId]) -> list[SaveId]:
        """Checkpoints in memory that somebody may miss and the store does not have. seen: what lies there now.

        A half with segments here counts: after a restart all ranks may have staged it, and nobody has said so yet. So
        does what parity makes whole.
        """
        newest, durable = self.newest_staged, max(seen, default=None)
        staged = [r for r in self.records.values() if r.staged and r.in_memory and r.save not in seen]
        wanted = [r for r in staged if r is newest or (r.forced and r.state is not State.DURABLE)]
        wanted += [r for r in self.of(State.STAGING) if r.held]
        pieced = [self.records[save] for save in self.chunks.pieced - set(seen) if save in self.records]
        wanted += [r for r in pieced if not r.in_memory and self.rebuildable(r)]
        return sorted({r.save for r in wanted if r.forced or durable is None or not r.save <= durable})

    def _prune(self) -> None:
        ended = sorted(s for s, r in self.records.items() if r.end is not None and not r.held and s != self.active)
        for save in ended[: max(0, len(self.records) - MAX_RECORDS)]:
            end = self._drop(save).end
            assert end is not None  # noqa: S101 - only ended ones were taken
            self._past[end] += 1

    @property
    def ends(self) -> Counter[End]:
        """How many saves ended how, of all that this coordinator has known. Who waits again is none of them."""
        return self._past + Counter(record.end for record in self.records.values() if record.end is not None)

    def world_size_of(self, save: SaveId) -> int:
        """The ranks of a save that lies in memory or on the store."""
        return self.on_store[save].world_size if save in self.on_store else self.records[save].world_size

    def notes_of(self, save: SaveId) -> tuple[str, ...]:
        """What a user who loads the save should know of it."""
        found = self.on_store[save].compared if save in self.on_store else ""
        text = doubt(self.records[save].compared if save in self.records and not found else found)
        return (f"step {save.step}: {text}",) if text else ()

    def known(self, incarnation: int) -> tuple[Progress, ...]:
        """What a rank that comes back must learn about the saves of its incarnation."""
        return tuple(
            Progress(
                save=r.save, milestone=r.milestone, end=r.end, reason=r.why, mismatched=r.mismatched, where=r.where
            )
            for r in self.records.values()
            if r.save.incarnation == incarnation
        )
