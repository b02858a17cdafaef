"""Results as a table for people, JSON for programs and a picture. Decides pass or miss; measures nothing."""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from bench import drawing, mesh_report, peer_report
from bench.measure import Series, digits, text
from bench.mesh import MeshResult
from bench.peer_report import PeerResult

PASS, MISS, FACT = "green", "red", "dim"


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the speed budget: what was measured, against what, and the bar.

    value is what the bar judges, in value_unit ("x" for a ratio). Without a bar the row is a fact, no pass and no miss.
    Without a value it could not be measured, and note says why.
    """

    name: str
    measured: Series | None
    value: float | None
    value_unit: str = "x"
    yardstick: Series | None = None
    yardstick_name: str = ""
    bar: float | None = None
    sense: Literal["<=", ">="] = "<="
    note: str = ""

    @property
    def verdict(self) -> Literal["pass", "MISS", ""]:
        """Whether value keeps the bar; a row that could not be measured has missed it."""
        if self.value is None:
            return "MISS"
        if self.bar is None:
            return ""
        kept = self.value <= self.bar if self.sense == "<=" else self.value >= self.bar
        return "pass" if kept else "MISS"


def ratio(name: str, measured: Series, yardstick: Series, yardstick_name: str, **rest: Any) -> Row:
    """A row judged by median over median."""
    value = measured.median / yardstick.median
    return Row(name, measured, value, "x", yardstick, yardstick_name, **rest)


@dataclass(slots=True)
class Report:
    """Everything one run found."""

    machine: dict[str, Any]
    options: dict[str, Any]
    yardsticks: dict[str, Series] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    peers: list[PeerResult] = field(default_factory=list)
    mesh: list[MeshResult] = field(default_factory=list)

    @property
    def missed(self) -> list[Row]:
        """Rows whose bar was not kept."""
        return [row for row in self.rows if row.verdict == "MISS"]


def failed(name: str, why: str) -> Row:
    """A row for a measurement that failed."""
    return Row(name, None, None, note=why)


def show(report: Report, nbytes: int, console: Console) -> None:
    """Prints the tables. nbytes is the size of the state, for rates."""
    if report.yardsticks:
        console.print(_yardstick_table(report.yardsticks, nbytes))
    if report.rows:
        console.print(_row_table(report.rows))
    for ranks in sorted({peer.ranks for peer in report.peers}):
        console.print(peer_report.table(report.peers, ranks))
    if report.mesh:
        console.print(mesh_report.table(report.mesh))
    judged = [row for row in report.rows if row.verdict]
    if judged:
        console.print(f"{len(judged) - len(report.missed)} of {len(judged)} bars kept; medians, (min-max).")


def write_json(report: Report, path: Path) -> None:
    """Writes every number: the repeated values, their medians and the verdicts."""
    data = {
        "machine": report.machine,
        "options": report.options,
        "yardsticks": {name: series.as_json() for name, series in report.yardsticks.items()},
        "rows": [_row(row) for row in report.rows],
        "peers": [peer.as_json() for peer in report.peers],
        "mesh": [result.as_json() for result in report.mesh],
    }
    path.write_text(json.dumps(data, indent=2) + "\n")


def draw(report: Report, path: Path) -> None:
    """Draws the used part of each bar. Draws nothing if no row has a bar."""
    judged = [row for row in report.rows if row.bar is not None and row.value is not None]
    if judged:
        figure = drawing.figure(8, max(3.0, 0.5 * len(judged) + 1))
        _draw_rows(figure.subplots(), judged)
        drawing.save(figure, path)


def _cell(series: Series | None) -> str:
    cpu_s = series.cpu_s if series is not None else None
    return text(series) + (f" [dim]{digits(cpu_s)} CPU s[/]" if cpu_s is not None else "")


def _yardstick_table(yardsticks: dict[str, Series], nbytes: int) -> Table:
    table = Table(title=f"Yardsticks, {nbytes / 2**30:.2f} GiB", title_justify="left")
    for column in ("what", "seconds", "GB/s", "CPU s"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for name, series in yardsticks.items():
        table.add_row(name, text(series), digits(series.rate(nbytes).median), digits(series.cpu_s or 0))
    return table


def _row_table(rows: Sequence[Row]) -> Table:
    table = Table(title="ckptd against its bars", title_justify="left")
    for column in ("what", "measured", "yardstick", "value", "bar", ""):
        table.add_column(column, justify="right" if column in {"value", "bar"} else "left")
    for row in rows:
        value = "-" if row.value is None else f"{digits(row.value)} {row.value_unit}"
        bar = "" if row.bar is None else f"{row.sense} {row.bar:g}"
        yardstick = _cell(row.yardstick) + (f"\n[dim]{row.yardstick_name}[/]" if row.yardstick_name else "")
        name = row.name + (f"\n[dim]{row.note}[/]" if row.note else "")
        color = {"pass": PASS, "MISS": MISS, "": FACT}[row.verdict]
        table.add_row(name, _cell(row.measured), yardstick, value, bar, f"[{color}]{row.verdict}[/]")
    return table


def _row(row: Row) -> dict[str, Any]:
    return dataclasses.asdict(row) | {
        "measured": row.measured and row.measured.as_json(),
        "yardstick": row.yardstick and row.yardstick.as_json(),
        "verdict": row.verdict,
    }


def _draw_rows(axes: Any, rows: Sequence[Row]) -> None:
    """The used part of a bar; a bar is kept left of the line."""
    used = [(row.value / row.bar if row.sense == "<=" else row.bar / row.value) for row in rows]  # type: ignore[operator]
    colors = ["tab:green" if row.verdict == "pass" else "tab:red" for row in rows]
    axes.barh(range(len(rows)), [min(value, 3) for value in used], color=colors)
    for index, (row, value) in enumerate(zip(rows, used, strict=True)):
        label = f" {digits(row.value or 0)} {row.value_unit} (bar {row.sense} {row.bar:g})"
        axes.text(max(1, min(value, 3)), index, label, va="center", fontsize=8)
    axes.axvline(1, color="black", linewidth=1)
    axes.set_yticks(range(len(rows)), [row.name for row in rows], fontsize=8)
    axes.set_xlim(0, 4)
    axes.invert_yaxis()
    axes.set_xlabel("share of the bar used; beyond 1 is missed")
    axes.set_title("Speed budget", fontsize=10)
