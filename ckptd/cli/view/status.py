"""A daemon's Status as people read it: Status in, rich renderables out. Width and glyphs are the console's.

What matters most comes first: what is not safe and what to type, in words; then of each job how safe it is, the drain
that runs and what is wrong; then the tables. A milestone has a word and a mark in addition to its colour: nothing is
lost without colour or Unicode.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.text import Text

from ckptd.cli.view.checkpoints import BAD_ENDS, checkpoints_of, safest
from ckptd.cli.view.goodput import overall
from ckptd.cli.view.names import named
from ckptd.cli.view.nodes import NodesView, troubles, versions
from ckptd.cli.view.parts import NEARLY_FULL, Facts, Marks, Name, bar, marks_for
from ckptd.cli.view.ranks import late_rows, rank_rows
from ckptd.cli.view.unsafe import AWAY, further_losses, is_of_lost_nodes, judged, lost_nodes
from ckptd.shared.format.schemes import Scheme
from ckptd.shared.protocol.messages import End, Milestone
from ckptd.shared.protocol.status import DrainStatus, JobStatus, RestoreStatus, Status, Unsafe
from ckptd.system import human

_MOST_BAR_COLUMNS, _LEAST_BAR_COLUMNS, _BESIDE_BAR_COLUMNS = 32, 8, 42
_MAX_PROBLEMS = 4  # of a kind, where nobody asked for more
_MAX_PROBLEMS_NODES = 12
_MAX_UNSAFE = 4
_TOLD_S = 60.0  # of a job that is younger, where its time went says little
_MOST_LOST = 2  # kinds of lost time: the line is to be short
_SLOW = "the store is slower than the saves"  # an error of the job that a finding has, too
_LOST_ENDS = BAD_ENDS | {End.SUPERSEDED.value}  # where there is one, their number matters


@dataclass(frozen=True)
class StatusView:
    """Everything a daemon says of itself: itself, then its jobs. nodes: each job's nodes, too; everything: all rows."""

    status: Status
    nodes: bool = False
    everything: bool = False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        page = _Page(marks_for(options), options.max_width, self.nodes, self.everything)
        status = judged(self.status)
        shown = status.unsafe[: page.max_unsafe]
        yield _header(status, page)
        for job in status.jobs:
            yield Text()
            found = [one for one in shown if one.is_of(job)]
            yield from _job(job, found, page, alone=len(status.jobs) == 1)
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

    @property
    def max_unsafe(self) -> int | None:
        return None if self.everything else _MAX_UNSAFE

    def joined(self, *facts: str) -> str:
        return f" {self.marks.dot} ".join(filter(None, facts))


def _header(status: Status, page: _Page) -> RenderableType:
    facts = (f"node {human.printable(status.node)}", f"pid {status.pid}", f"up {human.duration(status.uptime_s)}")
    title = Text(page.joined(f"ckptd {status.version}", *facts), no_wrap=True, overflow="ellipsis")
    title.stylize("bold", 0, len(f"ckptd {status.version}"))
    rows = Facts()
    _add_unsafe(rows, status, page)
    for job in status.jobs:
        if job.restore is not None:
            rows.add("load", Text(_named(status, job.job, job.store) + _restore(job.restore, job.world_size), "cyan"))
    if len(status.jobs) == 1:
        rows.add("safe", _safe(status.jobs[0], page))
    rows.add("memory", _memory(status, page))
    if status.tightest_limit:
        rows.add("limit", Name(status.tightest_limit))
    rows.add("arena", Name(status.arena))
    if status.refused_messages:
        rows.add("refused", Text(human.counted(status.refused_messages, "malformed message"), style="yellow"))
    for error in status.errors:
        rows.error(error)
    return Group(title, rows.grid)


def _add_unsafe(rows: Facts, status: Status, page: _Page) -> None:
    """What is wrong and what to type, before anything else: a glance at five lines is enough."""
    most = page.max_unsafe
    for one in status.unsafe[:most]:
        rows.error(f"{_named(status, one.job, one.store)}{one.text}\nhint: {one.hint}", label="unsafe")
    if most and len(status.unsafe) > most:
        rows.add("", Text(f"and {len(status.unsafe) - most:,} more: ckptd status --nodes --all", "yellow"))


def _named(status: Status, job: str, store: str) -> str:
    """Of which job a line is, where there are several."""
    if len(status.jobs) <= 1:
        return ""
    alike = sum(one.job == job for one in status.jobs) > 1
    return f"{job} in {human.printable(store)}: " if alike else f"{job}: "


def _memory(status: Status, page: _Page) -> Text:
    used, budget = status.used_nbytes, status.budget_nbytes
    style = "red" if used > NEARLY_FULL * budget else "green"
    text = f"  {human.size(used)} of {human.size(budget)} ({human.percent(used, budget)})"
    return Text.assemble(bar(used, budget, page.bar_columns, style, page.marks), text)


# --- a job


def _job(job: JobStatus, found: list[Unsafe], page: _Page, *, alone: bool) -> Iterator[RenderableType]:
    """found: what the top says of it, which is not said again; nor is it said how safe it is where it is alone."""
    nodes = human.counted(len(job.nodes), "node") if len(job.nodes) > 1 else ""
    facts = page.joined(f"incarnation {job.incarnation}", human.counted(job.world_size, "rank"), nodes)
    yield Text.assemble((human.printable(job.job), "bold"), "  ", facts, no_wrap=True, overflow="ellipsis")
    codes = {one.code for one in found}
    rows = Facts()
    if not alone:
        rows.add("safe", _safe(job, page))
    if job.drain is not None:
        rows.add("drain", _drain(job.drain, page, codes))
    if _LOST_ENDS & set(job.ends):
        ends = [f"{count:,} {end}" for end, count in sorted(job.ends.items(), key=lambda item: -item[1])]
        rows.add("saves", Text(page.joined(*ends), "yellow" if BAD_ENDS & set(job.ends) else ""))
    if job.goodput is not None and job.goodput.total_s >= _TOLD_S:
        rows.add("time", Text(overall(job.goodput, _MOST_LOST)))
    _add_problems(rows, job, page, found)
    rows.add("store", Name(job.store))
    if len(job.nodes) > 1:
        rows.add("nodes", _nodes(job, page, named_above="nodes_lost" in codes))
    for number, row in enumerate(rank_rows(job.ranks, page.marks, page.bar_columns)):
        rows.add("ranks" if number == 0 else "", row)
    for row in late_rows(job.ranks):
        rows.add("late", row)
    yield _indented(rows.grid)
    if job.checkpoints:
        yield _indented(checkpoints_of(job, page.marks, page.width, found), above=1)
    if page.nodes:
        yield _indented(NodesView(job, page.everything), above=1)


def _indented(what: RenderableType, above: int = 0) -> Padding:
    return Padding(what, (above, 0, 0, 2))


def _safe(job: JobStatus, page: _Page) -> Text:
    """The newest of each milestone; what dies with what, at one look."""
    if not job.checkpoints:
        return Text("no checkpoint yet", "dim")
    found = list(safest(job.checkpoints))
    words = [] if Milestone.DURABLE in dict(found) else [Text("nothing durable yet", "yellow")]
    for milestone, one in found:
        age = f" ({human.duration(one.age_s)})" if one.age_s is not None else ""
        style = "" if milestone is Milestone.STAGED else "green"
        words.append(Text(f"{milestone} {one.step}{age}{_as_long_as(job, milestone)}", style))
    return Text(f" {page.marks.dot} ").join(words)


def _as_long_as(job: JobStatus, milestone: Milestone) -> str:
    """What was protected is less so once its parity stands in for nodes that do not answer."""
    if milestone is not Milestone.PROTECTED or not lost_nodes(job) or (further := further_losses(job)) > 0:
        return ""
    return " until one more node is lost" if further == 0 else " if they come back"


_LOADING = {  # by the phase of a load
    "collecting": "waits for all ranks to call it",
    "fetching": "is fetched from other nodes",
    "draining": "is written to the store first",
    "reading": "is read",
}


def _restore(load: RestoreStatus, world_size: int) -> str:
    """How far a load is."""
    whose = f"step {load.step} " if load.step is not None else ""
    done = f"{load.ranks:,} of {human.counted(world_size, 'rank')}"
    return f"{whose}{_LOADING[load.phase]}: {done}, for {human.duration(load.seconds)}"


def _drain(drain: DrainStatus, page: _Page, codes: set[str]) -> RenderableType:
    """codes: of what is said above. While the store hangs nothing is written, so that no rate holds."""
    done = bar(drain.nbytes_done, drain.nbytes, page.bar_columns, "cyan", page.marks)
    top = Text.assemble(done, f"  {human.percent(drain.nbytes_done, drain.nbytes)} of step {drain.save.step}")
    facts = [f"{human.size(drain.nbytes_done)} of {human.size(drain.nbytes)}"]
    if "store_hangs" in codes:
        facts.append("stopped")
    elif drain.retry_in_s is None:
        facts += [human.rate(drain.bytes_per_s)] if drain.bytes_per_s else []
        if drain.seconds_left is not None:
            facts.append(f"{human.duration(drain.seconds_left)} left")
    lines: list[RenderableType] = [top, page.joined(*facts)]
    if drain.last_error:
        again = f", again in {human.duration(drain.retry_in_s)}" if drain.retry_in_s is not None else ""
        failed = f"attempt {drain.attempt - 1} failed" if again else f"attempt {drain.attempt}, the one before failed"
        why = "" if "nodes_lost" in codes and AWAY in drain.last_error else f": {human.printable(drain.last_error)}"
        lines.append(Text(f"{failed}{why}{again}", style="yellow"))
    return Group(*lines)


def _add_problems(rows: Facts, job: JobStatus, page: _Page, found: list[Unsafe]) -> None:
    """What is wrong, once each: with the job, between the nodes, on them. found: it is said above."""
    most = page.max_problems
    slow = any(one.code == "store_slow" for one in found)
    failed = job.drain.last_error if job.drain is not None and job.drain.last_error else "\0"  # stands with the drain
    errors = [one for one in job.errors if failed not in one and not (slow and one.startswith(_SLOW))]
    for error in errors[-most:] if most else errors:
        rows.error(error)
    if most and len(errors) > most:
        rows.add("", Text(f"and {len(errors) - most:,} older ones: ckptd status --nodes --all", "dim"))
    if job.silent:
        rows.add("silent", Text(f"did not answer: {named(job.silent)}", "yellow"), "yellow")
    above = {f"{one.text}; {one.hint}" for one in found}
    degraded = [one for one in (job.degraded if page.everything else _folded(job.degraded)) if one not in above]
    for line in degraded[:most]:
        rows.add("degraded", Text(human.printable(line), "yellow"), "yellow")
    if most and len(degraded) > most:
        rows.add("", Text(f"and {len(degraded) - most:,} more: ckptd status --nodes --all", "yellow"))
    _add_troubles(rows, job, most)


def _folded(degraded: list[str]) -> list[str]:
    """Many sets that lack nodes are one line: which nodes, stands elsewhere."""
    sets = [line for line in degraded if is_of_lost_nodes(line)]
    if len(sets) <= 1:
        return degraded
    others = [line for line in degraded if line not in sets]
    return [f"{human.counted(len(sets), 'set')} make no parity while nodes do not answer", *others]


def _add_troubles(rows: Facts, job: JobStatus, most: int | None) -> None:
    found = [(nodes, problem) for nodes, problem in troubles(job) if problem not in job.errors]
    for nodes, problem in found[:most]:
        rows.error(f"{named(nodes)}: {problem}", "yellow")
    if most and len(found) > most:
        rows.add("", Text(f"and {len(found) - most:,} more: ckptd status --nodes --all", "yellow"))
    known = versions(job)
    if len(known) > 1:
        others = [f"{version} on {named(nodes)}" for version, nodes in list(known.items())[1:]]
        text = f"versions differ: {next(iter(known))} on {len(next(iter(known.values()))):,}; {'; '.join(others)}"
        rows.error(f"{text}\nhint: install the same ckptd there, and restart those daemons: what is staged stays")


def _nodes(job: JobStatus, page: _Page, *, named_above: bool) -> Text:
    """The number of nodes, their redundancy, and the missing ones, if these are not named above."""
    sets = len({node.set_index for node in job.nodes})
    scheme = f"{job.scheme} in {human.counted(sets, 'set')}" if job.scheme != Scheme.NONE else "redundancy none"
    text = Text(page.joined(human.counted(len(job.nodes), "node"), scheme))
    if page.nodes and (asked := [node for node in job.nodes if node.report is not None]):
        text.append(f" {page.marks.dot} {len(asked):,} answered")
    away = [node.node for node in job.nodes if not node.reachable]
    if away and not named_above:
        text.append(f" {page.marks.dot} not heard of: {named(away)}", "yellow")
    return text
