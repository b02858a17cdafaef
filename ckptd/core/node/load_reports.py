"""What the ranks of this node say in a load, folded into one report of the node. Pure.

A report goes out once every rank here waits for the coordinator, or HOLD_S after its first part: so ranks that are late
are known at the coordinator by their numbers, and a node whose ranks come together sends one message.
"""

from collections.abc import Callable, Iterable

from ckptd.core import events as ev
from ckptd.core.actions import Action
from ckptd.core.node.ranks import LocalRank, LocalRanks
from ckptd.shared.base.ids import JobKey
from ckptd.shared.protocol.messages import Tier

HOLD_S = 0.05


class LoadReports:
    """``report`` makes the action that sends to the coordinator."""

    def __init__(self, job: JobKey, ranks: LocalRanks, report: Callable[[ev.Fact], Action]) -> None:
        self._job = job
        self._ranks = ranks
        self._report = report
        self._held: dict[int, ev.LoadAsked | ev.LoadReported] = {}  # by rank: said, and not sent yet
        self._until: float | None = None  # when that is sent at the latest; None: not known before the next tick

    def said(self, event: ev.LoadAsked | ev.LoadReported) -> list[Action]:
        """A rank asks, or says what became of its reading."""
        self._held[event.rank] = event
        urgent = isinstance(event, ev.LoadReported) and event.fatal
        complete = all(local.waits_for_load for local in self._ranks.admitted.values())
        return self._send() if urgent or complete else []

    def repeat(self) -> list[ev.LoadsAsked]:
        """What ranks wait for, for a coordinator that may not have received it."""
        self._held, self._until = {}, None
        waiting = [local for local in self._ranks.admitted.values() if local.waits_for_load]
        return self._asks((w.load_asked for w in sorted(waiting, key=_number) if w.load_asked is not None), again=True)

    def next_deadline(self) -> float | None:
        """When to call tick."""
        return (self._until or 0.0) if self._held else None

    def tick(self, now: float) -> list[Action]:
        """Sends what has been held for long enough."""
        if not self._held:
            return []
        self._until = self._until if self._until is not None else now + HOLD_S
        return self._send() if now >= self._until else []

    def _send(self) -> list[Action]:
        held, self._held, self._until = self._held, {}, None
        here = [event for rank, event in sorted(held.items()) if rank in self._ranks.admitted]
        asks = self._asks((event for event in here if isinstance(event, ev.LoadAsked)), again=False)
        reports = self._reports(event for event in here if isinstance(event, ev.LoadReported))
        return [*map(self._report, asks), *map(self._report, reports)]

    def _asks(self, events: Iterable[ev.LoadAsked], *, again: bool) -> list[ev.LoadsAsked]:
        alike: dict[tuple[object, ...], list[ev.LoadAsked]] = {}
        for event in events:
            alike.setdefault((event.session, event.step, event.run), []).append(event)
        return [
            ev.LoadsAsked(
                job=self._job, rank=first.rank, session=first.session, step=first.step, run=first.run, again=again,
                others=tuple(other.rank for other in others),
            )
            for first, *others in alike.values()
        ]  # fmt: skip

    def _reports(self, events: Iterable[ev.LoadReported]) -> list[ev.LoadsReported]:
        alike: dict[tuple[object, ...], list[ev.LoadReported]] = {}
        for event in events:
            alike.setdefault((event.session, event.save), []).append(event)
        return [
            ev.LoadsReported(
                job=self._job, rank=some[0].rank, session=some[0].session, save=some[0].save,
                others=tuple(other.rank for other in some[1:]),
                failures=tuple(
                    ev.LoadFailure(one.rank, one.tier, cause, one.problem, tuple(one.lacks))
                    for one in some
                    if (cause := _cause(one)) is not None
                ),
            )
            for some in alike.values()
        ]  # fmt: skip


def _cause(event: ev.LoadReported) -> ev.Cause | None:
    if event.fatal:
        return ev.Cause.MISFIT
    if event.reshape and event.tier is not Tier.PFS:  # there it had all images
        return ev.Cause.RESHAPE
    return ev.Cause.DAMAGED if event.problem else None


def _number(local: LocalRank) -> int:
    return local.rank
