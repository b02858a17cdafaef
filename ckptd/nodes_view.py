"""The nodes of a job as people read them: ``ckptd status --nodes``. And the look of every table."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ckptd import human
from ckptd.protocol.status import JobStatus


def plain_table(*, narrow: bool) -> Table:
    """The look of every table: no lines, a dim head."""
    return Table(box=None, padding=(0, 1 if narrow else 3, 0, 0), pad_edge=False, header_style="dim")


def nodes_table(job: JobStatus, here: str, *, narrow: bool) -> RenderableType:
    """One row per node, by redundancy set. here: the node of the daemon that was asked."""
    table = plain_table(narrow=narrow)
    table.add_column("set", justify="right", no_wrap=True)
    domains = any(node.domain for node in job.nodes)
    for name in ("node", *(["domain"] if domains else []), "ranks", "heard of"):
        table.add_column(name, overflow="fold")
    table.add_column("parity of step", justify="right")
    if any(node.problem for node in job.nodes):
        table.add_column("problem", overflow="fold")
    for node in sorted(job.nodes, key=lambda one: one.set_index):
        row = [Text(str(node.set_index)), _literal(node.node)]
        row += [_literal(node.domain)] if domains else []
        row += [Text(human.ranges(node.ranks)), Text("yes", "green") if node.reachable else Text("no", "red")]
        row.append(Text("none" if node.encoded_step is None else str(node.encoded_step)))
        table.add_row(*row, *([_literal(node.problem, "yellow")] if node.problem else []))
    if job.coordinator in ("", here):
        return table
    text = f"node {human.printable(job.coordinator)} coordinates the job and knows more: ckptd status --nodes there"
    return Group(table, Text(text, "dim"))


def _literal(text: str, style: str = "") -> Text:
    return Text(human.printable(text), style, overflow="fold")
