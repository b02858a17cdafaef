"""A daemon's Status as people read it: Status in, rich renderables out. Width and glyphs are the console's.

What matters most comes first: of each job how safe it is, the drain that runs, what is wrong and what to type; then the
tables. A milestone has a word and a mark in addition to its colour: nothing is lost without colour or Unicode.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ckptd.cli.view.nodes import NodesView, named, troubles, versions
from ckptd.cli.view.parts import NEARLY_FULL, Facts, Marks, Name, bar, marks_for, plain_table
from ckptd.core.coordinator.save_states import State
from ckptd.shared.format.replica_attestations import doubt
from ckptd.shared.format.schemes import Scheme
from ckptd.shared.protocol.messages import End, Milestone, Tier
from ckptd.shared.protocol.status import CheckpointStatus, DrainStatus, JobStatus, RankStatus, Status, WorkerStatus
from ckptd.system import human

_NARROW_COLUMNS = 100
_TOO_NARROW_COLUMNS = 72  # for the column that is missed least: protected
_TINY_COLUMNS = 64  # ... and for incarnation and age
_MOST_BAR_COLUMNS, _LEAST_BAR_COLUMNS, _BESIDE_BAR_COLUMNS = 32, 8, 42
_MAX_CHECKPOINTS = 10
_MAX_REMOVED = 3
_MAX_SLOT_MARKS = 16
_MAX_RANK_BARS = 8
_MAX_PROBLEMS = 4  # of a kind, where nobody asked for more
_MAX_PROBLEMS_NODES = 12
_BAD_ENDS = frozenset({End.FAILED.value, End.ABANDONED.value, End.SKIPPED.value})
_LOST_ENDS = _BAD_ENDS | {End.SUPERSEDED.value}  # where there is one, their number matters


@dataclass(frozen=True)
class StatusView:
    """Everything a daemon says of itself: itself, then its jobs. nodes: each job's nodes, too; everything: all rows."""

    status: Status
    nodes: bool = False
    everything: bool = False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        page = _Page(marks_for(options), options.max_width, self.nodes, self.everything)
        yield _header(self.status, page)
        for job in self.status.jobs:
            problem = next((_problem(w) for w in self.status.workers if w.store == job.store), "")
            yield Text()
            yield from _job(job, problem, page)
        if not self.status.jobs:
            yield Text("\nno job yet: a training joins with ckptd_client.connect(job=...)", style="dim")


@dataclass(frozen=True)
class _Page:
    """What it is drawn on, and how much was asked for."""

    marks: Marks
    width: int
    nodes: bool
    everything: bool

    @property
    def bar_columns(self) -> int:
        return max(_LEAST_BAR_COLUMNS, min(_MOST_BAR_COLUMNS, self.width - _BESIDE_BAR_COLUMNS))

    @property
    def max_problems(self) -> int | None:
        return None if self.everything else _MAX_PROBLEMS_NODES if self.nodes else _MAX_PROBLEMS

    def joined(self, *facts: str) -> str:
        return f" {self.marks.dot} ".join(filter(None, facts))


def _header(status: Status, page: _Page) -> RenderableType:
    facts = (f"node {human.printable(status.node)}", f"pid {status.pid}", f"up {human.duration(status.uptime_s)}")
    title = Text(page.joined(f"ckptd {status.version}", *facts), no_wrap=True, overflow="ellipsis")
    title.stylize("bold", 0, len(f"ckptd {status.version}"))
    rows = Facts()
    rows.add("memory", _memory(status, page))
    if status.tightest_limit:
        rows.add("limit", Name(status.tightest_limit))
    rows.add("arena", Name(status.arena))
    if status.refused_messages:
        rows.add("refused", Text(human.counted(status.refused_messages, "malformed message"), style="yellow"))
    for error in status.errors:
        rows.error(error)
    return Group(title, rows.grid)


def _memory(status: Status, page: _Page) -> Text:
    used, budget = status.used_nbytes, status.budget_nbytes
    style = "red" if used > NEARLY_FULL * budget else "green"
    text = f"  {human.size(used)} of {human.size(budget)} ({human.percent(used, budget)})"
    return Text.assemble(bar(used, budget, page.bar_columns, style, page.marks), text)


# --- a job


def _problem(worker: WorkerStatus) -> str:
    return worker.problem or (f"no answer for {human.duration(worker.idle_s)}" if worker.silent else "")


def _job(job: JobStatus, store_problem: str, page: _Page) -> Iterator[RenderableType]:
    nodes = human.counted(len(job.nodes), "node") if len(job.nodes) > 1 else ""
    facts = page.joined(f"incarnation {job.incarnation}", human.counted(job.world_size, "rank"), nodes)
    yield Text.assemble((human.printable(job.job), "bold"), "  ", facts, no_wrap=True, overflow="ellipsis")
    rows = Facts()
    rows.add("safe", _safe(job, page))
    if job.drain is not None:
        rows.add("drain", _drain(job.drain, page))
    if _LOST_ENDS & set(job.ends):
        ends = [f"{count:,} {end}" for end, count in sorted(job.ends.items(), key=lambda item: -item[1])]
        rows.add("saves", Text(page.joined(*ends), "yellow" if _BAD_ENDS & set(job.ends) else ""))
    _add_problems(rows, job, store_problem, page)
    rows.add("store", Name(job.store))
    if len(job.nodes) > 1:
        rows.add("nodes", _nodes(job, page))
    for number, row in enumerate(_rank_rows(job.ranks, page)):
        rows.add("ranks" if number == 0 else "", row)
    for row in _late_rows(job.ranks):
        rows.add("late", row)
    yield _indented(rows.grid)
    if job.checkpoints:
        shown = _worth_showing(job.checkpoints)
        parity = job.scheme != Scheme.NONE and len(job.nodes) > 1
        table = _checkpoints(shown, page.marks, page.width, parity=parity)
        yield _indented(Group(table, *_remarks(shown, len(job.checkpoints) - len(shown))), above=1)
    if page.nodes:
        yield _indented(NodesView(job, page.everything), above=1)


def _indented(what: RenderableType, above: int = 0) -> Padding:
    return Padding(what, (above, 0, 0, 2))


def _safe(job: JobStatus, page: _Page) -> Text:
    """The newest of each milestone, as far as it is newer than what is safer; what dies with what, at one look."""
    if not job.checkpoints:
        return Text("no checkpoint yet", "dim")
    words: list[Text] = []
    newest = len(job.checkpoints)  # they are in order, newest first
    for milestone, style in ((Milestone.DURABLE, "green"), (Milestone.PROTECTED, "green"), (Milestone.STAGED, "")):
        place = next((i for i, one in enumerate(job.checkpoints) if _has_reached(one, milestone)), None)
        if place is not None and place < newest:
            newest, one = place, job.checkpoints[place]
            age = f" ({human.duration(one.age_s)})" if one.age_s is not None else ""
            words.append(Text(f"{milestone} {one.step}{age}", style))
        elif milestone is Milestone.DURABLE and place is None:
            words.append(Text("nothing durable yet", "yellow"))
    return Text(f" {page.marks.dot} ").join(words)


def _has_reached(one: CheckpointStatus, milestone: Milestone) -> bool:
    """What was removed, or is lost, is no help."""
    if not one.tiers:
        return False
    if milestone is Milestone.PROTECTED:
        return one.protected or one.milestone == milestone
    return one.milestone == milestone if milestone is Milestone.DURABLE else one.milestone is not None


def _drain(drain: DrainStatus, page: _Page) -> RenderableType:
    done = bar(drain.nbytes_done, drain.nbytes, page.bar_columns, "cyan", page.marks)
    top = Text.assemble(done, f"  {human.percent(drain.nbytes_done, drain.nbytes)} of step {drain.save.step}")
    facts = [f"{human.size(drain.nbytes_done)} of {human.size(drain.nbytes)}"]
    if drain.retry_in_s is None:
        facts.append(human.rate(drain.bytes_per_s))
        if drain.seconds_left is not None:
            facts.append(f"{human.duration(drain.seconds_left)} left")
    lines: list[RenderableType] = [top, page.joined(*facts)]
    if drain.last_error:
        again = f", again in {human.duration(drain.retry_in_s)}" if drain.retry_in_s is not None else ""
        failed = f"attempt {drain.attempt} failed" if again else f"attempt {drain.attempt}, the one before failed"
        lines.append(Text(f"{failed}: {human.printable(drain.last_error)}{again}", style="yellow"))
    return Group(*lines)


def _add_problems(rows: Facts, job: JobStatus, store_problem: str, page: _Page) -> None:
    """What is wrong, once each: on the store, with the job, between the nodes, on them."""
    most = page.max_problems
    if store_problem:
        rows.error(f"store: {store_problem}\nhint: is the mount alive? try: timeout 10 stat -f {job.store}")
    said = [store_problem, *job.errors]
    for error in job.errors[-most:] if most else job.errors:
        rows.error(error)
    if most and len(job.errors) > most:
        rows.add("", Text(f"and {len(job.errors) - most:,} older ones: ckptd status --nodes --all", "dim"))
    if job.silent:
        rows.add("silent", Text(f"did not answer: {named(job.silent)}", "yellow"), "yellow")
    for line in job.degraded[:most]:
        rows.add("degraded", Text(human.printable(line), "yellow"), "yellow")
    if most and len(job.degraded) > most:
        rows.add("", Text(f"and {len(job.degraded) - most:,} more: ckptd status --nodes --all", "yellow"))
    _add_troubles(rows, job, said, most)


def _add_troubles(rows: Facts, job: JobStatus, said: list[str], most: int | None) -> None:
    found = [(nodes, problem) for nodes, problem in troubles(job) if problem not in said]
    for nodes, problem in found[:most]:
        rows.error(f"{named(nodes)}: {problem}", "yellow")
    if most and len(found) > most:
        rows.add("", Text(f"and {len(found) - most:,} more: ckptd status --nodes --all", "yellow"))
    known = versions(job)
    if len(known) > 1:
        others = [f"{version} on {named(nodes)}" for version, nodes in list(known.items())[1:]]
        text = f"versions differ: {next(iter(known))} on {len(next(iter(known.values()))):,}; {'; '.join(others)}"
        rows.error(f"{text}\nhint: install the same ckptd there, and restart those daemons: what is staged stays")


def _worth_showing(checkpoints: list[CheckpointStatus]) -> list[CheckpointStatus]:
    """The newest, and of those that were removed since only the first few: they are history."""
    removed = [one for one in checkpoints if _is_removed(one)][_MAX_REMOVED:]
    return [one for one in checkpoints if not any(one is other for other in removed)][:_MAX_CHECKPOINTS]


def _is_removed(one: CheckpointStatus) -> bool:
    return one.milestone == Milestone.DURABLE and not one.tiers


def _nodes(job: JobStatus, page: _Page) -> Text:
    """The number of nodes, their redundancy, and the missing ones."""
    sets = len({node.set_index for node in job.nodes})
    scheme = f"{job.scheme} in {human.counted(sets, 'set')}" if job.scheme != Scheme.NONE else "redundancy none"
    text = Text(page.joined(human.counted(len(job.nodes), "node"), scheme))
    if page.nodes and (asked := [node for node in job.nodes if node.report is not None]):
        text.append(f" {page.marks.dot} {len(asked):,} answered")
    away = [node.node for node in job.nodes if not node.reachable]
    if away:
        text.append(f" {page.marks.dot} not heard of: {named(away)}", "yellow")
    return text


# --- checkpoints


def _checkpoints(checkpoints: list[CheckpointStatus], marks: Marks, width: int, *, parity: bool) -> Table:
    table = plain_table(narrow=width < _NARROW_COLUMNS)
    wide, tiny = width >= _TOO_NARROW_COLUMNS, width < _TINY_COLUMNS
    for name in ("step", *(() if tiny else ("inc",))):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("staged", *(["protected"] if wide else []), "durable"):
        table.add_column(name, justify="center", no_wrap=True)
    table.add_column("in", no_wrap=True)
    for name in ("ranks", "size", *(() if tiny else ("age",))):
        table.add_column(name, justify="right", no_wrap=True)
    newest = next((one for one in checkpoints if one.milestone is not None), None)
    for one in checkpoints:
        coming = parity and one is newest and Tier.ARENA in one.tiers
        table.add_row(
            str(one.step),
            *([] if tiny else [str(one.incarnation)]),
            _staged_mark(one, marks),
            *([_protected_mark(one, marks, coming=coming)] if wide else []),
            _durable_mark(one, marks),
            Text("removed", "dim") if _is_removed(one) else Name(", ".join(one.tiers) or marks.none),
            f"{one.ranks}/{one.world_size}",
            human.size(one.nbytes),
            *([] if tiny else [human.duration(one.age_s) if one.age_s is not None else marks.none]),
        )
    return table


def _staged_mark(one: CheckpointStatus, marks: Marks) -> Text:
    if one.milestone is not None:
        return Text(marks.reached, "green")
    return Text(marks.missed, "red") if one.end is not None else Text(marks.running, "yellow")


def _protected_mark(one: CheckpointStatus, marks: Marks, *, coming: bool) -> Text:
    """Durable outranks protected, but is no proof that parity was ever made."""
    if one.protected or one.milestone == Milestone.PROTECTED:
        return Text(marks.reached, "green")
    if coming:
        return Text(marks.running, "yellow")
    return Text("not needed" if one.milestone == Milestone.DURABLE and one.tiers else marks.none, "dim")


def _durable_mark(one: CheckpointStatus, marks: Marks) -> Text:
    if one.milestone == Milestone.DURABLE:
        return Text(marks.reached, "green")
    if one.end is not None:
        return Text(one.end, "red" if one.end in _BAD_ENDS else "dim")
    if one.phase in {"draining", "committing"}:
        return Text(one.phase, "yellow")
    return Text(marks.none, "dim")


def _remarks(shown: list[CheckpointStatus], hidden: int) -> Iterator[Text]:
    """What the table has no room for: for whom a save waits, why one ended badly, and how many rows are not shown."""
    waiting = {one.reason: one for one in shown if one.phase == State.STAGING and one.reason}  # the oldest of each
    for one in waiting.values():
        yield Text.assemble((f"step {one.step} ", "yellow"), (human.printable(one.reason), "yellow"), overflow="fold")
    for one in shown:
        if one.end in _BAD_ENDS and one.reason:
            yield Text.assemble((f"step {one.step} {one.end}: ", "red"), human.printable(one.reason), overflow="fold")
        if one.milestone == Milestone.DURABLE and (text := doubt(one.replicas)):
            yield Text.assemble((f"step {one.step}: ", "yellow"), text, overflow="fold")
    if hidden > 0:
        yield Text(f"and {human.counted(hidden, 'older checkpoint')}", style="dim")


# --- ranks


def _rank_rows(ranks: list[RankStatus], page: _Page) -> Iterator[Text]:
    """One row for all ranks of equal state: 8 ranks in step are one row, and a missing rank has its own."""
    alike: dict[tuple[object, ...], list[RankStatus]] = {}
    for rank in ranks:
        where = None if _is_here(rank) else (rank.pid, rank.host)
        alike.setdefault((rank.slots_in_use, rank.slots, rank.slot_nbytes, rank.newest_step, where), []).append(rank)
    labels = [human.ranges(rank.rank for rank in group) for group in alike.values()]
    width = max(
        (len(label) for label, group in zip(labels, alike.values(), strict=True) if _is_here(group[0])), default=0
    )
    for label, group in zip(labels, alike.values(), strict=True):
        rank = group[0]
        if _is_here(rank):
            yield Text.assemble((f"{label.ljust(width)}  ", "bold"), _slot_use(rank, page.marks))
        else:
            yield Text.assemble(_elsewhere(label, group), _slot_use(rank, page.marks))
    yield from _rank_bars([rank for rank in ranks if rank.drain_nbytes], page)


def _late_rows(ranks: list[RankStatus]) -> Iterator[Text]:
    """What verifies copies that run while training continues, one row for all ranks with the same."""
    alike: dict[str, list[int]] = {}
    for rank in ranks:
        if rank.alive and rank.late:
            alike.setdefault(rank.late, []).append(rank.rank)
    for late, numbers in alike.items():
        why_not = late.startswith("off:")
        what = f"copied before save returns ({late})" if why_not else f"verified by {late}" if late != "off" else late
        whose = f"{human.ranges(numbers)}  " if len(alike) > 1 else ""
        yield Text.assemble((whose, "bold"), (human.printable(what), "yellow" if why_not else ""))


def _is_here(rank: RankStatus) -> bool:
    return rank.alive and rank.attached


def _elsewhere(label: str, group: list[RankStatus]) -> Text:
    """What is known of ranks that run no more, or have not called this daemon, up to the slots that they have."""
    rank = group[0]
    what = "process ended" if len(group) == 1 else "processes ended"
    if rank.alive:
        what = f"{'has' if len(group) == 1 else 'have'} not called ckptd since this daemon started"
    who = f" (pid {rank.pid} on {human.printable(rank.host)})" if rank.pid else ""
    newest = f"; newest step {rank.newest_step}" if rank.newest_step is not None else ""
    noun = "rank" if len(group) == 1 else "ranks"
    return Text.assemble((f"{noun} {label}: ", "bold"), (f"{what}{newest}{who}", "yellow"), "; ")


def _rank_bars(ranks: list[RankStatus], page: _Page) -> Iterator[Text]:
    """How far each rank of this node is in the drain; of many, those that are behind."""
    behind = sorted(ranks, key=lambda rank: (int(10 * rank.drain_nbytes_done / rank.drain_nbytes), rank.rank))
    shown = ranks if len(ranks) <= _MAX_RANK_BARS else behind[:_MAX_RANK_BARS]
    width = max((len(str(rank.rank)) for rank in shown), default=0)
    for rank in shown:
        done, total = rank.drain_nbytes_done, rank.drain_nbytes
        drawn = bar(done, total, page.bar_columns, "cyan", page.marks)
        text = f"  {human.percent(done, total):>5} of {human.size(total)}"
        yield Text.assemble((f"{rank.rank:>{width}}  ", "bold"), drawn, text)
    if len(shown) < len(ranks):
        done = sum(rank.drain_nbytes_done for rank in behind[len(shown) :])
        total = sum(rank.drain_nbytes for rank in behind[len(shown) :])
        others = human.counted(len(ranks) - len(shown), "more rank")
        yield Text(f"{others}, {human.percent(done, total)} of {human.size(total)}", "dim")


def _slot_use(rank: RankStatus, marks: Marks) -> Text:
    text = Text()
    if _is_here(rank) and rank.slots <= _MAX_SLOT_MARKS:
        text.append(marks.used * rank.slots_in_use, "cyan")
        text.append(marks.free * (rank.slots - rank.slots_in_use) + "  ", "dim")
    text.append(f"{rank.slots_in_use} of {rank.slots} slots of {human.size(rank.slot_nbytes)} in use")
    if _is_here(rank) and rank.newest_step is not None:
        text.append(f", newest step {rank.newest_step}")
    return text
