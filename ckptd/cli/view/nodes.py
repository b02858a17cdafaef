"""The nodes of a job as people read them: ``ckptd status --nodes``."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from ckptd.cli.view.names import natural
from ckptd.cli.view.parts import NEARLY_FULL, Cell, Column, Marks, Rows, levels, marks_for
from ckptd.shared.format.schemes import Scheme
from ckptd.shared.protocol.status import JobStatus, NodeStatus
from ckptd.system import human

_NARROW_COLUMNS = 100
_MAX_ROWS = 16
_MAX_LEVELS = 16  # ranks whose bars stand side by side


@dataclass(frozen=True)
class NodesView:
    """One row per node; of many only those that matter, worst first, and what the others are like."""

    job: JobStatus
    everything: bool = False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        marks = marks_for(options)
        order = in_order(self.job) if self.everything or len(self.job.nodes) <= _MAX_ROWS else worst_first(self.job)
        shown = order if self.everything else order[:_MAX_ROWS]
        yield _table(self.job, shown, marks, options.max_width)
        if len(shown) < len(order):
            yield Text(_others(self.job, order[len(shown) :], marks), "dim")


def in_order(job: JobStatus) -> list[NodeStatus]:
    """By redundancy set, then by name as people count: node2 before node10."""
    return sorted(job.nodes, key=lambda node: (node.set_index, natural(node.node)))


def worst_first(job: JobStatus) -> list[NodeStatus]:
    """Nodes that need help, then those that delay the drain. In tenths, so that rows keep their places for a while."""
    return sorted(in_order(job), key=lambda node: (_severity(node, job), int(10 * _share(node))))


def troubles(job: JobStatus) -> Iterator[tuple[list[str], str]]:
    """The problems that nodes report: the nodes, and the problem. The same problem of many is one."""
    said: dict[str, list[str]] = {}
    for node in in_order(job):
        for problem in node.report.problems if node.report is not None else []:
            said.setdefault(problem, []).append(node.node)
    yield from ((nodes, problem) for problem, nodes in said.items())


def versions(job: JobStatus) -> dict[str, list[str]]:
    """Nodes by the version of their daemon, the most common one first."""
    found: dict[str, list[str]] = {}
    for node in in_order(job):
        if node.report is not None:
            found.setdefault(node.report.version, []).append(node.node)
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))


def _severity(node: NodeStatus, job: JobStatus) -> int:
    if not node.reachable:
        return 0
    if node.node in job.silent:
        return 1
    return 2 if node.problem or (node.report is not None and node.report.problems) else 3


def _share(node: NodeStatus) -> float:
    return node.drain_nbytes_done / node.drain_nbytes if node.drain_nbytes else 1.0


def _state(node: NodeStatus, job: JobStatus) -> Cell:
    match _severity(node, job):
        case 0:
            return (("not heard of", "bold red"),)
        case 1:
            return (("no answer", "red"),)
        case 2:
            return (("problem", "yellow"),)
    if node.drain_voted:
        return (("synced", "green"),)
    return (("draining" if job.drain is not None and node.drain_nbytes else "fine", "dim"),)


def _table(job: JobStatus, nodes: Sequence[NodeStatus], marks: Marks, width: int) -> Rows:
    wide = width >= _NARROW_COLUMNS
    columns = list(_columns(job, marks, wide=wide))
    rows = Rows([column for column, _ in columns], narrow=not wide)
    for node in nodes:
        rows.add([cell(node) for _, cell in columns])
    return rows


def _columns(job: JobStatus, marks: Marks, *, wide: bool) -> Iterator[tuple[Column, Callable[[NodeStatus], Cell]]]:
    """Those that there is anything to say in, and what."""
    yield Column("node", named=True), lambda node: ((human.printable(node.node), ""),)
    yield Column("set", right=True), lambda node: ((str(node.set_index), ""),)
    if wide and any(node.domain for node in job.nodes):
        yield Column("domain", named=True), lambda node: ((human.printable(node.domain), ""),)
    yield Column("ranks", named=True), lambda node: ((human.ranges(node.ranks), ""),)
    if any(node.report is not None for node in job.nodes):
        yield Column("memory", right=True), lambda node: _memory(node, marks, wide=wide)
    if job.drain is not None:
        yield Column("drain"), lambda node: _drain(node, job, marks, wide=wide)
    if job.scheme != Scheme.NONE:
        yield Column("parity", right=True), lambda node: _parity(node, marks)
    yield Column("state"), lambda node: _state(node, job)


def _parity(node: NodeStatus, marks: Marks) -> Cell:
    return ((marks.none, "dim"),) if node.encoded_step is None else ((str(node.encoded_step), ""),)


def _memory(node: NodeStatus, marks: Marks, *, wide: bool) -> Cell:
    if node.report is None:
        return ((marks.none, "dim"),)
    used, budget = node.report.used_nbytes, node.report.budget_nbytes
    share = human.percent(used, budget)
    text = f"{human.size(used)} of {human.size(budget)}  {share:>5}" if wide else share
    return ((text, "red" if used > NEARLY_FULL * budget else ""),)


def _drain(node: NodeStatus, job: JobStatus, marks: Marks, *, wide: bool) -> Cell:
    """A bar per rank, side by side, and the share of them all."""
    if not node.drain_nbytes or job.drain is None:
        return ((marks.none, "dim"),)
    ranks = [rank for rank in (node.report.ranks if node.report is not None else []) if rank.drain_nbytes]
    bars = levels((rank.drain_nbytes_done / rank.drain_nbytes for rank in ranks[:_MAX_LEVELS]), marks)
    done = f" {human.percent(node.drain_nbytes_done, node.drain_nbytes):>5}"
    rate = f"  {human.rate(node.drain_nbytes_done / job.drain.seconds)}" if wide and job.drain.seconds > 0 else ""
    return (bars, "cyan"), (done + rate, "")


def _others(job: JobStatus, nodes: Sequence[NodeStatus], marks: Marks) -> str:
    """What the nodes are like that have no row."""
    bad = sum(_severity(node, job) < 3 for node in nodes)  # noqa: PLR2004 - see _severity
    facts = [f"{human.counted(len(nodes), 'more node')}, {bad:,} with a problem" if bad else ""]
    facts[0] = facts[0] or f"{human.counted(len(nodes), 'more node')}, all fine"
    reports = [node.report for node in nodes if node.report is not None]
    if reports:
        used = sorted(report.used_nbytes / max(1, report.budget_nbytes) for report in reports)
        facts.append(f"memory {_span(used)}")
    if shares := sorted(_share(node) for node in nodes if node.drain_nbytes):
        facts.append(f"drain {_span(shares)}")
    return f" {marks.dot} ".join([*facts, "all of them: --all"])


def _span(shares: Sequence[float]) -> str:
    low, high = human.percent(shares[0], 1), human.percent(shares[-1], 1)
    return low if low == high else f"{low.removesuffix(' %')} to {high}"
