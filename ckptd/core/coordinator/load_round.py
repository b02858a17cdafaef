"""One load as its coordinator knows it: its callers, what was ordered, what is damaged, its readers. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ckptd.core import events as ev
from ckptd.core.actions import Action, ToNode
from ckptd.core.coordinator.restore_states import Loading
from ckptd.core.coordinator.save_record import Record, few
from ckptd.shared.base.ids import NO_RUN, JobKey, RunId, SaveId
from ckptd.shared.base.wording import named_ranks
from ckptd.shared.protocol.messages import Tier
from ckptd.shared.protocol.rank_sets import ranks_of

WHERE = {
    Tier.ARENA: "in memory",
    Tier.PEER: "from another node's memory",
    Tier.REBUILT: "rebuilt from parity",
    Tier.PFS: "on the store",
}


@dataclass(slots=True)
class Round:
    """One load of all ranks: facts, no decisions."""

    since: float  # when the ranks began to wait
    step: int | None
    run: RunId | None  # of which alone a checkpoint is taken
    state: Loading
    asked: set[int] = field(default_factory=set)
    scan: ev.StoreScanned | None = None
    incarnation: int | None = None
    drawn: RunId = NO_RUN  # with the number
    choice: SaveId | None = None
    order: ev.LoadOrdered | None = None  # that sent the ranks to it
    ordered: float = 0.0  # when the ranks were sent to read the choice
    reported: set[int] = field(default_factory=set)
    failed: bool = False
    attempts: int = 0  # times that the ranks were sent to read
    given_up: set[SaveId] = field(default_factory=set)  # drains that the load waited for and that failed
    notes: list[str] = field(default_factory=list)
    damaged: set[tuple[SaveId, Tier, int]] = field(default_factory=set)
    reshaped: set[SaveId] = field(default_factory=set)  # some rank needs other ranks' images of it
    awaited: SaveId | None = None  # must be on the store first; its drain runs
    gathered: SaveId | None = None  # what is missing of it at the ranks' nodes is on its way there
    fetches: dict[tuple[int, str], ToNode] = field(default_factory=dict)  # rank and node: ordered, and has not come
    gather: ev.GatherOrdered | None = None  # has the nodes copy what their ranks need of others
    gathering: set[str] = field(default_factory=set)  # nodes that have still to report on it
    gaps: set[tuple[int, str]] = field(default_factory=set)  # rank and node: these did not come so
    copied: set[str] = field(default_factory=set)  # nodes that had to copy some
    moved: dict[tuple[SaveId, int, str], Tier] = field(default_factory=dict)  # what has come, and how
    spread: set[SaveId] = field(default_factory=set)  # some rank needs images of others than those it shared with
    in_part: bool = False  # the ranks were sent to what each shared with others, not to all images
    unwhole: set[SaveId] = field(default_factory=set)  # cannot be had, or read, as a whole at every node

    def begin_gather(self, job: JobKey, node: str, record: Record, nodes: Iterable[str]) -> Action:
        """Has every node copy what its ranks need: one order for all."""
        self.attempts += 1
        self.gather = ev.GatherOrdered(job=job, node=node, save=record.save, attempt=self.attempts)
        self.gathered, self.gathering, self.copied, self.gaps = record.save, set(nodes), set(), set()
        return ToNode(job=job, message=self.gather)

    def is_gathered(self, save: SaveId) -> bool:
        """Whether all nodes have what their ranks need of it."""
        return self.gather is not None and self.gather.save == save and not self.gathering

    def has_gathered(self, node: str, event: ev.SegmentsGathered, world_size: int) -> bool:
        """Notes what a node copied; False when the report is of no order that counts."""
        if self.gather is None or event.attempt != self.gather.attempt or node not in self.gathering:
            return False
        self.gathering.discard(node)
        self.copied |= {node} if event.copied else set()
        for failure in event.failures:
            ranks = sorted(ranks_of(failure.ranks, world_size))
            self.gaps |= {(rank, node) for rank in ranks}
            self.damaged |= {(event.save, Tier.PEER, rank) for rank in ranks}
            self.notes.append(f"{event.save}, {named_ranks(ranks)}, copied to node {node}: {failure.problem}")
        return True

    def open_gaps(self, save: SaveId) -> list[tuple[int, str]]:
        """Ranks and nodes: segments that were not copied by the rule, and have not come by another way."""
        return [(rank, node) for rank, node in sorted(self.gaps) if (save, rank, node) not in self.moved]

    def arrived(self, node: str, event: ev.SegmentFetched) -> None:
        """A segment that was ordered has come to a node, or cannot."""
        del self.fetches[event.rank, node]
        if event.problem:
            self.notes.append(f"{event.save}, rank {event.rank}, {WHERE[event.tier]}: {event.problem}")
            self.damaged.add((event.save, event.tier, event.rank))
        else:
            self.damaged.discard((event.save, Tier.ARENA, event.rank))
            self.moved[event.save, event.rank, node] = event.tier

    def waits_in_vain(self) -> None:
        """A drain, or segments, are too late: the load continues without them."""
        if self.state is Loading.DRAINING and self.awaited is not None:
            text = f"{self.awaited} must be on the store to be read by these ranks, and its drain does not end"
            self.notes.append(f"{text}: ckptd status tells why; started as they were, the ranks read it from memory")
            self.given_up.add(self.awaited)
        elif self.state is Loading.FETCHING and self.gathered is not None:
            late = sorted({rank for rank, _ in self.fetches})
            self.unwhole.add(self.gathered)
            self.damaged |= {(self.gathered, tier, rank) for rank in late for tier in (Tier.PEER, Tier.REBUILT)}
            nodes = ", ".join(sorted(self.gathering)[:8])
            what = f"the segments of ranks {few(late)}" if late else f"what nodes {nodes} need"
            self.notes.append(f"{self.gathered}: {what} did not come")

    def could_not_read(self, save: SaveId, failure: ev.LoadFailure, home: str) -> None:
        """A rank of this node could not read its bytes, or needs those of other ranks too."""
        rank, tier = failure.rank, failure.tier
        whole = self.order is not None and bool(self.order.whole or self.order.saved_by)
        self.failed = True
        if failure.cause is ev.Cause.RESHAPE:
            (self.reshaped if not whole else self.spread if self.in_part else self.unwhole).add(save)
            return
        self.notes.append(f"{save}, {'read by ' if whole else ''}rank {rank}, {WHERE[tier]}: {failure.problem}")
        for lacked in failure.lacks:
            self._lost(save, lacked)
        if whole:
            self.unwhole |= set() if failure.lacks else {save}
            return
        self.damaged.add((save, tier, rank))
        if tier is not Tier.PFS:  # whichever way it came, it lies at the rank's node now
            self.damaged.add((save, Tier.ARENA, rank))
            self.moved.pop((save, rank, home), None)

    def _lost(self, save: SaveId, rank: int) -> None:
        """What lies of it at the node to which the order sends is of no use."""
        came = [key for key in self.moved if key[:2] == (save, rank)]
        self.damaged.add((save, Tier.REBUILT if came else Tier.PEER, rank))
        for key in came:
            del self.moved[key]

    def tier_of(self, home: str, homes: Mapping[int, str], save: SaveId) -> Tier:
        """Of a rank that runs at home, and may need any segment."""
        if all(node == home for node in homes.values()):
            return Tier.ARENA
        rebuilt = any(moved == save and tier is Tier.REBUILT for (moved, *_), tier in self.moved.items())
        return Tier.REBUILT if rebuilt else Tier.PEER

    def farthest(self, save: SaveId) -> dict[str, Tier]:
        """By node, the farthest way that anything came there; nodes to which nothing came have no entry."""
        found = dict.fromkeys(self.copied, Tier.PEER) if self.is_gathered(save) else {}
        for (moved, _, node), tier in self.moved.items():
            if moved == save:
                found[node] = Tier.REBUILT if Tier.REBUILT in {tier, found.get(node)} else Tier.PEER
        return found
