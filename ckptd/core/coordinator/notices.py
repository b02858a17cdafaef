"""What the user of a job can change and should know: each reported once a session, to rank 0 and the status. Pure."""

import math

from msgspec.structs import replace

from ckptd.core import events as ev
from ckptd.core.actions import Action, Note, ToRank
from ckptd.core.coordinator.job_state import JobState
from ckptd.core.coordinator.save_record import Record
from ckptd.core.coordinator.save_states import State
from ckptd.core.coordinator.timings import Timings, distance_s
from ckptd.history.intervals import ROOM
from ckptd.shared.base.ids import SaveId

_AGAIN_AND_AGAIN = 3  # saves that were superseded; fewer may be one slow drain
_PATIENCE_S = 15.0  # with the first drain: until it has ended there is no measure of any
_FAILS = "fails: "
_TRIED_AGAIN = "training goes on, newer saves are tried, too; how it stands: ckptd status --arena {arena}"
_ROUND_S = 60  # from here on full tens are suggested
_WAYS_OUT = (
    "plain dcp.load does not read it: load it with client.load, load_from or ckptd_client.dcp.CkptdReader, or write it "
    "again: ckptd export --format dcp {path} OUT; connect(layout='plain') if nobody reads it otherwise"
)


class Notices:
    """Of one job, as its coordinator sees it."""

    def __init__(self, facts: JobState, timings: Timings) -> None:
        self._facts, self._job, self._arena = facts, facts.job, facts.policy.arena
        self._timings = timings
        self._sessions = facts.session
        self._session = ""  # the one that what was said was said to
        self._said: set[str] = set()
        self._seen: tuple[int, float | None] | None = None  # moves of saves, and when a drain that failed is repeated
        self._safe: SaveId | None = None  # the newest whose commit ended well: failures before it are past

    def committed(self, event: ev.CommitEnded) -> list[Action]:
        """A commit ended: whether what it made can be read by whom it was meant for."""
        if not event.problem and (self._safe is None or event.save > self._safe):
            self._safe = event.save
            self._said = {what for what in self._said if not what.startswith(_FAILS)}  # the next failure is reported
        if not event.left_out:
            return []
        ways_out = _WAYS_OUT.format(path=f"{self._job.store}/{self._job.job}")
        text = f"step {event.save.step} has no .metadata: {event.left_out}; {ways_out}"
        return self._say("left out", event.save, text)

    def react(self, now: float) -> list[Action]:
        """Looks at what has become of the saves: whether their drains fail, or the store is slower than they come."""
        seen = (self._facts.moves, self._facts.retry_at)
        if seen == self._seen:
            return []
        self._seen = seen
        ours = self._timings.due_saves()
        return [*self._failing(ours), *self._slow(ours, now)]

    def _failing(self, ours: list[Record]) -> list[Action]:
        """The newest drain that failed, if none has ended well since: without a word it is tried for hours."""
        failed = [r for r in ours if r.error and r.state is not State.DURABLE]
        failed = [r for r in failed if self._safe is None or r.save > self._safe]
        if not failed:
            return []
        record = max(failed, key=lambda r: r.save)
        text = f"step {record.save.step} is not durable: its drain to {self._job.store} failed: {record.error}"
        stuck = f"drains to {self._job.store} fail: {record.error}"
        return self._say(
            _FAILS + record.error,
            record.save,
            f"{text}; {_TRIED_AGAIN.format(arena=self._arena)}",
            noted=True,
            stuck=stuck,
        )

    def _slow(self, ours: list[Record], now: float) -> list[Action]:
        passed_over = [r for r in ours if r.state is State.SUPERSEDED and not r.error]
        if len(passed_over) < _AGAIN_AND_AGAIN:
            return []
        last, running_s = self._facts.last_drain, self._timings.running_s(now)
        took_s = last.seconds if last is not None else 0.0
        drain_s, every_s = max(took_s, running_s), distance_s(ours)
        if drain_s <= every_s or not (took_s or running_s > _PATIENCE_S):
            return []
        more = "more than " if running_s > took_s else ""
        text = (
            f"the store is slower than the saves: a drain takes {more}{drain_s:.3g} s, a save that is due comes every "
            f"{every_s:.3g} s, and {len(passed_over)} saves ended superseded before their turn came; "
            f"connect(drain_every='{_suggested_s(drain_s)}s') makes as many due as the store takes"
        )
        return self._say("slow store", max(r.save for r in passed_over), text)

    def _say(self, what: str, save: SaveId, text: str, *, noted: bool = False, stuck: str = "") -> list[Action]:
        """noted: the status and the log have it already. stuck: why no save becomes durable."""
        if self._session != self._sessions.session:
            self._session, self._said = self._sessions.session, set()
        if what in self._said:
            return []
        self._said.add(what)
        actions: list[Action] = [] if noted else [Note(job=self._job, text=text)]
        if 0 not in self._sessions.members:
            return actions
        news = next(one for one in self._facts.known(save.incarnation) if one.save == save)
        session = self._sessions.session
        return [
            *actions,
            ToRank(job=self._job, rank=0, session=session, message=replace(news, notice=text, stuck=stuck)),
        ]


def _suggested_s(drain_s: float) -> int:
    seconds = math.ceil(drain_s * ROOM)
    return seconds if seconds < _ROUND_S else math.ceil(seconds / 10) * 10
