"""How the ranks of a job agree on what to restore, at the coordinator. Pure.

All ranks ask; the newest checkpoint that every rank can read wins; every rank reads and checks it; only when all
succeeded is the load agreed. A copy found damaged is not offered again: the same checkpoint by another route
comes first, then an older one.

What does not lie at a rank's node is fetched into its arena first: from a peer's arena, or rebuilt from parity.

Of a checkpoint of another world size, or whose boxes lie otherwise on the ranks now, each rank may need any image: what
no node has is rebuilt, and each rank pulls what it needs from the nodes that have the others. If it cannot, it is read
from the store, and one that is only in memory is drained first.
"""

from collections.abc import Iterable
from typing import Any

from msgspec.structs import replace

from ckptd.core import events as ev
from ckptd.core.actions import Action, ScanStore, TakeIncarnation, ToNode
from ckptd.core.coordinator.departures import Departure
from ckptd.core.coordinator.empty_loads import Asked, Found, Reason, Refusal, answer
from ckptd.core.coordinator.job_state import JobState
from ckptd.core.coordinator.load_round import Round
from ckptd.core.coordinator.locations import Routes
from ckptd.core.coordinator.restore_states import RESTORE, Loading, LoadOn
from ckptd.core.coordinator.save_record import Record, few
from ckptd.core.coordinator.strangers import Strangers
from ckptd.shared.base.ids import RunId, SaveId
from ckptd.shared.protocol.messages import Tier
from ckptd.shared.protocol.tier_runs import Tiers


class Restores:
    """The one load that may run in a job."""

    def __init__(self, facts: JobState, routes: Routes, strangers: Strangers) -> None:
        self._job, self._node, self._policy = facts.job, facts.node, facts.policy
        self._sessions, self._saves = facts.session, facts
        self._routes = routes
        self._strangers = strangers
        self._lineage = strangers.lineage
        self.agreed: ev.LoadOrdered | None = None  # the last load that this session agreed on, or that found nothing
        self._round: Round | None = None
        self.settled: SaveId | None = None  # the newest that could be restored, and was, in this session
        self._ended = "no load is running"  # the answer to a rank that reports on a finished one

    @property
    def _world_size(self) -> int:
        return self._sessions.world_size

    @property
    def running(self) -> Round | None:
        """The load that is in progress."""
        return self._round

    @property
    def callers(self) -> tuple[float | None, set[int]]:
        """Since when a load waits for ranks to call it, None when none does, and which ranks have."""
        r = self._round
        return (r.since, r.asked) if r is not None and r.state is not Loading.READING else (None, set())

    def _move(self, r: Round, on: LoadOn) -> bool:
        """Returns whether the table has that row; False: nothing else may follow."""
        if (step := RESTORE.step(r.state, on)) is None:
            return False
        self._round, r.state = (r, step.after) if step.after is not None else (None, r.state)
        return True

    @property
    def wants_incarnation(self) -> bool:
        """Whether the load still waits for its incarnation number."""
        return self._round is not None and self._round.incarnation is None

    def asked(self, node: str, event: ev.LoadsAsked, take: TakeIncarnation, now: float) -> list[Action]:
        """Ranks of a node want to restore. take: asks for the number with which the job continues.

        The store is scanned only once the number's record is there: a commit that the scan misses finds the record.
        """
        actions: list[Action] = []
        if self._round is None:
            self._round, self._ended = Round(now, event.step, event.run, RESTORE.begin(LoadOn.CALLED)), ""
            actions = [take]
        if (event.step, event.run) != (self._round.step, self._round.run):
            text = f"ranks ask for different steps: {self._round.step} and {event.step}"
            return self._refuse("usage", text, "call load with the same step and run on all ranks")
        if (r := self._round).order is not None and r.state is Loading.READING:  # the answer, or its daemon, was lost
            r.reported.difference_update(event.ranks)
            return [ToNode(job=self._job, node=node, message=r.order)]
        self._round.asked.update(event.ranks)
        return actions

    def scanned(self, event: ev.StoreScanned) -> None:
        """What lies on the store is known, or that it does not answer."""
        if self._round is None or self._round.scan is not None or self._round.incarnation is None:
            return
        if event.after < self._round.incarnation and not event.problem:
            return  # it was asked for before the number was taken: a commit since then would be missed
        self._round.scan = event
        self._round.notes += event.notes
        if event.problem:
            self._round.notes.append(f"the store did not answer: {event.problem}")

    def incarnation_taken(self, number: int, run: RunId, scan: ScanStore) -> list[Action]:
        """The number, and the run, that the restored job continues with. scan: asks what lies on the store now."""
        if self._round is None:
            return []
        self._round.incarnation, self._round.drawn = number, run
        return [replace(scan, after=number)]

    def is_outdated(self, at_least: int) -> bool:
        """Whether the load's number is known to be somebody else's too: it waits for another one, and its scan."""
        r = self._round
        if r is None or r.incarnation is None or r.state is Loading.READING or r.incarnation >= at_least:
            return False
        r.incarnation, r.scan = None, None
        return True

    def react(self, now: float) -> list[Action]:
        """What follows from the facts, as they are now."""
        actions, r = self._hopeless(), self._round
        if r is None:
            return actions
        if (save := r.awaited) is not None and (
            save in self._saves.on_store or save.incarnation == self._saves.disputed
        ):
            self._waits_no_more(r, LoadOn.STORED)
        known = r.state is Loading.COLLECTING and r.scan is not None and r.incarnation is not None
        ready = known and len(r.asked) >= self._world_size and self._saves.inventory.complete
        return self._choose(r, now) if ready else actions

    def _waits_no_more(self, r: Round, on: LoadOn) -> None:
        if self._move(r, on):
            r.awaited, r.fetches, r.gather, r.gathering = None, {}, None, set()

    def new_session(self) -> list[Action]:
        """Another session is the job now."""
        self.settled = None
        if self.agreed is not None and self.agreed.incarnation < self._sessions.incarnation:
            self.agreed = None
        return self._refuse("stale", "another session took the job over", "")

    def resumed(self, order: ev.LoadOrdered, later: set[int], *, asked_here: bool) -> None:
        """A load had ended before this daemon started. later: who asks for another. asked_here: a rank has since."""
        self.agreed = order
        if (r := self._round) is not None and not asked_here:
            r.asked &= later
            if not r.asked:
                self._move(r, LoadOn.ENDED_BEFORE)

    @property
    def awaited(self) -> SaveId | None:
        """The checkpoint that must be on the store first."""
        return self._round.awaited if self._round is not None else None

    def _choose(self, r: Round, now: float) -> list[Action]:
        candidates = self._candidates(r)
        r.choice, r.gathered = None, None
        reasons: list[Reason] = []
        r.notes = list(dict.fromkeys([*r.notes, *self._strangers.notes]))
        disputed = self._disputed(r)
        for save in candidates:
            if disputed is not None and disputed.incarnation >= save.incarnation:
                break
            record = self._saves.records.get(save)
            size = self._saves.world_size_of(save)
            if size != self._world_size or (record is not None and record.shared):
                r.reshaped.add(save)
            near = self._have_near(r, save, now) if save in r.reshaped else None
            if near is not None:
                return near
            if save in r.reshaped and save not in self._saves.on_store:
                actions = self._have_drained(r, save, now)
                if actions is not None:
                    return actions
                reasons.append(self._not_drained(r, save))
                continue
            routes = [self._route(r, save, rank) for rank in range(self._world_size)]
            tiers = [route[0] for route in routes if route is not None]
            if len(tiers) < self._world_size:
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
            return self._order(r, save, tiers)
        if disputed is not None:
            return self._refuse_disputed(disputed)
        return self._nothing(r, candidates, reasons)

    def _disputed(self, r: Round) -> SaveId | None:
        """The newest of which no record shows whether it is this job's. None when the user says which run is meant."""
        if r.run is not None:
            return None
        on_store = [s for s in self._saves.on_store if self._lineage.is_disputed(s) and r.step in (None, s.step)]
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

    def _have_near(self, r: Round, save: SaveId, now: float) -> list[Action] | None:
        """Has all ranks read what others have in memory. None: not there, or not for all.

        Where replicas shared the save, a node gets those of its ranks' replicas; where that is not enough, or the ranks
        are others, each pulls what it needs.
        """
        record = self._saves.records.get(save)
        if save in r.unwhole or record is None:
            return None
        r.in_part = record.shared and record.world_size == self._world_size and save not in r.spread
        if not r.in_part:
            return self._have_pulled(r, record, now)
        nodes = self._routes.nodes(self._world_size)
        if r.is_gathered(save):
            fetches = self._routes.missing_at(record, r.open_gaps(save), r.damaged)
        else:
            fetches = self._routes.missing_at_homes(record, r.damaged)
        if fetches is None:
            r.unwhole.add(save)
            return None
        r.ordered = now
        if fetches:
            return self._gather(r, save, fetches)
        if not r.is_gathered(save):
            begins = self._move(r, LoadOn.MISSING)
            return [r.begin_gather(self._job, self._node, record, nodes)] if begins else []
        came = r.farthest(save)
        tiers = [came.get(self._routes.home(rank), Tier.ARENA) for rank in range(self._world_size)]
        return self._order(r, save, tiers, whole=True)

    def _have_pulled(self, r: Round, record: Record, now: float) -> list[Action] | None:
        """Has each rank pull what it needs, once some node has each segment."""
        found = self._routes.anywhere(record, r.damaged, r.moved)
        if found is None:
            r.unwhole.add(record.save)
            return None
        r.ordered = now
        if found.fetches:
            return self._gather(r, record.save, found.fetches)
        homes = (self._routes.home(rank) for rank in range(self._world_size))
        tiers = [r.tier_of(home, found.homes, record.save) for home in homes]
        return self._order(r, record.save, tiers, saved_by=record.world_size, holders=found.holders)

    def _have_drained(self, r: Round, save: SaveId, now: float) -> list[Action] | None:
        """Has a checkpoint written to the store that lies in memory only, what is lost of it rebuilt first."""
        if save in r.given_up or save.incarnation == self._saves.disputed:
            return None
        size = self._saves.records[save].world_size
        missing = [rank for rank in range(size) if not self._routes.has(save, rank)]
        found = {rank: self._routes.fetch(save, rank, r.damaged) for rank in missing}
        fetches = {(rank, self._routes.home(rank)): order for rank, order in found.items() if order is not None}
        if len(fetches) < len(missing):
            return None
        if fetches:
            r.ordered = now
            return self._gather(r, save, fetches)
        if self._saves.newest_staged is not self._saves.records[save]:
            return None
        if self._move(r, LoadOn.UNSTORED):
            r.awaited, r.since = save, now
        return []  # the drain follows

    def _not_drained(self, r: Round, save: SaveId) -> Reason:
        """Why a checkpoint that must be on the store cannot come there."""
        size = self._saves.records[save].world_size
        lost = [rank for rank in range(size) if not self._routes.has(save, rank)]
        lost = [rank for rank in lost if self._routes.fetch(save, rank, r.damaged) is None]
        if lost:
            return self._lost(r, save, lost)
        why = "it could not be written there" if save in r.given_up else "a newer save or another run goes first"
        return Reason(f"{save}, of {size} ranks, must be on the store to be read by these ranks: {why}", lost=False)

    def _lost(self, r: Round, save: SaveId, ranks: list[int]) -> Reason:
        damaged = {rank for one, _, rank in r.damaged if one == save}
        return Reason(f"{save}: {self._routes.why_not(save, ranks)}", lost=damaged.isdisjoint(ranks))

    def _gather(self, r: Round, save: SaveId, fetches: dict[tuple[int, str], ev.FetchOrdered]) -> list[Action]:
        if not self._move(r, LoadOn.MISSING):
            return []
        r.gathered = save
        r.fetches = {key: ToNode(job=self._job, node=key[1], message=order) for key, order in fetches.items()}
        return list(r.fetches.values())

    def fetched(self, node: str, event: ev.SegmentFetched) -> None:
        """A segment has come to a node, or cannot."""
        r = self._round
        if r is None or r.gathered != event.save or (event.rank, node) not in r.fetches:
            return
        r.arrived(node, event)
        if not r.fetches:
            self._move(r, LoadOn.CAME)

    def gathered(self, node: str, event: ev.SegmentsGathered, _now: float) -> list[Action]:
        """A node has what its ranks need of others, or cannot have all of it."""
        r = self._round
        if r is not None and r.has_gathered(node, event, self._world_size) and not r.gathering:
            self._move(r, LoadOn.CAME)
        return []

    def peer_up(self, node: str) -> list[Action]:
        """It may not have received what was ordered."""
        r = self._round
        if r is None:
            return []
        fetches: list[Action] = [order for (_, at), order in r.fetches.items() if at == node]
        again = [ToNode(job=self._job, node=node, message=r.gather)] if r.gather and node in r.gathering else []
        return [*fetches, *again]

    def _candidates(self, r: Round) -> list[SaveId]:
        found = sorted(
            self._routes.candidates() | set(self._saves.on_store), key=lambda save: save.listed, reverse=True
        )
        ours = [s for s in found if s.run == r.run] if r.run is not None else list(filter(self._lineage.is_ours, found))
        return [s for s in ours if r.step is None or s.step == r.step]

    def _ordered(self, r: Round, notes: Iterable[str], **fields: Any) -> ev.LoadOrdered:
        number = r.incarnation or 0
        return ev.LoadOrdered(
            job=self._job, node=self._node, incarnation=number, run=r.drawn, notes=tuple(notes), **fields
        )

    def _order(self, r: Round, save: SaveId, tiers: list[Tier], **where: Any) -> list[Action]:
        if not self._move(r, LoadOn.SENT):
            return []
        r.choice, r.reported, r.failed, r.attempts = save, set(), False, r.attempts + 1
        dirname = self._saves.on_store[save].dirname if save in self._saves.on_store else ""
        r.order = self._ordered(
            r, r.notes, save=save, tiers=Tiers.of(tiers), dirname=dirname, attempt=r.attempts, **where
        )
        return [ToNode(job=self._job, message=r.order)]

    def _nothing(self, r: Round, candidates: list[SaveId], reasons: list[Reason]) -> list[Action]:
        found = Found(candidates, reasons, r.notes, self._strangers.notes, r.scan)
        said = answer(self._job, Asked(r.step, r.run), found, self._routes)
        if isinstance(said, Refusal):
            return self._refuse("restore", said.message, said.hint)
        if not self._move(r, LoadOn.EMPTY):
            return []
        self.agreed = order = self._ordered(r, said)
        return [ToNode(job=self._job, message=order)]

    def reported(self, event: ev.LoadsReported) -> list[Action]:
        """Ranks of a node read their bytes, or could not."""
        r = self._round
        if r is None or r.state is not Loading.READING or event.save != r.choice:
            text = self._ended or f"the load of {event.save} is over"
            refusal = ev.LoadRefused(job=self._job, node=self._node, code="restore", message=text)
            return [ToNode(job=self._job, message=replace(refusal, rank=rank)) for rank in event.ranks]
        for failure in event.failures:
            if failure.cause is ev.Cause.MISFIT:
                return self._refuse("mismatch", f"rank {failure.rank}, {event.save}: {failure.problem}", "")
            r.could_not_read(event.save, failure, self._routes.home(failure.rank))
        r.reported.update(event.ranks)
        if len(r.reported) < self._world_size:
            return []
        if r.failed:
            self._move(r, LoadOn.UNREAD)
            return []
        if not self._move(r, LoadOn.AGREED):
            return []
        notes = (*r.notes, *self._saves.notes_of(event.save))
        self.agreed = order = self._ordered(r, notes, save=r.choice, agreed=True)
        self.settled = r.choice if r.step is None and r.run is None else None
        return [ToNode(job=self._job, message=order)]

    def rank_gone(self, left: Departure) -> list[Action]:
        """A rank ended in the middle of the load: it cannot be agreed any more."""
        r = self._round
        return self._refuse("restore", *left.of_load(called=r is not None and left.rank in r.asked))

    def node_gone(self, node: str, ranks: list[int]) -> list[Action]:
        """These ranks' node does not answer: neither do they."""
        text = f"node {node} does not answer, where ranks {few(ranks)} run"
        return self._refuse("restore", text, "start the job again") if ranks else []

    def _hopeless(self) -> list[Action]:
        """Some rank will never join."""
        why = self._sessions.incomplete if self._round is not None else ""
        return self._refuse("restore", why, "start all ranks again, alike") if why else []

    def next_deadline(self) -> float | None:
        """When ranks that wait for others have waited long enough."""
        r = self._round
        if r is None:
            return None
        if r.state in {Loading.COLLECTING, Loading.DRAINING}:
            return r.since + self._policy.stage_timeout_s
        return r.ordered + self._policy.read_timeout_s

    def tick(self, now: float) -> list[Action]:
        """Ends a load that some rank never joined, or in which one does not come back from its read."""
        r, deadline = self._round, self.next_deadline()
        if r is None or deadline is None or now < deadline:
            return []
        if r.state is Loading.COLLECTING:
            missing = sorted(set(range(self._world_size)) - r.asked)
            return self._refuse("restore", f"ranks {missing} did not call load", "call load on every rank")
        if r.state is Loading.READING:
            ranks = few(sorted(set(range(self._world_size)) - r.reported))
            text = (
                f"ranks {ranks} did not report within {self._policy.read_timeout_s:g} s that they have read {r.choice}"
            )
            hint = "end these ranks and start the job again; a longer time: read_timeout_s"
            return self._refuse("restore", text, hint)
        r.waits_in_vain()
        self._waits_no_more(r, LoadOn.LATE)
        return []

    def _refuse(self, code: str, message: str, hint: str) -> list[Action]:
        if self._round is None or not self._move(self._round, LoadOn.REFUSED):
            return []
        self._ended = message
        order = ev.LoadRefused(job=self._job, node=self._node, code=code, message=message, hint=hint)
        return [ToNode(job=self._job, message=order)]

    def check(self) -> None:
        """Asserts what must always hold."""
        r = self._round
        if r is not None:
            assert bool(r.fetches or r.gathering) == (r.state is Loading.FETCHING), f"{r.state}, with {r.fetches}"  # noqa: S101
            assert (r.awaited is not None) == (r.state is Loading.DRAINING), f"{r.state}, for {r.awaited}"  # noqa: S101
            assert r.choice is not None or r.state is not Loading.READING, "ranks read nothing"  # noqa: S101
