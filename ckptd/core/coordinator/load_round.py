"""One load as its coordinator knows it: its callers, what was ordered, what is damaged, its readers. Pure."""

from dataclasses import dataclass, field

from ckptd.core import events as ev
from ckptd.core.actions import ToNode
from ckptd.core.coordinator.restore_states import Loading
from ckptd.shared.base.ids import NO_RUN, RunId, SaveId
from ckptd.shared.protocol.messages import Tier

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
    state: Loading = Loading.COLLECTING
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
    moved: dict[tuple[SaveId, int, str], Tier] = field(default_factory=dict)  # what has come, and how
    spread: set[SaveId] = field(default_factory=set)  # some rank needs images of others than those it shared with
    in_part: bool = False  # the ranks were sent to what each shared with others, not to all images
    unwhole: set[SaveId] = field(default_factory=set)  # cannot be had, or read, as a whole at every node

    def arrived(self, node: str, event: ev.SegmentFetched) -> None:
        """A segment that was ordered has come to a node, or cannot."""
        del self.fetches[event.rank, node]
        if event.problem:
            self.notes.append(f"{event.save}, rank {event.rank}, {WHERE[event.tier]}: {event.problem}")
            self.damaged.add((event.save, event.tier, event.rank))
        else:
            self.damaged.discard((event.save, Tier.ARENA, event.rank))
            self.moved[event.save, event.rank, node] = event.tier

    def could_not_read(self, save: SaveId, failure: ev.LoadFailure, home: str) -> None:
        """A rank of this node could not read its bytes, or needs those of other ranks too."""
        rank, tier, whole = failure.rank, failure.tier, self.order is not None and self.order.whole
        self.failed = True
        if failure.cause is ev.Cause.RESHAPE:
            (self.reshaped if not whole else self.spread if self.in_part else self.unwhole).add(save)
            return
        self.notes.append(f"{save}, {'read by ' if whole else ''}rank {rank}, {WHERE[tier]}: {failure.problem}")
        if whole:
            self.unwhole.add(save)
            return
        self.damaged.add((save, tier, rank))
        if tier is not Tier.PFS:  # whichever way it came, it lies at the rank's node now
            self.damaged.add((save, Tier.ARENA, rank))
            self.moved.pop((save, rank, home), None)

    def farthest(self, save: SaveId, node: str) -> Tier:
        """The farthest way that anything came to the node."""
        came = {tier for (moved, _, where), tier in self.moved.items() if (moved, where) == (save, node)}
        return next((tier for tier in (Tier.REBUILT, Tier.PEER) if tier in came), Tier.ARENA)
