"""How the ranks of a job agree on what to restore, at the coordinator. Pure.

All ranks ask; the newest checkpoint that every rank can read wins; every rank reads and checks it; only when all
succeeded is the load agreed. A copy found damaged is not offered again: the same checkpoint by another route
comes first, then an older one.

What does not lie at a rank's node is fetched into its arena first: from a peer's arena, or rebuilt from parity.

A checkpoint of another world size, or whose boxes lie otherwise on the ranks now, is read from the store, where every
rank reaches every image; one that is only in memory is drained first, and what is lost of it rebuilt before that.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ckptd.core import events as ev
from ckptd.core.actions import Action, ScanStore, TakeIncarnation, ToNode
from ckptd.core.policy import Policy
from ckptd.core.routes import Routes
from ckptd.core.saves import Saves, few
from ckptd.protocol.ids import JobKey, SaveId
from ckptd.protocol.messages import Tier

Route = tuple[Tier, ev.FetchOrdered | None]  # where to read, and what must be fetched for it first


@dataclass(slots=True)
class Round:
    """One load of all ranks."""

    since: float  # when the ranks began to wait
    step: int | None
    asked: set[int] = field(default_factory=set)
    scan: ev.StoreScanned | None = None
    incarnation: int | None = None
    choice: SaveId | None = None
    order: ev.LoadOrdered | None = None  # that sent the ranks to it
    ordered: float = 0.0  # when the ranks were sent to read the choice
    reported: set[int] = field(default_factory=set)
    failed: bool = False
    given_up: set[SaveId] = field(default_factory=set)  # drains that were waited for in vain
    notes: list[str] = field(default_factory=list)
    damaged: set[tuple[SaveId, Tier, int]] = field(default_factory=set)
    reshaped: set[SaveId] = field(default_factory=set)  # some rank needs other ranks' images of it
    awaited: SaveId | None = None  # must be on the store first; its drain runs
    gathered: SaveId | None = None  # what is missing of it at the ranks' nodes is on its way there
    fetches: dict[int, Action] = field(default_factory=dict)  # by rank, what was ordered and has not come
    moved: dict[tuple[SaveId, int], Tier] = field(default_factory=dict)  # what has come, and how


class Restores:
    """The one load that may run in a job."""

    def __init__(self, job: JobKey, node: str, policy: Policy, routes: Routes) -> None:
        self._job = job
        self._node = node
        self._policy = policy
        self._routes = routes
        self._blind = False  # some node has not yet said what it has
        self._round: Round | None = None
        self._ended = "no load is running"  # what a rank is told that reports to one that is over

    @property
    def running(self) -> bool:
        """Whether a load is in progress."""
        return self._round is not None

    @property
    def wants_incarnation(self) -> bool:
        """Whether the load still waits for its incarnation number."""
        return self._round is not None and self._round.incarnation is None

    def asked(  # noqa: PLR0913, PLR0917 - who asks what of whom, and when
        self, node: str, event: ev.LoadAsked, world_size: int, incarnation: int, saves: Saves, now: float
    ) -> list[Action]:
        """A rank wants to restore."""
        actions: list[Action] = []
        if self._round is None:
            self._round = Round(now, event.step)
            self._ended = ""
            actions = [ScanStore(job=self._job), TakeIncarnation(job=self._job, at_least=incarnation + 1)]
        if event.step != self._round.step:
            text = f"ranks ask for different steps: {self._round.step} and {event.step}"
            return self._refuse("usage", text, "call load with the same step on all ranks")
        if self._round.order is not None and self._round.choice is not None:  # the answer, or its daemon, was lost
            self._round.reported.discard(event.rank)
            return [ToNode(job=self._job, node=node, message=self._round.order)]
        self._round.asked.add(event.rank)
        return [*actions, *self._choose_when_ready(world_size, saves, now)]

    def scanned(self, event: ev.StoreScanned, world_size: int, saves: Saves, now: float) -> list[Action]:
        """What lies on the store is known, or that it does not answer."""
        if self._round is None or self._round.scan is not None:
            return []
        self._round.scan = event
        self._round.notes += event.notes
        if event.problem:
            self._round.notes.append(f"the store did not answer: {event.problem}")
        return self._choose_when_ready(world_size, saves, now)

    def incarnation_taken(self, number: int, world_size: int, saves: Saves, now: float) -> list[Action]:
        """The number the restored job goes on with."""
        if self._round is None:
            return []
        self._round.incarnation = number
        return self._choose_when_ready(world_size, saves, now)

    def raise_number(self, at_least: int) -> None:
        """The store has numbers that were not known when this load's was taken."""
        if self._round is not None and self._round.incarnation is not None and self._round.choice is None:
            self._round.incarnation = max(self._round.incarnation, at_least)

    def store_moved(self, world_size: int, saves: Saves, now: float) -> list[Action]:
        """More is known of the store than before; perhaps about what the load waits for."""
        awaited = self._round.awaited if self._round is not None else None
        if self._round is None or awaited is None:
            return []
        if awaited not in saves.on_store and awaited.incarnation != saves.disputed:
            return []
        self._round.awaited = None
        return self._choose_when_ready(world_size, saves, now)

    def _choose_when_ready(self, world_size: int, saves: Saves, now: float) -> list[Action]:
        r = self._round
        if r is None or r.scan is None or r.incarnation is None or len(r.asked) < world_size or r.choice is not None:
            return []
        if self._blind or r.fetches or r.awaited is not None:
            return []
        return self._choose(r, world_size, saves, now)

    def blind(self) -> None:
        """Nodes have still to say what they have."""
        self._blind = True

    def go_on(self, world_size: int, saves: Saves, now: float) -> list[Action]:
        """All nodes that answer have said what they have."""
        self._blind = False
        return self._choose_when_ready(world_size, saves, now)

    def _choose(self, r: Round, world_size: int, saves: Saves, now: float) -> list[Action]:
        candidates = self._candidates(r, saves)
        r.choice, r.gathered = None, None
        for save in candidates:
            size = saves.on_store[save].world_size if save in saves.on_store else saves.records[save].world_size
            if size != world_size:
                r.reshaped.add(save)
            if save in r.reshaped and save not in saves.on_store:
                actions = self._have_drained(r, save, saves, now)
                if actions is not None:
                    return actions
                continue
            routes = [self._route(r, save, rank) for rank in range(world_size)]
            self._explain(r, save, routes)
            tiers = [route[0] for route in routes if route is not None]
            if len(tiers) < world_size:
                continue
            fetches = {
                rank: route[1] for rank, route in enumerate(routes) if route is not None and route[1] is not None
            }
            r.ordered = now
            if fetches:
                return self._gather(r, save, fetches)
            return [self._order(r, save, tiers, saves)]
        return self._nothing(r, candidates)

    def _route(self, r: Round, save: SaveId, rank: int) -> Route | None:
        if save in r.reshaped:
            return None if (save, Tier.PFS, rank) in r.damaged else (Tier.PFS, None)
        route = self._routes.tier(save, rank, r.damaged)
        if route is not None and route[0] is Tier.ARENA:
            return r.moved.get((save, rank), Tier.ARENA), None
        return route

    def _explain(self, r: Round, save: SaveId, routes: Sequence[Route | None]) -> None:
        """Notes why ranks do without memory that others have, once."""
        for rank, route in enumerate(routes):
            if save in r.reshaped or (route is not None and route[0] is not Tier.PFS):
                continue
            why = self._routes.why_not(save, rank, r.damaged)
            note = f"{save}: {why}"
            if why and note not in r.notes:
                r.notes.append(note)

    def _have_drained(self, r: Round, save: SaveId, saves: Saves, now: float) -> list[Action] | None:
        """Has a checkpoint written to the store that lies in memory only, what is lost of it rebuilt first."""
        if save in r.given_up or save.incarnation == saves.disputed:
            return None
        size = saves.records[save].world_size
        missing = [rank for rank in range(size) if not self._routes.has(save, rank)]
        found = {rank: self._routes.fetch(save, rank, r.damaged) for rank in missing}
        fetches = {rank: order for rank, order in found.items() if order is not None}
        if len(fetches) < len(missing):
            return None
        if fetches:
            r.ordered = now
            return self._gather(r, save, fetches)
        if saves.newest_staged is not saves.records[save]:
            return None
        r.awaited, r.since = save, now
        return saves.drain_newest(now)

    def _gather(self, r: Round, save: SaveId, fetches: dict[int, ev.FetchOrdered]) -> list[Action]:
        """Ranks get theirs at their nodes. What is only to be drained comes to who has parity: it knows all members."""
        r.gathered = save
        r.fetches = {
            rank: ToNode(
                job=self._job, node=order.holder if save in r.reshaped else self._routes.home(rank), message=order
            )
            for rank, order in fetches.items()
        }
        return list(r.fetches.values())

    def fetched(self, event: ev.SegmentFetched, world_size: int, saves: Saves, now: float) -> list[Action]:
        """A segment has come to the rank's node, or cannot."""
        r = self._round
        if r is None or r.gathered != event.save or event.rank not in r.fetches:
            return []
        del r.fetches[event.rank]
        if event.problem:
            r.damaged.add((event.save, event.tier, event.rank))
            r.notes.append(f"{event.save}, rank {event.rank}, {event.tier}: {event.problem}")
        else:
            r.damaged.discard((event.save, Tier.ARENA, event.rank))
            r.moved[event.save, event.rank] = event.tier
        return self._choose_when_ready(world_size, saves, now)

    def peer_up(self, node: str) -> list[Action]:
        """It may not have heard what was ordered."""
        if self._round is None:
            return []
        return [order for order in self._round.fetches.values() if isinstance(order, ToNode) and order.node == node]

    def _candidates(self, r: Round, saves: Saves) -> list[SaveId]:
        found = sorted(self._routes.candidates() | set(saves.on_store), reverse=True)
        return [s for s in found if r.step is None or s.step == r.step]

    def _order(self, r: Round, save: SaveId, tiers: list[Tier], saves: Saves) -> Action:
        r.choice, r.reported, r.failed = save, set(), False
        r.order = order = ev.LoadOrdered(
            job=self._job,
            node=self._node,
            incarnation=r.incarnation or 0,
            save=save,
            tiers=tuple(tiers),
            dirname=saves.on_store[save].dirname if save in saves.on_store else "",
            notes=tuple(r.notes),
        )
        return ToNode(job=self._job, message=order)

    def _nothing(self, r: Round, candidates: list[SaveId]) -> list[Action]:
        if candidates:
            return self._refuse("restore", "no checkpoint can be restored: " + "; ".join(r.notes), "ckptd verify")
        if r.scan is not None and r.scan.problem:
            text = f"cannot tell whether there is a checkpoint: the store did not answer: {r.scan.problem}"
            return self._refuse("restore", text, f"check {self._job.store}, then start again")
        if r.step is not None:
            return self._refuse("restore", f"there is no checkpoint of step {r.step}", "ckptd list, or client.steps()")
        if r.notes:
            return self._refuse("restore", "no checkpoint can be restored: " + "; ".join(r.notes), "ckptd verify")
        order = ev.LoadOrdered(job=self._job, node=self._node, incarnation=r.incarnation or 0)
        self._round = None
        return [ToNode(job=self._job, message=order)]

    def reported(self, event: ev.LoadReported, world_size: int, saves: Saves, now: float) -> list[Action]:
        """A rank read its bytes, or could not."""
        r = self._round
        if r is None or event.save != r.choice:
            text = self._ended or f"the load of {event.save} is over"
            refusal = ev.LoadRefused(job=self._job, node=self._node, code="restore", message=text, rank=event.rank)
            return [ToNode(job=self._job, message=refusal)]
        r.reported.add(event.rank)
        if event.fatal:
            return self._refuse("mismatch", f"rank {event.rank}, {event.save}: {event.problem}", "")
        if event.reshape and event.tier is not Tier.PFS:  # there it had all images
            r.failed = True
            r.reshaped.add(event.save)
        elif event.problem:
            r.failed = True
            r.damaged.add((event.save, event.tier, event.rank))
            if event.tier is not Tier.PFS:  # whichever way it came, it lies at the rank's node now
                r.damaged.add((event.save, Tier.ARENA, event.rank))
                r.moved.pop((event.save, event.rank), None)
            r.notes.append(f"{event.save}, rank {event.rank}, {event.tier}: {event.problem}")
        if len(r.reported) < world_size:
            return []
        if r.failed:
            return self._choose(r, world_size, saves, now)
        order = ev.LoadOrdered(
            job=self._job,
            node=self._node,
            incarnation=r.incarnation or 0,
            save=r.choice,
            agreed=True,
            notes=tuple(r.notes),
        )
        self._round = None
        return [ToNode(job=self._job, message=order)]

    def rank_gone(self, rank: int) -> list[Action]:
        """A rank ended in the middle of the load: it cannot be agreed any more."""
        return self._refuse("restore", f"rank {rank} ended during the load", "") if self._round is not None else []

    def hopeless(self, why: str) -> list[Action]:
        """Some rank will never join, if why is not empty."""
        return self._refuse("restore", why, "start all ranks again, alike") if why and self._round is not None else []

    def replaced(self) -> list[Action]:
        """Another session is the job now."""
        return self._refuse("stale", "another session took the job over", "") if self._round is not None else []

    def next_deadline(self) -> float | None:
        """When ranks that wait for others have waited long enough."""
        r = self._round
        if r is None:
            return None
        if r.choice is None and not r.fetches:
            return r.since + self._policy.stage_timeout_s
        return r.ordered + self._policy.read_timeout_s

    def tick(self, now: float, world_size: int, saves: Saves) -> list[Action]:
        """Ends a load that some rank never joined, or in which one does not come back from its read."""
        r, deadline = self._round, self.next_deadline()
        if r is None or deadline is None or now < deadline:
            return []
        if r.awaited is not None:
            text = f"{r.awaited} must be on the store to be read by these ranks, and its drain does not end"
            r.notes.append(f"{text}: ckptd status tells why; started as they were, the ranks read it from memory")
            r.given_up.add(r.awaited)
            r.awaited = None
            return self._choose(r, world_size, saves, now)
        if r.fetches:
            for rank in sorted(r.fetches):
                r.damaged |= {(r.gathered, tier, rank) for tier in (Tier.PEER, Tier.REBUILT) if r.gathered is not None}
            r.notes.append(f"{r.gathered}: the segments of ranks {few(sorted(r.fetches))} did not come")
            r.fetches = {}
            return self._choose(r, world_size, saves, now)
        if r.choice is None:
            missing = sorted(set(range(world_size)) - r.asked)
            return self._refuse("restore", f"ranks {missing} did not call load", "call load on every rank")
        ranks = few(sorted(set(range(world_size)) - r.reported))
        text = f"ranks {ranks} did not report within {self._policy.read_timeout_s:g} s that they have read {r.choice}"
        return self._refuse("restore", text, "end these ranks and start the job again; a longer time: read_timeout_s")

    def _refuse(self, code: str, message: str, hint: str) -> list[Action]:
        self._round, self._ended = None, message
        order = ev.LoadRefused(job=self._job, node=self._node, code=code, message=message, hint=hint)
        return [ToNode(job=self._job, message=order)]
