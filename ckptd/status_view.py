"""A daemon's Status as people read it: Status in, rich renderables out. Width and glyphs are the console's.

A milestone has a word and a mark besides its colour, so that nothing is lost without colour or without Unicode.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ckptd import human
from ckptd.nodes_view import nodes_table, plain_table
from ckptd.protocol.messages import End, Milestone, Tier
from ckptd.protocol.status import CheckpointStatus, DrainStatus, JobStatus, RankStatus, Status
from ckptd.protocol.topology import Scheme

_NARROW_COLUMNS = 100
_TOO_NARROW_COLUMNS = 72  # for the column that is missed least: protected
_BAR_COLUMNS = 32
_MAX_CHECKPOINTS = 10
_MAX_REMOVED = 3
_MAX_SLOT_MARKS = 16
_MAX_AWAY = 8
_MAX_DEGRADED = 4
_NEARLY_FULL = 0.9
_BAD_ENDS = frozenset({End.FAILED.value, End.ABANDONED.value, End.SKIPPED.value})


@dataclass(frozen=True)
class Marks:
    """Glyphs, in the one alphabet or the other; bars: whether a bar is more than a run of the same blanks."""

    reached: str
    running: str
    missed: str
    none: str
    used: str
    free: str
    dot: str
    bars: bool = True


_UNICODE = Marks(reached="✓", running="…", missed="✗", none="–", used="■", free="□", dot="·")  # noqa: RUF001
_ASCII = Marks(reached="yes", running="...", missed="no", none="-", used="#", free=".", dot="-")


@dataclass(frozen=True)
class StatusView:
    """Everything a daemon says of itself: itself, then its jobs. nodes: each job's nodes, too."""

    status: Status
    nodes: bool = False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        marks = marks_for(options)
        yield _header(self.status, marks)
        for job in self.status.jobs:
            problem = next((w.problem for w in self.status.workers if w.store == job.store), "")
            yield Text()
            yield _job(job, problem, marks, options.max_width, all_nodes=self.nodes)
            if self.nodes:
                yield Padding(
                    nodes_table(job, self.status.node, narrow=options.max_width < _NARROW_COLUMNS), (1, 0, 0, 2)
                )
        if not self.status.jobs:
            yield Text("\nno job yet: a training joins with ckptd_client.connect(job=...)", style="dim")
        if self.status.errors:
            yield Text()
            yield from map(error_text, self.status.errors)


def marks_for(options: ConsoleOptions) -> Marks:
    """The glyphs that this console can encode. A file or a pipe has no colour, without which a bar is not seen."""
    return replace(_ASCII if options.ascii_only else _UNICODE, bars=options.is_terminal)


def error_text(error: str) -> Text:
    """An error's message in red, its hint lines in cyan."""
    text = Text()
    for number, line in enumerate(human.printable(error).splitlines()):
        is_hint = line.lstrip().startswith("hint:")
        text.append("" if number == 0 else "\n")
        text.append("error: " if number == 0 else "", style="bold red")
        text.append(f"  {line.strip()}" if is_hint else line, style="cyan" if is_hint else "")
    return text


def _header(status: Status, marks: Marks) -> RenderableType:
    dot = f" {marks.dot} "
    facts = (f"node {human.printable(status.node)}", f"pid {status.pid}", f"up {human.duration(status.uptime_s)}")
    title = Text.assemble((f"ckptd {status.version}", "bold"), dot, dot.join(facts))
    grid = _facts()
    grid.add_row("arena", _literal(status.arena))
    grid.add_row("memory", _memory(status, marks))
    if status.tightest_limit:
        grid.add_row("limit", _literal(status.tightest_limit))
    if status.refused_messages:
        refused = human.counted(status.refused_messages, "malformed message")
        grid.add_row("refused", Text(refused, style="yellow"))
    return Group(title, grid)


def _memory(status: Status, marks: Marks) -> RenderableType:
    used, budget = status.used_nbytes, status.budget_nbytes
    style = "red" if used > _NEARLY_FULL * budget else "green"
    text = f"{human.size(used)} of {human.size(budget)} ({human.percent(used, budget)})"
    return _bar(used, budget, text, style, marks)


def _bar(done: float, total: float, text: str, style: str, marks: Marks) -> RenderableType:
    """A bar and its numbers, or the numbers alone. An empty total is a full bar."""
    if not marks.bars:
        return Text(text)
    bar = ProgressBar(total or 1, done if total else 1, _BAR_COLUMNS, complete_style=style, finished_style=style)
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(width=_BAR_COLUMNS)
    grid.add_column()
    grid.add_row(bar, text)
    return grid


def _job(job: JobStatus, store_problem: str, marks: Marks, width: int, *, all_nodes: bool) -> RenderableType:
    dot = f" {marks.dot} "
    facts = dot.join((f"incarnation {job.incarnation}", human.counted(job.world_size, "rank")))
    body: list[RenderableType] = [_literal(job.store, "dim")]
    if job.checkpoints:
        shown = _worth_showing(job.checkpoints)
        body.append(_checkpoints(shown, marks, width, parity=job.scheme != Scheme.NONE))
        body += _remarks(shown, len(job.checkpoints) - len(shown))
    else:
        body.append(Text("no checkpoint yet", style="dim"))
    grid = _facts()
    if len(job.nodes) > 1 or job.scheme != Scheme.NONE:
        grid.add_row("nodes", _nodes(job, marks, len(job.degraded) if all_nodes else _MAX_DEGRADED))
    if job.drain is not None:
        grid.add_row("drain", _drain(job.drain, marks))
    for number, row in enumerate(_rank_rows(job.ranks, marks)):
        grid.add_row("ranks" if number == 0 else "", row)
    if grid.row_count:
        body.append(grid)
    body += map(error_text, [store_problem, *job.errors] if store_problem else job.errors)
    return Group(Text.assemble((job.job, "bold"), "  ", facts), Padding(Group(*body), (0, 0, 0, 2)))


def _worth_showing(checkpoints: list[CheckpointStatus]) -> list[CheckpointStatus]:
    """The newest, and of those that were removed since only the first few: they are history."""
    removed = [one for one in checkpoints if _is_removed(one)][_MAX_REMOVED:]
    return [one for one in checkpoints if not any(one is other for other in removed)][:_MAX_CHECKPOINTS]


def _is_removed(one: CheckpointStatus) -> bool:
    return one.milestone == Milestone.DURABLE and not one.tiers


def _nodes(job: JobStatus, marks: Marks, most: int) -> RenderableType:
    """How many there are, what they keep for each other, and what is amiss, in so many lines at most."""
    sets = len({node.set_index for node in job.nodes})
    scheme = f"{job.scheme} in {human.counted(sets, 'set')}" if job.scheme != Scheme.NONE else "redundancy none"
    facts = [human.counted(len(job.nodes), "node"), scheme]
    away = [human.printable(node.node) for node in job.nodes if not node.reachable]
    text = Text(f" {marks.dot} ".join(facts))
    if away:
        shown = ", ".join(away[:_MAX_AWAY]) + (f" and {len(away) - _MAX_AWAY} more" if len(away) > _MAX_AWAY else "")
        text.append(f" {marks.dot} not heard of: {shown}", "yellow")
    lines = [text, *(Text(f"degraded: {human.printable(line)}", "yellow") for line in job.degraded[:most])]
    if len(job.degraded) > most:
        lines.append(Text(f"and {len(job.degraded) - most} more: ckptd status --nodes", "yellow"))
    return Group(*lines)


def _checkpoints(checkpoints: list[CheckpointStatus], marks: Marks, width: int, *, parity: bool) -> Table:
    table = plain_table(narrow=width < _NARROW_COLUMNS)
    wide = width >= _TOO_NARROW_COLUMNS
    for name in ("step", "inc"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("staged", *(["protected"] if wide else []), "durable"):
        table.add_column(name, justify="center", no_wrap=True)
    table.add_column("in")
    for name in ("ranks", "size", "age"):
        table.add_column(name, justify="right", no_wrap=True)
    newest = next((one for one in checkpoints if one.milestone is not None), None)
    for one in checkpoints:
        coming = parity and one is newest and Tier.ARENA in one.tiers
        table.add_row(
            str(one.step),
            str(one.incarnation),
            _staged_mark(one, marks),
            *([_protected_mark(one, marks, coming=coming)] if wide else []),
            _durable_mark(one, marks),
            Text("removed", "dim") if _is_removed(one) else _literal(", ".join(one.tiers) or marks.none),
            f"{one.ranks}/{one.world_size}",
            human.size(one.nbytes),
            human.duration(one.age_s) if one.age_s is not None else marks.none,
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
    return Text(marks.running, "yellow") if coming else Text(marks.none, "dim")


def _durable_mark(one: CheckpointStatus, marks: Marks) -> Text:
    if one.milestone == Milestone.DURABLE:
        return Text(marks.reached, "green")
    if one.end is not None:
        return Text(one.end, "red" if one.end in _BAD_ENDS else "dim")
    if one.phase in {"draining", "committing"}:
        return Text(one.phase, "yellow")
    return Text(marks.none, "dim")


def _remarks(shown: list[CheckpointStatus], hidden: int) -> Iterator[Text]:
    """What the table has no room for: why a save ended badly, and how many rows are not shown."""
    for one in shown:
        if one.end in _BAD_ENDS and one.reason:
            yield Text.assemble((f"step {one.step} {one.end}: ", "red"), human.printable(one.reason))
    if hidden > 0:
        yield Text(f"and {human.counted(hidden, 'older checkpoint')}", style="dim")


def _drain(drain: DrainStatus, marks: Marks) -> RenderableType:
    bar = _bar(drain.nbytes_done, drain.nbytes, human.percent(drain.nbytes_done, drain.nbytes), "cyan", marks)
    facts = [f"step {drain.save.step}", f"{human.size(drain.nbytes_done)} of {human.size(drain.nbytes)}"]
    if drain.retry_in_s is None:
        facts.append(human.rate(drain.bytes_per_s))
        if drain.seconds_left is not None:
            facts.append(f"{human.duration(drain.seconds_left)} left")
    lines: list[RenderableType] = [bar, f" {marks.dot} ".join(facts)]
    if drain.last_error:
        again = f", again in {human.duration(drain.retry_in_s)}" if drain.retry_in_s is not None else ""
        failed = f"attempt {drain.attempt} failed" if again else f"attempt {drain.attempt}, the one before failed"
        lines.append(Text(f"{failed}: {human.printable(drain.last_error)}{again}", style="yellow"))
    return Group(*lines)


def _rank_rows(ranks: list[RankStatus], marks: Marks) -> Iterator[Text]:
    """One row for all ranks of equal state, so that 8 ranks in step are one row; a dead one stands out."""
    alike: dict[tuple[object, ...], list[RankStatus]] = {}
    for rank in ranks:
        where = None if rank.alive else (rank.pid, rank.host)
        alike.setdefault((rank.slots_in_use, rank.slots, rank.slot_nbytes, rank.newest_step, where), []).append(rank)
    labels = [human.ranges(rank.rank for rank in group) for group in alike.values()]
    width = max((len(label) for label, group in zip(labels, alike.values(), strict=True) if group[0].alive), default=0)
    for label, group in zip(labels, alike.values(), strict=True):
        rank = group[0]
        if rank.alive:
            yield Text.assemble((f"{label.ljust(width)}  ", "bold"), _slot_use(rank, marks))
        else:
            yield Text.assemble(_ended(label, group), _slot_use(rank, marks))


def _ended(label: str, group: list[RankStatus]) -> Text:
    """What is known of ranks that run no more, up to the slots that they left."""
    rank = group[0]
    what = "process ended" if len(group) == 1 else "processes ended"
    who = f" (pid {rank.pid} on {human.printable(rank.host)})" if rank.pid else ""
    newest = f"; newest step {rank.newest_step}" if rank.newest_step is not None else ""
    noun = "rank" if len(group) == 1 else "ranks"
    return Text.assemble((f"{noun} {label}: ", "bold"), (f"{what}{newest}{who}", "yellow"), "; ")


def _slot_use(rank: RankStatus, marks: Marks) -> Text:
    text = Text()
    if rank.alive and rank.slots <= _MAX_SLOT_MARKS:
        text.append(marks.used * rank.slots_in_use, "cyan")
        text.append(marks.free * (rank.slots - rank.slots_in_use) + "  ", "dim")
    text.append(f"{rank.slots_in_use} of {rank.slots} slots of {human.size(rank.slot_nbytes)} in use")
    if rank.alive and rank.newest_step is not None:
        text.append(f", newest step {rank.newest_step}")
    return text


def _facts() -> Table:
    """Labels on the left, what is so on the right."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    return grid


def _literal(text: str, style: str = "") -> Text:
    """What comes from outside: never markup, never control codes, folded where it is too long."""
    return Text(human.printable(text), style, overflow="fold")
