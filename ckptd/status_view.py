"""A daemon's Status as people read it: Status in, rich renderables out. Width and glyphs are the console's.

A milestone has a word and a mark besides its colour, so that nothing is lost without colour or without Unicode.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ckptd import human
from ckptd.protocol.messages import End, Milestone, Tier
from ckptd.protocol.status import CheckpointStatus, DrainStatus, JobStatus, RankStatus, Status

_NARROW_COLUMNS = 100
_BAR_COLUMNS = 32
_MAX_CHECKPOINTS = 10
_MAX_SLOT_MARKS = 16
_NEARLY_FULL = 0.9
_BAD_ENDS = frozenset({End.FAILED.value, End.ABANDONED.value, End.SKIPPED.value})


@dataclass(frozen=True)
class Marks:
    """Glyphs, in the one alphabet or the other."""

    reached: str
    running: str
    missed: str
    none: str
    used: str
    free: str
    dot: str


_UNICODE = Marks(reached="✓", running="…", missed="✗", none="–", used="■", free="□", dot="·")  # noqa: RUF001
_ASCII = Marks(reached="yes", running="...", missed="no", none="-", used="#", free=".", dot="-")


@dataclass(frozen=True)
class StatusView:
    """Everything a daemon says of itself: itself, then its jobs."""

    status: Status

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        marks = marks_for(options)
        yield _header(self.status, marks)
        for job in self.status.jobs:
            problem = next((w.problem for w in self.status.workers if w.store == job.store), "")
            yield Text()
            yield _job(job, problem, marks, narrow=options.max_width < _NARROW_COLUMNS)
        if not self.status.jobs:
            yield Text("\nno job yet: a training joins with ckptd_client.connect(job=...)", style="dim")
        if self.status.errors:
            yield Text()
            yield from map(error_text, self.status.errors)


def marks_for(options: ConsoleOptions) -> Marks:
    """The glyphs that this console can encode."""
    return _ASCII if options.ascii_only else _UNICODE


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
    grid.add_row("memory", _memory(status))
    if status.tightest_limit:
        grid.add_row("limit", _literal(status.tightest_limit))
    if status.refused_messages:
        refused = human.counted(status.refused_messages, "malformed message")
        grid.add_row("refused", Text(refused, style="yellow"))
    return Group(title, grid)


def _memory(status: Status) -> RenderableType:
    used, budget = status.used_nbytes, status.budget_nbytes
    style = "red" if used > _NEARLY_FULL * budget else "green"
    text = f"{human.size(used)} of {human.size(budget)} ({human.percent(used, budget)})"
    return _bar(used, budget, text, style)


def _bar(done: float, total: float, text: str, style: str) -> RenderableType:
    """A bar and its numbers. An empty total is a full bar."""
    bar = ProgressBar(total or 1, done if total else 1, _BAR_COLUMNS, complete_style=style, finished_style=style)
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(width=_BAR_COLUMNS)
    grid.add_column()
    grid.add_row(bar, text)
    return grid


def _job(job: JobStatus, store_problem: str, marks: Marks, *, narrow: bool) -> RenderableType:
    dot = f" {marks.dot} "
    facts = dot.join((f"incarnation {job.incarnation}", human.counted(job.world_size, "rank")))
    body: list[RenderableType] = [_literal(job.store, "dim")]
    if job.checkpoints:
        body.append(_checkpoints(job.checkpoints[:_MAX_CHECKPOINTS], marks, narrow=narrow))
        body += _remarks(job.checkpoints)
    else:
        body.append(Text("no checkpoint yet", style="dim"))
    grid = _facts()
    if job.drain is not None:
        grid.add_row("drain", _drain(job.drain, marks))
    for number, (label, value) in enumerate(_rank_rows(job.ranks, marks)):
        grid.add_row("ranks" if number == 0 else "", Text.assemble((f"{label}  ", "bold"), value))
    if grid.row_count:
        body.append(grid)
    body += map(error_text, [store_problem, *job.errors] if store_problem else job.errors)
    return Group(Text.assemble((job.job, "bold"), "  ", facts), Padding(Group(*body), (0, 0, 0, 2)))


def _checkpoints(checkpoints: list[CheckpointStatus], marks: Marks, *, narrow: bool) -> Table:
    table = plain_table(narrow=narrow)
    for name in ("step", "inc"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("staged", "protected", "durable"):
        table.add_column(name, justify="center", no_wrap=True)
    table.add_column("in")
    for name in ("ranks", "size", "age"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in checkpoints:
        table.add_row(
            str(one.step),
            str(one.incarnation),
            _staged_mark(one, marks),
            _protected_mark(one, marks),
            _durable_mark(one, marks),
            _literal(", ".join(one.tiers) or marks.none),
            f"{one.ranks}/{one.world_size}",
            human.size(one.nbytes),
            human.duration(one.age_s) if one.age_s is not None else marks.none,
        )
    return table


def _staged_mark(one: CheckpointStatus, marks: Marks) -> Text:
    if one.milestone is not None:
        return Text(marks.reached, "green")
    return Text(marks.missed, "red") if one.end is not None else Text(marks.running, "yellow")


def _protected_mark(one: CheckpointStatus, marks: Marks) -> Text:
    """Durable outranks protected, but is no proof that parity was ever made: only a tier with parity in it is."""
    protected = one.milestone == Milestone.PROTECTED or {Tier.PEER.value, Tier.REBUILT.value} & {*one.tiers}
    return Text(marks.reached, "green") if protected else Text(marks.none, "dim")


def _durable_mark(one: CheckpointStatus, marks: Marks) -> Text:
    if one.milestone == Milestone.DURABLE:
        return Text(marks.reached, "green")
    if one.end is not None:
        return Text(one.end, "red" if one.end in _BAD_ENDS else "dim")
    if one.phase in {"draining", "committing"}:
        return Text(one.phase, "yellow")
    return Text(marks.none, "dim")


def _remarks(checkpoints: list[CheckpointStatus]) -> Iterator[Text]:
    """What the table has no room for: why a save ended badly, and how many rows are not shown."""
    for one in checkpoints[:_MAX_CHECKPOINTS]:
        if one.end in _BAD_ENDS and one.reason:
            yield Text.assemble((f"step {one.step} {one.end}: ", "red"), human.printable(one.reason))
    hidden = len(checkpoints) - _MAX_CHECKPOINTS
    if hidden > 0:
        yield Text(f"and {human.counted(hidden, 'older checkpoint')}", style="dim")


def _drain(drain: DrainStatus, marks: Marks) -> RenderableType:
    bar = _bar(drain.nbytes_done, drain.nbytes, human.percent(drain.nbytes_done, drain.nbytes), "cyan")
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


def _rank_rows(ranks: list[RankStatus], marks: Marks) -> Iterator[tuple[str, Text]]:
    """One row for all ranks of equal state, so that 8 ranks in step are one row; a dead one stands out."""
    alike: dict[tuple[object, ...], list[RankStatus]] = {}
    for rank in ranks:
        where = None if rank.alive else (rank.pid, rank.host)
        alike.setdefault((rank.slots_in_use, rank.slots, rank.slot_nbytes, rank.newest_step, where), []).append(rank)
    labels = [human.ranges(rank.rank for rank in group) for group in alike.values()]
    width = max(map(len, labels), default=0)
    for label, group in zip(labels, alike.values(), strict=True):
        yield label.ljust(width), _slot_use(group[0], marks)


def _slot_use(rank: RankStatus, marks: Marks) -> Text:
    text = Text()
    if rank.slots <= _MAX_SLOT_MARKS:
        text.append(marks.used * rank.slots_in_use, "cyan")
        text.append(marks.free * (rank.slots - rank.slots_in_use) + "  ", "dim")
    text.append(f"{rank.slots_in_use} of {rank.slots} slots of {human.size(rank.slot_nbytes)} in use")
    if rank.newest_step is not None:
        text.append(f", newest step {rank.newest_step}")
    if not rank.alive:
        text.append(f", gone (pid {rank.pid} on {human.printable(rank.host)})" if rank.pid else ", gone", "yellow")
    return text


def _facts() -> Table:
    """Labels on the left, what is so on the right."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    return grid


def plain_table(*, narrow: bool) -> Table:
    """The look of every table: no lines, a dim head."""
    return Table(box=None, padding=(0, 1 if narrow else 3, 0, 0), pad_edge=False, header_style="dim")


def _literal(text: str, style: str = "") -> Text:
    """What comes from outside: never markup, never control codes, folded where it is too long."""
    return Text(human.printable(text), style, overflow="fold")
