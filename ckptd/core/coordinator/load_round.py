"""One load as its coordinator knows it: its callers, what was ordered, what is damaged, its readers. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ckptd.core import events as ev
from ckptd.core.actions import ToNode
from ckptd.shared.base.ids import NO_RUN, RunId, SaveId
from ckptd.shared.protocol.messages import Tier
from ckptd.shared.protocol.read_groups import MAX_EXCHANGES, ExchangeAddress

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
    asked: set[int] = field(default_factory=set)
    exchanges: dict[int, ExchangeAddress] = field(default_factory=dict)  # by rank
    scan: ev.StoreScanned | None = None
    incarnation: int | None = None
    drawn: RunId = NO_RUN  # with the number
    choice: SaveId | None = None
    order: ev.LoadOrdered | None = None  # that sent the ranks to it
    ordered: float = 0.0  # when the ranks were sent to read the choice
    reported: set[int] = field(default_factory=set)
    failed: bool = False
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

    @property
    def undecided(self) -> bool:
        """Whether all that a choice takes is known, but for the ranks that have still to call, and none is made."""
        known = self.scan is not None and self.incarnation is not None
        return known and self.choice is None and not self.fetches and self.awaited is None

    def arrived(self, node: str, event: ev.SegmentFetched) -> None:
        """A segment that was ordered has come to a node, or cannot."""
        del self.fetches[event.rank, node]
        if event.problem:
            self.notes.append(f"{event.save}, rank {event.rank}, {WHERE[event.tier]}: {event.problem}")
            self.damaged.add((event.save, event.tier, event.rank))
        else:
            self.damaged.discard((event.save, Tier.ARENA, event.rank))
            self.moved[event.save, event.rank, node] = event.tier

    def read(self, event: ev.LoadReported, home: str) -> None:
        """A rank of this node read its bytes, or could not."""
        self.reported.add(event.rank)
        whole = self.order is not None and self.order.whole
        note = f"{event.save}, {'read by ' if whole else ''}rank {event.rank}, {WHERE[event.tier]}: {event.problem}"
        if event.reshape and event.tier is not Tier.PFS:  # there it had all images
            (self.reshaped if not whole else self.spread if self.in_part else self.unwhole).add(event.save)
        elif not event.problem:
            return
        elif whole:
            self.unwhole.add(event.save)
            self.notes.append(note)
        else:
            self.damaged.add((event.save, event.tier, event.rank))
            if event.tier is not Tier.PFS:  # whichever way it came, it lies at the rank's node now
                self.damaged.add((event.save, Tier.ARENA, event.rank))
                self.moved.pop((event.save, event.rank, home), None)
            self.notes.append(note)
        self.failed = True

    def farthest(self, save: SaveId, node: str) -> Tier:
        """The farthest way that anything came to the node."""
        came = {tier for (moved, _, where), tier in self.moved.items() if (moved, where) == (save, node)}
        return next((tier for tier in (Tier.REBUILT, Tier.PEER) if tier in came), Tier.ARENA)

    def exchanges_of(self, tiers: Sequence[Tier]) -> tuple[tuple[int, ExchangeAddress], ...]:
        """Of the nodes that are sent to the store."""
        found = [(rank, exchange) for rank, exchange in sorted(self.exchanges.items()) if tiers[rank] is Tier.PFS]
        return tuple(found) if 1 < len(found) <= MAX_EXCHANGES else ()
