"""What is less safe than a user believes: one table of rules, each a question to a status. Pure.

The table's order is that of severity: what loses work now comes before what would lose some later. Each finding says
what is wrong, where and since when; its hint is what to type or to change. Nothing is found where a job is healthy:
that its newest save is on its way is no finding.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from msgspec.structs import replace

from ckptd.cli.view.names import counted_nodes, named
from ckptd.shared.base.ids import MAX_RANKS
from ckptd.shared.base.wording import named_ranks
from ckptd.shared.format.schemes import Scheme
from ckptd.shared.protocol.messages import End, Milestone, Tier
from ckptd.shared.protocol.status import CheckpointStatus, JobStatus, RankStatus, Status, Unsafe, WorkerStatus
from ckptd.system import human

_LATE_S = 5.0  # ranks of a normal job call within seconds of each other
_AGAIN_AND_AGAIN = 3  # saves that were never drained; fewer may be one slow drain
_ROOM = 1.1  # for a drain that takes a little longer than the last
_MAX_ERROR_CHARS = 90
_BAD_ENDS = frozenset({End.FAILED, End.ABANDONED, End.SKIPPED})
_SILENCE = ("answer", "hang")  # in the words for a store that hangs; other words are for a worker that ended
AWAY = "does not answer"  # in the error of a drain that lacks a node, which is a finding itself
_PATIENCE = "training goes on, and newer saves are tried, too"


@dataclass(frozen=True)
class Look:
    """One job, and what the daemon knows beside it."""

    job: JobStatus
    worker: WorkerStatus | None  # of its store


class Found(NamedTuple):
    """What a rule says."""

    text: str
    hint: str


class Rule(NamedTuple):
    """code: stays the same. find: every case of it in a job."""

    code: str
    find: Callable[[Look], Iterator[Found]]


def unsafe(status: Status) -> list[Unsafe]:
    """The findings in all jobs, the worst first."""
    looks = [Look(job, _worker(status, job)) for job in status.jobs]
    return [
        Unsafe(code=rule.code, job=look.job.job, store=look.job.store, text=found.text, hint=found.hint)
        for rule in RULES
        for look in looks
        for found in rule.find(look)
    ]


def judged(status: Status) -> Status:
    """The status with its findings."""
    return replace(status, unsafe=unsafe(status))


def _worker(status: Status, job: JobStatus) -> WorkerStatus | None:
    return next((worker for worker in status.workers if worker.store == job.store), None)


# --- what a sentence is made of


def _members(runs: Sequence[tuple[int, int]]) -> list[int]:
    """Numbers of ranks, as many as a job can have."""
    return [rank for first, last in runs for rank in range(first, min(last, MAX_RANKS) + 1)]


def _where(job: JobStatus, runs: Sequence[tuple[int, int]], count: int) -> str:
    """Ranks, and the nodes on which they run where there are several: "ranks 4-7 of node gpu02"."""
    ranks = set(_members(runs))
    text = named_ranks(ranks) if len(ranks) == count else f"{count:,} ranks, {named_ranks(ranks)} among them,"
    homes = [node.node for node in job.nodes if not ranks.isdisjoint(node.ranks)]
    return f"{text} of {counted_nodes(homes, len(job.nodes))}" if homes and len(job.nodes) > 1 else text


def lost_nodes(job: JobStatus) -> list[str]:
    """Nodes that do not answer."""
    return [node.node for node in job.nodes if not node.reachable]


def further_losses(job: JobStatus) -> int:
    """How many nodes more of the set that has lost most its parity bears; below zero: it has lost too many."""
    losses = next((scheme.losses for scheme in Scheme if scheme == job.scheme), 0)
    lost = Counter(node.set_index for node in job.nodes if not node.reachable)
    return losses - max(lost.values(), default=0)


def _safe_without_lost(job: JobStatus) -> CheckpointStatus | None:
    """The newest checkpoint that a load finds without the nodes that do not answer."""
    bearable = further_losses(job) >= 0
    found = (c for c in job.checkpoints if Tier.PFS in c.tiers or (bearable and c.protected and c.tiers))
    return next(found, None)


def _newest(job: JobStatus, milestone: Milestone | None = None) -> CheckpointStatus | None:
    """That can be read; the newest of all, or the newest that is durable."""
    found = (c for c in job.checkpoints if c.tiers and c.milestone is not None)
    return next((c for c in found if milestone is None or c.milestone == milestone), None)


def _since(job: JobStatus) -> str:
    durable = _newest(job, Milestone.DURABLE)
    return f"nothing is durable since step {durable.step}" if durable is not None else "nothing is durable yet"


def _short(error: str) -> str:
    """The first line of an error, cut off."""
    text = error.partition("\n")[0].strip()
    return text if len(text) <= _MAX_ERROR_CHARS else f"{text[:_MAX_ERROR_CHARS].rstrip()}..."


def _have(number: int) -> str:
    return "has" if number == 1 else "have"


# --- rules


def _no_coordinator(look: Look) -> Iterator[Found]:
    job = look.job
    if job.coordinator in job.silent:
        text = f"node {job.coordinator}, which coordinates the job, does not answer: what follows may be old"
        yield Found(text, f"ckptd status on {job.coordinator}; if that node is lost, start the job again")


def _load_waits(look: Look) -> Iterator[Found]:
    load = look.job.restore
    if load is None or load.phase != "collecting" or load.seconds < _LATE_S or not load.missing:
        return
    count = look.job.world_size - load.ranks
    text = f"the load waits for {_where(look.job, load.missing, count)}, for {human.duration(load.seconds)} now"
    yield Found(text, "every rank must call load (one rank alone: connect(alone=True)); do they run?")


def _ranks_missing(look: Look) -> Iterator[Found]:
    """That ranks of nodes that do not answer deliver nothing is said of the nodes."""
    lost = {rank for node in look.job.nodes if not node.reachable for rank in node.ranks}
    waiting = [c for c in look.job.checkpoints if c.phase == "staging" and c.missing and c.reason]
    waiting = [c for c in waiting if c.world_size - c.ranks > len(lost.intersection(_members(c.missing)))]
    if not waiting:
        return
    oldest = waiting[-1]
    count = oldest.world_size - oldest.ranks
    since = f" for {human.duration(oldest.age_s)}" if oldest.age_s is not None else ""
    text = f"{_where(look.job, oldest.missing, count)} {_have(count)} not delivered step {oldest.step}{since}"
    also = f", nor {human.counted(len(waiting) - 1, 'later save')}" if len(waiting) > 1 else ""
    yield Found(f"{text}{also}", cause_of(oldest.reason))


def cause_of(reason: str) -> str:
    """Why a save waits, without for whom."""
    return reason.partition(": ")[2] or reason


def _ranks_ended(look: Look) -> Iterator[Found]:
    """The end of a training whose newest save is durable, or on its way there, is no loss."""
    job, newest = look.job, _newest(look.job)
    ended = [rank for rank in job.ranks if not rank.alive]
    crashed = [rank for rank in ended if rank.pid]  # of one that has closed nothing is known
    drains = job.drain is not None and not job.drain.last_error
    if len(ended) < len(job.ranks):
        again = f"load continues from step {newest.step}" if newest is not None else "there is no checkpoint yet"
        if crashed:
            yield Found(f"{_people(crashed)} ended without close", f"start the job again: {again}")
    elif ended and newest is not None and newest.milestone != Milestone.DURABLE and not drains:
        text = f"no rank of this node runs, and step {newest.step} is in memory only"
        yield Found(text, f"start the job again to continue from it, or: ckptd drain --job {job.job} --wait")


def _people(ranks: Sequence[RankStatus]) -> str:
    pids = f" (pid {ranks[0].pid} on {human.printable(ranks[0].host)})" if len(ranks) == 1 and ranks[0].pid else ""
    return named_ranks(rank.rank for rank in ranks) + pids


def _nodes_lost(look: Look) -> Iterator[Found]:
    job, lost = look.job, lost_nodes(look.job)
    if not lost:
        return
    left = _safe_without_lost(job)
    back = f"load restores step {left.step} without {'it' if len(lost) == 1 else 'them'}" if left is not None else ""
    back = back or f"no checkpoint can be restored without {'it' if len(lost) == 1 else 'them'}"
    verb = "does" if len(lost) == 1 else "do"
    text = f"{counted_nodes(lost, len(job.nodes))} {verb} not answer: {back}"
    again = "if it is lost, start the job again with another node"
    again = again if len(lost) == 1 else "if they are lost, start the job again with other nodes"
    yield Found(text, f"ckptd status on {named(lost[:1])}; {again}")


def _store_hangs(look: Look) -> Iterator[Found]:
    job, worker = look.job, look.worker
    problem = worker.problem if worker is not None else ""
    if not job.store_seen:
        problem = problem or job.store_problem
    if problem:
        what = "does not answer" if any(word in problem for word in _SILENCE) else "is out of reach"
        what = f"{what}: {_short(problem)}"
    elif worker is not None and worker.silent:
        what = f"has not answered for {human.duration(worker.idle_s)}"
    else:
        return
    known = _since(job) if job.store_seen else "what is durable is not known"
    yield Found(f"the store {what}; {known}", f"is the mount alive? timeout 10 stat -f {job.store}; training goes on")


class _Cause(NamedTuple):
    """Why a drain fails: words in its error, then the code, what is wrong, what to do."""

    words: tuple[str, ...]
    code: str
    what: str
    hint: str


_CAUSES = (
    _Cause(
        ("No space left", "Disk quota exceeded"),
        "store_full",
        "the store is full",
        "make room: df -h {store}; ckptd prune --dry-run --keep-last 1 {store}/{job}; then without --dry-run",
    ),
    _Cause(("Read-only file system",), "store_read_only", "the store is read-only", "mount -o remount,rw; {doctor}"),
    _Cause(
        ("Permission denied", "Operation not permitted"),
        "store_denied",
        "the store may not be written",
        "whose is it? ls -ld {store}; {doctor}",
    ),
    _Cause(("",), "drain_fails", "the drain fails", "{doctor}; training goes on, and newer saves are tried, too"),
)


def _drain_fails(code: str) -> Callable[[Look], Iterator[Found]]:
    def find(look: Look) -> Iterator[Found]:
        job, drain = look.job, look.job.drain
        if drain is None or not drain.last_error or (lost_nodes(look.job) and AWAY in drain.last_error):
            return
        cause = next(cause for cause in _CAUSES if any(word in drain.last_error for word in cause.words))
        if cause.code != code:
            return
        again = f", again in {human.duration(drain.retry_in_s)}" if drain.retry_in_s is not None else ""
        tries = f"tried {human.counted(drain.attempt - 1, 'time')}{again}"
        error = f": {_short(drain.last_error)}" if code == _CAUSES[-1].code else ""
        text = f"{cause.what}{error}: step {drain.save.step} is not durable, {tries}; {_since(job)}"
        doctor = f"ckptd doctor --store {job.store}"
        yield Found(text, cause.hint.format(store=job.store, job=job.job, doctor=doctor))

    return find


def _store_slow(look: Look) -> Iterator[Found]:
    pace = look.job.pace
    if pace is None or pace.outrun < _AGAIN_AND_AGAIN or pace.drain_s is None or pace.save_every_s is None:
        return
    if pace.drain_s <= pace.save_every_s:
        return
    takes, every = human.duration(pace.drain_s), human.duration(pace.save_every_s)
    text = f"the store takes {takes} per save, you save each {every}: {pace.outrun:,} saves never became durable"
    nth = max(2, math.ceil(_ROOM * pace.drain_s / pace.save_every_s))
    steps = f"drain_every={nth * pace.save_every_steps}" if pace.save_every_steps else f"drain_every='{takes}'"
    yield Found(text, f"connect({steps}) drains one save in {nth}; the others stay in memory until newer ones come")


def _saves_lost(look: Look) -> Iterator[Found]:
    """The newest save ended badly. That one before it did is in the table."""
    ended = [c for c in look.job.checkpoints if c.phase != "staging"][:1]
    for one in ended:
        if one.end in _BAD_ENDS and one.milestone is None:
            before = _newest(look.job)
            left = f"; step {before.step} is the newest" if before is not None else "; there is no older one"
            text = f"step {one.step} {one.end}: {_short(one.reason)}{left}"
            skipped = "save less often, or give more slots: CKPTD_SLOTS_PER_RANK"
            yield Found(text, skipped if one.end == End.SKIPPED else _PATIENCE)


def _damaged(look: Look) -> Iterator[Found]:
    """What a scrub could not make good. What it could is in the log and in the journal."""
    job = look.job
    found = job.scrub.damaged if job.scrub is not None else []
    for one in found[:1]:
        whose = f"rank {one.rank} of step {one.step}" if one.rank is not None else f"step {one.step}"
        more = f" (and {len(found) - 1:,} more)" if len(found) > 1 else ""
        if one.tier == Tier.PFS:
            yield Found(
                f"{whose} is damaged on the store: {_short(one.what)}{more}",
                f"load an older step: ckptd list {job.store}/{job.job}; all damage: ckptd verify {job.store}/{job.job}",
            )
        else:
            part = "parity of " if one.tier == Tier.REBUILT else ""
            text = f"{part}{whose} is damaged in memory of node {one.node}: {_short(one.what)}{more}"
            yield Found(text, f"a newer save takes its place; is the memory of {one.node} sound? dmesg, edac-util")


def is_of_lost_nodes(degraded: str) -> bool:
    """Whether a line of what is degraded says that a set lacks nodes."""
    return "makes no parity while it hears nothing of" in degraded


def _unprotected(look: Look) -> Iterator[Found]:
    """What a lost node causes is said of the node."""
    found = [line for line in look.job.degraded if not (lost_nodes(look.job) and is_of_lost_nodes(line))]
    for line in found[:1]:
        text, _, hint = line.rpartition("; ") if "; " in line else (line, "", "ckptd status --nodes")
        more = f" (and {len(found) - 1:,} more)" if len(found) > 1 else ""
        yield Found(f"{_short(text)}{more}", hint)


RULES = (
    Rule("no_coordinator", _no_coordinator),
    Rule("load_waits", _load_waits),
    Rule("nodes_lost", _nodes_lost),
    Rule("ranks_missing", _ranks_missing),
    Rule("ranks_ended", _ranks_ended),
    Rule("store_hangs", _store_hangs),
    *(Rule(cause.code, _drain_fails(cause.code)) for cause in _CAUSES),
    Rule("damaged", _damaged),
    Rule("store_slow", _store_slow),
    Rule("saves_lost", _saves_lost),
    Rule("unprotected", _unprotected),
)
