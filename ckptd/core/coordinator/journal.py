"""What is worth a record in the job's journal: read off what its coordinator announces to all nodes. Pure.

A save has a record of each milestone that its ranks learn, and of no other. The daemon that writes the record fills in
the time of day: here is only a steady clock.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ckptd import __version__
from ckptd.core import events as ev
from ckptd.core.actions import Action, KeepEntry, Note, ToNode
from ckptd.core.coordinator.coordinator import Coordinator
from ckptd.core.coordinator.departures import How
from ckptd.core.coordinator.save_record import Record
from ckptd.shared.base.ids import NO_RUN, Run, SaveId
from ckptd.shared.format.schemes import Scheme
from ckptd.shared.protocol import journal as log
from ckptd.shared.protocol.messages import Cadence, End, Tier
from ckptd.shared.protocol.tier_runs import Tiers
from ckptd.shared.protocol.topology import Topology

_MOST_LOST = 16  # losses in a row that have a record each; the others are added up
_CLOSED = frozenset({How.CLOSED, How.FAILED})
_MOST_TEXTS = 64  # problems that are known to be the same again


class _Present(NamedTuple):
    """The run whose records are written."""

    session: str
    run: Run
    since: float
    again: bool
    world_size: int = 1  # where no session is known


class Journal:
    """Of one job, as its coordinator sees it. ``follow`` is called after each of its turns."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._present: _Present | None = None  # None: nobody has been in yet
        self._over = True  # the run has ended; its last save may still become durable
        self._began: log.RunBegan | None = None  # the record of the present run, once it has one
        self._draft: tuple[Topology | None, log.RunBegan] | None = None  # it would be this, as of the last turn
        self._out: list[Action] = []
        self._down: dict[str, bool] = {}  # nodes that do not answer, and whether something lay there
        self._gone: set[int] = set()  # ranks that ended without a word
        self._losses = 0  # since a save was staged
        self._others: list[tuple[str, int]] = []  # losses without a record of their own: node, ranks
        self._said: dict[str, list[int]] = {}  # problem -> times since its last record, times in all
        self._reached = (0, -1)  # incarnation and step that ranks reported last by client.step
        self._load_since: float | None = None
        self._tiers = Tiers()  # as the ranks were sent to read last
        self._committed: SaveId | None = None  # in this turn; what is found on the store is on record before
        self._told: dict[type[ev.Message], Callable[[Any, float], None]] = {
            ev.SaveStaged: self._was_staged,
            ev.SaveProtected: self._was_protected,
            ev.SaveEnded: self._was_ended,
            ev.LoadOrdered: self._load_ordered,
            ev.LoadRefused: self._load_refused,
        }

    def follow(self, event: ev.Event | None, actions: Sequence[Action], now: float) -> list[Action]:
        """What to record of a turn of the coordinator. event: that it was about; None: something was due."""
        out = self._out = []
        self._follow_run(event, now)
        self._committed = event.save if isinstance(event, ev.CommitEnded) else None
        if isinstance(event, ev.StepReached) and not self._over and event.session == self._coordinator.sessions.session:
            self._reached = self._coordinator.sessions.incarnation, event.step
            self._write(log.Steps(at=0, step=event.step), now, event.ago_s)
        for one in _facts(event):
            self._heard(*one, now)
        for action in actions:
            if isinstance(action, Note):
                self._problem(action.text, now)
            elif isinstance(action, ToNode) and action.node is None:
                self._announced(action.message, now)
        self._follow_end(now)
        self._follow_topology()
        return out

    # --- runs

    def _follow_run(self, event: ev.Event | None, now: float) -> None:
        """The session, or the run that it has since a load, may be another one than before."""
        sessions, present = self._coordinator.sessions, self._present
        run = (sessions.incarnation, sessions.run)
        same = present is not None and (present.session, present.run) == (sessions.session, run)
        lives = sessions.attended and sessions.run != NO_RUN and not self._coordinator.saves.fence.taken_over
        if same and not (self._over and lives):
            return
        if not same and present is not None and not self._over:
            if present.session == sessions.session and self._began is None:  # it began with its load
                self._begin(present._replace(run=run, again=False))
                return
            self._end("loaded" if present.session == sessions.session else "taken over", now)
        if lives:
            began = isinstance(event, ev.IncarnationTaken) or bool(present and present.session == sessions.session)
            self._begin(_Present(sessions.session, run, now, again=same or not began))
        elif not same:
            self._present = None

    def _follow_end(self, now: float) -> None:
        sessions = self._coordinator.sessions
        if self._over:
            return
        if self._coordinator.saves.fence.taken_over:
            self._end("taken over", now)
        elif not sessions.peopled:
            ways = {How.LEFT} if sessions.members else {one.how for one in sessions.departed.values()}
            self._end("closed" if ways <= {How.CLOSED} else "failed" if ways <= _CLOSED else "lost", now)

    def _follow_topology(self) -> None:
        """Where the run is: another session may be the job when it has its first record, its end."""
        topology = self._coordinator.sessions.topology
        if (
            self._present is not None
            and self._began is None
            and (self._draft is None or self._draft[0] is not topology)
        ):
            self._draft = topology, self._as_begun(self._present)

    def _begin(self, present: _Present) -> None:
        self._present, self._began, self._draft, self._over = present, None, None, False
        self._down, self._gone, self._losses, self._others, self._said = {}, set(), 0, [], {}

    def _end(self, how: str, now: float) -> None:
        self._write(log.RunEnded(at=0, how=how), now)
        self._over = True

    def _as_begun(self, present: _Present) -> log.RunBegan:
        sessions = self._coordinator.sessions
        placement = sessions.placement
        nodes = len(placement.nodes) if placement is not None else len(sessions.members.nodes)
        topology = placement.topology if placement is not None else None
        return log.RunBegan(
            at=0,
            incarnation=present.run[0],
            run=present.run[1],
            world_size=sessions.world_size or present.world_size,
            nodes=max(1, nodes),
            coordinator=self._coordinator.facts.node,
            scheme=str(topology.scheme) if topology is not None else "none",
            set_size=topology.set_size if topology is not None and topology.scheme is not Scheme.NONE else 0,
            drain_every=_as_given(sessions.cadence),
            version=__version__,
            again=present.again,
        )

    def _write(self, entry: log.Entry, now: float, ago_s: float = 0.0) -> None:
        if (present := self._present) is None:
            return
        self._began = self._began or (self._draft[1] if self._draft is not None else self._as_begun(present))
        if self._others and not isinstance(entry, log.Lost):
            others, self._others = self._others, []
            nodes = len({node for node, _ in others})
            lost = log.Lost(at=0, node=f"{nodes} more", what="ranks", ranks=sum(ranks for _, ranks in others))
            self._keep(lost, present, now)
        self._keep(entry, present, now, ago_s)

    def _keep(self, entry: log.Entry, present: _Present, now: float, ago_s: float = 0.0) -> None:
        assert self._began is not None  # noqa: S101 - the caller made it
        age_s = now - present.since
        self._out.append(KeepEntry(job=self._coordinator.job, began=self._began, entry=entry, age_s=age_s, ago_s=ago_s))

    # --- saves

    def _announced(self, message: ev.Message, now: float) -> None:
        if (told := self._told.get(type(message))) is not None:
            told(message, now)

    def _incarnation_of(self, save: SaveId) -> int:
        """As a record has it."""
        return 0 if self._present is not None and save.owner == self._present.run else save.incarnation

    def _was_staged(self, order: ev.SaveStaged, now: float) -> None:
        save, record = order.save, self._coordinator.facts.records.get(order.save)
        if record is None:
            return
        self._losses = 0
        if self._incarnation_of(save):
            return  # it was found, and is on record since it was saved
        self._write(
            log.Staged(
                at=0,
                counter=save.counter,
                step=save.step,
                nbytes=record.nbytes,
                seconds=0.0 if record.adopted else now - min(record.since, record.left),
                stall_s=record.stall_s,
                mean_stall_s=record.stalls_s / max(1, record.world_size),
                late_nbytes=record.late_nbytes,
            ),
            now,
        )

    def _was_protected(self, order: ev.SaveProtected, now: float) -> None:
        save = order.save
        if not self._incarnation_of(save):
            seconds = _staged_s(self._coordinator.facts.records.get(save), now)
            self._write(log.Protected(at=0, counter=save.counter, seconds=seconds), now)

    def _was_ended(self, order: ev.SaveEnded, now: float) -> None:
        save, record = order.save, self._coordinator.facts.records.get(order.save)
        if record is None:
            return
        incarnation = self._incarnation_of(save)
        if order.end is not End.DURABLE:
            expected = order.end in {End.KEPT, End.SUPERSEDED}  # the settings explain it
            text = _cut(record.error if expected else order.reason)
            ended = log.Ended(
                at=0, counter=save.counter, step=save.step, end=order.end, reason=text, incarnation=incarnation
            )
            if not (incarnation and expected):
                self._write(ended, now)
        elif record.drain_since is not None or save == self._committed or not incarnation:
            if self._present is None:  # its run ended, and nobody has come since this daemon began
                self._present = _Present("", save.owner, now, again=True, world_size=max(1, record.world_size))
                incarnation = 0
            there, drain = self._coordinator.facts.on_store.get(save), self._coordinator.facts.last_drain
            self._write(
                log.Durable(
                    at=0,
                    counter=save.counter,
                    seconds=_staged_s(record, now),
                    drain_s=drain.seconds if drain is not None and drain.save == save else 0.0,
                    nbytes=there.nbytes if there is not None else record.nbytes,
                    tries=record.failures + 1,
                    incarnation=incarnation,
                ),
                now,
            )

    # --- loads

    def _load_ordered(self, order: ev.LoadOrdered, now: float) -> None:
        if order.save is not None and not order.agreed:
            self._tiers = order.tiers
            return
        since, self._load_since = self._load_since, None
        if order.save is None:
            return
        save, facts = order.save, self._coordinator.facts
        record, there = facts.records.get(save), facts.on_store.get(save)
        before = [r.save.step for r in facts.records.values() if r.delivered and r.save.incarnation < order.incarnation]
        number, step = self._reached
        before += [step] if number < order.incarnation else []
        self._write(
            log.Restored(
                at=0,
                incarnation=save.incarnation,
                counter=save.counter,
                step=save.step,
                seconds=now - since if since is not None else 0.0,
                tiers=_counted(self._tiers, self._coordinator.sessions.world_size),
                nbytes=there.nbytes if there is not None else nbytes_of(record),
                newest=max(before, default=-1),
            ),
            now,
        )

    def _load_refused(self, order: ev.LoadRefused, now: float) -> None:
        if order.rank is None:
            self._load_since = None
            self._problem(f"load: {order.message}", now)

    # --- losses, and what goes wrong

    def _heard(self, node: str, fact: ev.Event, now: float) -> None:
        """A fact that a node reports, or that is known here."""
        sessions = self._coordinator.sessions
        match fact:
            case ev.LoadsAsked() if self._coordinator.restores.running:
                self._load_since = now if self._load_since is None else self._load_since
            case ev.ScrubFound():
                self._damaged(node, fact, now)
            case ev.PeerDown() if not self._over and node in sessions.nodes and node not in self._down:
                self._down[node] = node in self._coordinator.facts.places
                ranks = len(sessions.members.at(node))
                if ranks or self._down[node]:  # else its daemon has left with its last rank
                    self._lost(node, "node", ranks, now)
            case ev.NodeHas():
                if self._down.pop(node, False) and not fact.segments and not fact.chunks:
                    self._lost(node, "arena", 0, now)
            case ev.RanksGone(session=sessions.session, ranks=ranks):
                gone = {rank for rank in ranks if rank in sessions.departed} - self._gone
                gone = {rank for rank in gone if sessions.departed[rank].how is How.ENDED}
                self._gone |= gone
                if gone:
                    self._lost(node, "ranks", len(gone), now)

    def _lost(self, node: str, what: str, ranks: int, now: float) -> None:
        self._losses += 1
        if self._losses > _MOST_LOST:
            self._others.append((node, ranks))
        else:
            self._write(log.Lost(at=0, node=node, what=what, ranks=ranks), now)

    def _damaged(self, node: str, found: ev.ScrubFound, now: float) -> None:
        """Memory is scrubbed, and the store is, when no rank is in, too."""
        save = found.save
        if self._present is None:
            self._present = _Present("", save.owner, now, again=True)
        entry = log.Damaged(
            at=0, incarnation=save.incarnation, counter=save.counter, step=save.step, node=node, tier=found.tier,
            rank=-1 if found.rank is None else found.rank, what=_cut(found.what), mended=_cut(found.mended),
        )  # fmt: skip
        self._write(entry, now)

    def _problem(self, text: str, now: float) -> None:
        """The first time, then when it was said as often again as before."""
        text = _cut(text)
        times = self._said.setdefault(text, [0, 0])
        times[0], times[1] = times[0] + 1, times[1] + 1
        for oldest in list(self._said)[:-_MOST_TEXTS]:
            del self._said[oldest]
        if times[1].bit_count() == 1:
            since, times[0] = times[0], 0
            self._write(log.Problem(at=0, text=text, times=since), now)


def nbytes_of(record: Record | None) -> int:
    """Of all images of a save; 0: not known."""
    return record.nbytes if record is not None and len(record.delivered) == record.world_size else 0


def _facts(event: ev.Event | None) -> list[tuple[str, ev.Event]]:
    """What nodes report, or what is known of one here."""
    match event:
        case ev.Report():
            return [(event.node, event.event)]
        case ev.Reports():
            return [(one.node, one.event) for one in event.reports]
        case ev.PeerDown():
            return [(event.node, event)]
    return []


def _cut(text: str) -> str:
    return text[: log.MAX_TEXT_CHARS]


def _as_given(cadence: Cadence) -> str:
    """As a user gives it."""
    if cadence.seconds and not math.isinf(cadence.seconds):
        return f"{cadence.seconds:g}s"
    return str(cadence.steps) if cadence.steps else "never" if cadence.seconds else "auto"


def _counted(tiers: Tiers, world_size: int) -> dict[Tier, int]:
    """Ranks, by where each reads."""
    found: dict[Tier, int] = {}
    for run in tiers.others:
        found[run.tier] = found.get(run.tier, 0) + run.count
    usual = world_size - sum(found.values())
    return {tiers.usual: usual, **found} if usual > 0 else found


def _staged_s(record: Record | None, now: float) -> float:
    """Since it was staged; 0: not known."""
    return now - record.staged_at if record is not None and record.staged_at is not None else 0.0
