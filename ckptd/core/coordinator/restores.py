"""How the ranks of a job agree on what to restore, at the coordinator. Pure.

All ranks ask; the newest checkpoint that every rank can read wins; every rank reads and checks it; only when all
succeeded is the load agreed. A copy found damaged is not offered again: the same checkpoint by another route
comes first, then an older one.

What does not lie at a rank's node is fetched into its arena first: from a peer's arena, or rebuilt from parity.

Of a checkpoint of another world size, or whose boxes lie otherwise on the ranks now, each rank may need any image. In a
job of few nodes every node gets all of them; else it is read from the store, and one that is only in memory is drained
first, and what is lost of it rebuilt before that.
"""

from dataclasses import dataclass, field, replace

from ckptd.core import events as ev
from ckptd.core.actions import Action, ScanStore, TakeIncarnation, ToNode
from ckptd.core.coordinator.departures import Departure
from ckptd.core.coordinator.empty_loads import Asked, Found, Reason, Refusal, answer
from ckptd.core.coordinator.locations import Routes
from ckptd.core.coordinator.save_record import few
from ckptd.core.coordinator.saves import Saves
from ckptd.core.coordinator.strangers import Strangers
from ckptd.core.policy import Policy
from ckptd.shared.base.ids import NO_RUN, JobKey, RunId, SaveId
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
    """One load of all ranks."""

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
    given_up: set[SaveId] = field(default_factory=set)  # drains that were waited for in vain
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


class Restores:
    """The one load that may run in a job."""

    def __init__(self, job: JobKey, node: str, policy: Policy, routes: Routes, strangers: Strangers) -> None:
        self._job = job
        self._node = node
        self._policy = policy
        self._routes = routes
        self._strangers = strangers
        self._lineage = strangers.lineage
        self.agreed: ev.LoadOrdered | None = None  # the last load that this session agreed on, or that found nothing
        self._blind = False  # some node has not yet said what it has
        self._round: Round | None = None
        self.settled: SaveId | None = None  # the newest that could be restored, and was, in this session
        self._ended = "no load is running"  # what a rank is told that reports to one that is over

    @property
    def running(self) -> bool:
        """Whether a load is in progress."""
        return self._round is not None

    @property
    def callers(self) -> tuple[float | None, set[int]]:
        """Since when a load waits for ranks to call it, None when none does, and which ranks have."""
        r = self._round
        return (r.since, r.asked) if r is not None and r.choice is None else (None, set())

    @property
    def wants_incarnation(self) -> bool:
        """Whether the load still waits for its incarnation number."""
        return self._round is not None and self._round.incarnation is None

    def asked(  # noqa: PLR0913, PLR0917 - who asks what of whom, and when
        self, node: str, event: ev.LoadAsked, world_size: int, take: TakeIncarnation, saves: Saves, now: float
    ) -> list[Action]:
        """A rank wants to restore. take: asks for the number with which the job goes on.

        The store is scanned only once the number's record is there: a commit that the scan misses finds the record.
        """
        actions: list[Action] = []
        if self._round is None:
            self._round = Round(now, event.step, event.run)
            self._ended = ""
            actions = [take]
        if (event.step, event.run) != (self._round.step, self._round.run):
            text = f"ranks ask for different steps: {self._round.step} and {event.step}"
            return self._refuse("usage", text, "call load with the same step and run on all ranks")
        if event.exchange is not None:
            self._round.exchanges[event.rank] = event.exchange
        if self._round.order is not None and self._round.choice is not None:  # the answer, or its daemon, was lost
            self._round.reported.discard(event.rank)
            return [ToNode(job=self._job, node=node, message=self._round.order)]
        self._round.asked.add(event.rank)
        return [*actions, *self._choose_when_ready(world_size, saves, now)]

    def scanned(self, event: ev.StoreScanned, world_size: int, saves: Saves, now: float) -> list[Action]:
        """What lies on the store is known, or that it does not answer."""
        if self._round is None or self._round.scan is not None or self._round.incarnation is None:
            return []
        if event.after < self._round.incarnation and not event.problem:
            return []  # it was asked for before the number was taken: a commit since then would be missed
        self._round.scan = event
        self._round.notes += event.notes
        if event.problem:
            self._round.notes.append(f"the store did not answer: {event.problem}")
        return self._choose_when_ready(world_size, saves, now)

    def incarnation_taken(self, number: int, run: RunId, scan: ScanStore) -> list[Action]:
        """The number, and the run, that the restored job goes on with. scan: asks what lies on the store now."""
        if self._round is None:
            return []
        self._round.incarnation, self._round.drawn = number, run
        return [replace(scan, after=number)]

    def is_outdated(self, at_least: int) -> bool:
        """Whether the load's number is known to be somebody else's too: it waits for another one, and its scan."""
        r = self._round
        if r is None or r.incarnation is None or r.choice is not None or r.incarnation >= at_least:
            return False
        r.incarnation, r.scan = None, None
        return True

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
        reasons: list[Reason] = []
        r.notes = list(dict.fromkeys([*r.notes, *self._strangers.notes]))
        disputed = self._disputed(r, saves)
        for save in candidates:
            if disputed is not None and disputed.incarnation >= save.incarnation:
                break
            size = saves.on_store[save].world_size if save in saves.on_store else saves.records[save].world_size
            if size != world_size or (save in saves.records and saves.records[save].shared):
                r.reshaped.add(save)
            whole = self._have_whole(r, save, world_size, saves, now) if save in r.reshaped else None
            if whole is not None:
                return whole
            if save in r.reshaped and save not in saves.on_store:
                actions = self._have_drained(r, save, saves, now)
                if actions is not None:
                    return actions
                reasons.append(self._not_drained(r, save, saves))
                continue
            routes = [self._route(r, save, rank) for rank in range(world_size)]
            tiers = [route[0] for route in routes if route is not None]
            if len(tiers) < world_size:
                lost = [rank for rank, route in enumerate(routes) if route is None]
                reasons.append(self._lost(r, save, lost))
                continue
            fetches = {
                (rank, self._routes.home(rank)): route[1]
                for rank, route in enumerate(routes)
                if route is not None and route[1] is not None
            }
            far = [rank for rank, tier in enumerate(tiers) if tier is Tier.PFS and save not in r.reshaped]
            why = self._routes.why_from_store(save, far)
            reasons += [Reason(f"{save}: {why}", lost=False)] if why else []
            r.ordered = now
            if fetches:
                return self._gather(r, save, fetches)
            r.notes = list(dict.fromkeys([*r.notes, *(reason.text for reason in reasons)]))
            return [self._order(r, save, tiers, saves)]
        if disputed is not None:
            return self._refuse_disputed(disputed)
        return self._nothing(r, candidates, reasons)

    def _disputed(self, r: Round, saves: Saves) -> SaveId | None:
        """The newest of which nothing tells whether it is this job's. None when the user says which run is meant."""
        if r.run is not None:
            return None
        on_store = [s for s in saves.on_store if self._lineage.is_disputed(s) and r.step in (None, s.step)]
        return max([*self._strangers.disputed(r.step), *on_store], key=lambda save: save.listed, default=None)

    def _refuse_disputed(self, save: SaveId) -> list[Action]:
        runs = [run.hex() for run in self._lineage.rivals(save.incarnation)]
        text = (
            f"{len(runs)} runs of job {self._job.job!r} had incarnation {save.incarnation}, and the store does not "
            f"tell which of them goes on: {', '.join(runs)}"
            if len(runs) > 1
            else f"run {runs[0]} of job {self._job.job!r}, which is in memory, had incarnation {save.incarnation}, and "
            "the store has never given that: it was emptied since, or is not the one to which that run was saved"
        )
        return self._refuse("restore", text, f"load(state, run={runs[0]!r}) for that one, or ckptd forget on its nodes")

    def _route(self, r: Round, save: SaveId, rank: int) -> tuple[Tier, ev.FetchOrdered | None] | None:
        if save in r.reshaped:
            return None if (save, Tier.PFS, rank) in r.damaged else (Tier.PFS, None)
        route = self._routes.tier(save, rank, r.damaged)
        if route is not None and route[0] is Tier.ARENA:
            return r.moved.get((save, rank, self._routes.home(rank)), Tier.ARENA), None
        return route

    def forget_round(self) -> None:
        """The load that seemed to begin is one that has ended before."""
        self._round = None

    def _have_whole(self, r: Round, save: SaveId, world_size: int, saves: Saves, now: float) -> list[Action] | None:
        """Has all segments brought to every node, then all ranks read there. None: not in memory, or not by all.

        Where replicas shared the save, a node gets those of its ranks' replicas, and all when that is not enough.
        """
        nodes = self._routes.nodes(world_size)
        if save in r.unwhole or save not in saves.records:
            return None
        record = saves.records[save]
        r.in_part = record.shared and record.world_size == world_size and save not in r.spread
        before = r.in_part or record.shared_by_all  # no more than the ranks held before
        if len(nodes) > (self._policy.shared_nodes if before else self._policy.whole_nodes):
            return None
        fetches: dict[tuple[int, str], ev.FetchOrdered] = {}
        for node in nodes:
            here = [rank for rank in range(world_size) if self._routes.home(rank) == node]
            for rank in record.needed_for(here) if r.in_part else range(record.world_size):
                if self._routes.lies_at(save, rank, node):
                    continue
                fetch = self._routes.fetch(save, rank, r.damaged, node)
                if fetch is None:
                    r.unwhole.add(save)
                    return None
                fetches[rank, node] = fetch
        r.ordered = now
        if fetches:
            return self._gather(r, save, fetches)
        tiers = [self._worst(r, save, self._routes.home(rank)) for rank in range(world_size)]
        return [self._order(r, save, tiers, saves, whole=True)]

    @staticmethod
    def _worst(r: Round, save: SaveId, node: str) -> Tier:
        """The farthest way that anything came to the node."""
        came = {tier for (moved, _, where), tier in r.moved.items() if (moved, where) == (save, node)}
        return next((tier for tier in (Tier.REBUILT, Tier.PEER) if tier in came), Tier.ARENA)

    def _have_drained(self, r: Round, save: SaveId, saves: Saves, now: float) -> list[Action] | None:
        """Has a checkpoint written to the store that lies in memory only, what is lost of it rebuilt first."""
        if save in r.given_up or save.incarnation == saves.disputed:
            return None
        size = saves.records[save].world_size
        missing = [rank for rank in range(size) if not self._routes.has(save, rank)]
        found = {rank: self._routes.fetch(save, rank, r.damaged) for rank in missing}
        fetches = {(rank, self._routes.home(rank)): order for rank, order in found.items() if order is not None}
        if len(fetches) < len(missing):
            return None
        if fetches:
            r.ordered = now
            return self._gather(r, save, fetches)
        if saves.newest_staged is not saves.records[save]:
            return None
        r.awaited, r.since = save, now
        return saves.drain_newest(now)

    def _not_drained(self, r: Round, save: SaveId, saves: Saves) -> Reason:
        """Why a checkpoint that must be on the store cannot come there."""
        size = saves.records[save].world_size
        lost = [rank for rank in range(size) if not self._routes.has(save, rank)]
        lost = [rank for rank in lost if self._routes.fetch(save, rank, r.damaged) is None]
        if lost:
            return self._lost(r, save, lost)
        why = "it could not be written there" if save in r.given_up else "a newer one, or another life, has its turn"
        return Reason(f"{save}, of {size} ranks, must be on the store to be read by these ranks: {why}", lost=False)

    def _lost(self, r: Round, save: SaveId, ranks: list[int]) -> Reason:
        damaged = {rank for one, _, rank in r.damaged if one == save}
        return Reason(f"{save}: {self._routes.why_not(save, ranks)}", lost=damaged.isdisjoint(ranks))

    def _gather(self, r: Round, save: SaveId, fetches: dict[tuple[int, str], ev.FetchOrdered]) -> list[Action]:
        r.gathered = save
        r.fetches = {key: ToNode(job=self._job, node=key[1], message=order) for key, order in fetches.items()}
        return list(r.fetches.values())

    def fetched(self, node: str, event: ev.SegmentFetched, world_size: int, saves: Saves, now: float) -> list[Action]:
        """A segment has come to a node, or cannot."""
        r = self._round
        if r is None or r.gathered != event.save or (event.rank, node) not in r.fetches:
            return []
        del r.fetches[event.rank, node]
        if event.problem:
            r.notes.append(f"{event.save}, rank {event.rank}, {WHERE[event.tier]}: {event.problem}")
            r.damaged.add((event.save, event.tier, event.rank))
        else:
            r.damaged.discard((event.save, Tier.ARENA, event.rank))
            r.moved[event.save, event.rank, node] = event.tier
        return self._choose_when_ready(world_size, saves, now)

    def peer_up(self, node: str) -> list[Action]:
        """It may not have heard what was ordered."""
        if self._round is None:
            return []
        return [order for (_, at), order in self._round.fetches.items() if at == node]

    def _candidates(self, r: Round, saves: Saves) -> list[SaveId]:
        found = sorted(self._routes.candidates() | set(saves.on_store), key=lambda save: save.listed, reverse=True)
        ours = [s for s in found if s.run == r.run] if r.run is not None else list(filter(self._lineage.is_ours, found))
        return [s for s in ours if r.step is None or s.step == r.step]

    def _order(self, r: Round, save: SaveId, tiers: list[Tier], saves: Saves, *, whole: bool = False) -> Action:
        r.choice, r.reported, r.failed = save, set(), False
        r.order = order = ev.LoadOrdered(
            job=self._job,
            node=self._node,
            incarnation=r.incarnation or 0,
            run=r.drawn,
            save=save,
            tiers=tuple(tiers),
            whole=whole,
            dirname=saves.on_store[save].dirname if save in saves.on_store else "",
            exchanges=() if whole else self._exchanges(r, tiers),
            notes=tuple(r.notes),
        )
        return ToNode(job=self._job, message=order)

    @staticmethod
    def _exchanges(r: Round, tiers: list[Tier]) -> tuple[tuple[int, ExchangeAddress], ...]:
        """Of the nodes that are sent to the store."""
        found = [(rank, exchange) for rank, exchange in sorted(r.exchanges.items()) if tiers[rank] is Tier.PFS]
        return tuple(found) if 1 < len(found) <= MAX_EXCHANGES else ()

    def _nothing(self, r: Round, candidates: list[SaveId], reasons: list[Reason]) -> list[Action]:
        found = Found(candidates, reasons, r.notes, self._strangers.notes, r.scan)
        said = answer(self._job, Asked(r.step, r.run), found, self._routes)
        if isinstance(said, Refusal):
            return self._refuse("restore", said.message, said.hint)
        self.agreed = order = ev.LoadOrdered(
            job=self._job, node=self._node, incarnation=r.incarnation or 0, run=r.drawn, notes=tuple(said)
        )
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
            whole = r.order is not None and r.order.whole
            (r.reshaped if not whole else r.spread if r.in_part else r.unwhole).add(event.save)
        elif event.problem and r.order is not None and r.order.whole:
            r.failed = True
            r.unwhole.add(event.save)
            r.notes.append(f"{event.save}, read by rank {event.rank}, {WHERE[event.tier]}: {event.problem}")
        elif event.problem:
            r.failed = True
            r.damaged.add((event.save, event.tier, event.rank))
            if event.tier is not Tier.PFS:  # whichever way it came, it lies at the rank's node now
                r.damaged.add((event.save, Tier.ARENA, event.rank))
                r.moved.pop((event.save, event.rank, self._routes.home(event.rank)), None)
            r.notes.append(f"{event.save}, rank {event.rank}, {WHERE[event.tier]}: {event.problem}")
        if len(r.reported) < world_size:
            return []
        if r.failed:
            return self._choose(r, world_size, saves, now)
        self.agreed = order = ev.LoadOrdered(
            job=self._job,
            node=self._node,
            incarnation=r.incarnation or 0,
            run=r.drawn,
            save=r.choice,
            agreed=True,
            notes=(*r.notes, *saves.notes_of(event.save)),
        )
        self._round, self.settled = None, r.choice if r.step is None else None
        return [ToNode(job=self._job, message=order)]

    def rank_gone(self, left: Departure) -> list[Action]:
        """A rank ended in the middle of the load: it cannot be agreed any more."""
        r = self._round
        return self._refuse("restore", *left.of_load(called=left.rank in r.asked)) if r is not None else []

    def node_gone(self, node: str, ranks: list[int]) -> list[Action]:
        """These ranks' node does not answer: neither do they."""
        if self._round is None or not ranks:
            return []
        return self._refuse(
            "restore", f"node {node} does not answer, where ranks {few(ranks)} run", "start the job again"
        )

    def hopeless(self, why: str) -> list[Action]:
        """Some rank will never join, if why is not empty."""
        return self._refuse("restore", why, "start all ranks again, alike") if why and self._round is not None else []

    def replaced(self) -> list[Action]:
        """Another session is the job now."""
        self.settled = None
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
            late = sorted({rank for rank, _ in r.fetches})
            if r.gathered is not None:
                r.unwhole.add(r.gathered)
                r.damaged |= {(r.gathered, tier, rank) for rank in late for tier in (Tier.PEER, Tier.REBUILT)}
            r.notes.append(f"{r.gathered}: the segments of ranks {few(late)} did not come")
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
