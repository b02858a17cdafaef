"""Results as a table for people, JSON for programs and a picture. Decides pass or miss; measures nothing."""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from bench.measure import Series

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


@dataclass(frozen=True, slots=True)
class PeerResult:
    """One way of saving, in the training loop. Seconds; lost is the call and the step time it cost until durable."""

    name: str
    first_block_s: float
    block: Series
    lost: Series
    durable: Series
    step_ratio: float | None  # step time until durable over undisturbed step time; none if no step ran


@dataclass(slots=True)
class Report:
    """Everything one run found."""

    machine: dict[str, Any]
    options: dict[str, Any]
    yardsticks: dict[str, Series] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    peers: list[PeerResult] = field(default_factory=list)

    @property
    def missed(self) -> list[Row]:
        """Rows whose bar was not kept."""
        return [row for row in self.rows if row.verdict == "MISS"]


def failed(name: str, why: str) -> Row:
    """A row for what could not be measured."""
    return Row(name, None, None, note=why)


def show(report: Report, nbytes: int, console: Console) -> None:
    """Prints the tables. nbytes is the size of the state, for rates."""
    if report.yardsticks:
        console.print(_yardstick_table(report.yardsticks, nbytes))
    if report.rows:
        console.print(_row_table(report.rows))
    if report.peers:
        console.print(_peer_table(report.peers))
    judged = [row for row in report.rows if row.verdict]
    if judged:
        console.print(f"{len(judged) - len(report.missed)} of {len(judged)} bars kept; medians, (min-max).")


def write_json(report: Report, path: Path) -> None:
    """Writes every number: the repeated values, their medians and the verdicts."""
    data = {
        "machine": report.machine,
        "options": report.options,
        "yardsticks": {name: _series(series) for name, series in report.yardsticks.items()},
        "rows": [_row(row) for row in report.rows],
        "peers": [
            dataclasses.asdict(peer) | {key: _series(getattr(peer, key)) for key in ("block", "lost", "durable")}
            for peer in report.peers
        ],
    }
    path.write_text(json.dumps(data, indent=2) + "\n")


def draw(report: Report, path: Path) -> None:
    """Draws the bars that were kept and missed, and the peers beside ckptd."""
    judged = [row for row in report.rows if row.bar is not None and row.value is not None]
    panels = [part for part in (judged, report.peers) if part]
    if not panels:
        return
    height = max(3.0, 0.5 * max(len(judged), 2 * len(report.peers)) + 1)
    figure = Figure(figsize=(8 * len(panels), height), layout="constrained")
    axes = list(figure.subplots(1, len(panels), squeeze=False)[0])
    if judged:
        _draw_rows(axes.pop(0), judged)
    if report.peers:
        _draw_peers(axes.pop(0), report.peers)
    figure.savefig(path, dpi=130)


def text(series: Series | None) -> str:
    """Median (min-max) unit, in three digits."""
    if series is None:
        return "-"
    span = f" ({_digits(series.low)}-{_digits(series.high)})" if len(series.values) > 1 else ""
    return f"{_digits(series.median)}{span} {series.unit}"


def _cell(series: Series | None) -> str:
    cpu_s = series.cpu_s if series is not None else None
    return text(series) + (f" [dim]{_digits(cpu_s)} CPU s[/]" if cpu_s is not None else "")


def _digits(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _yardstick_table(yardsticks: dict[str, Series], nbytes: int) -> Table:
    table = Table(title=f"Yardsticks, {nbytes / 2**30:.2f} GiB", title_justify="left")
    for column in ("what", "seconds", "GB/s", "CPU s"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for name, series in yardsticks.items():
        table.add_row(name, text(series), _digits(series.rate(nbytes).median), _digits(series.cpu_s or 0))
    return table


def _row_table(rows: Sequence[Row]) -> Table:
    table = Table(title="ckptd against its bars", title_justify="left")
    for column in ("what", "measured", "yardstick", "value", "bar", ""):
        table.add_column(column, justify="right" if column in {"value", "bar"} else "left")
    for row in rows:
        value = "-" if row.value is None else f"{_digits(row.value)} {row.value_unit}"
        bar = "" if row.bar is None else f"{row.sense} {row.bar:g}"
        yardstick = _cell(row.yardstick) + (f"\n[dim]{row.yardstick_name}[/]" if row.yardstick_name else "")
        name = row.name + (f"\n[dim]{row.note}[/]" if row.note else "")
        color = {"pass": PASS, "MISS": MISS, "": FACT}[row.verdict]
        table.add_row(name, _cell(row.measured), yardstick, value, bar, f"[{color}]{row.verdict}[/]")
    return table


def _peer_table(peers: Sequence[PeerResult]) -> Table:
    table = Table(title="The same state and loop, saved by others", title_justify="left")
    for column in ("how", "first block s", "block s", "lost s", "durable s", "step x"):
        table.add_column(column, justify="left" if column == "how" else "right")
    for peer in peers:
        step = "-" if peer.step_ratio is None else f"{peer.step_ratio:.2f}"
        spans = (text(series).removesuffix(" s") for series in (peer.block, peer.lost, peer.durable))
        table.add_row(peer.name, _digits(peer.first_block_s), *spans, step)
    return table


def _series(series: Series | None) -> dict[str, Any] | None:
    if series is None:
        return None
    return dataclasses.asdict(series) | {"median": series.median, "low": series.low, "high": series.high}


def _row(row: Row) -> dict[str, Any]:
    return dataclasses.asdict(row) | {
        "measured": _series(row.measured),
        "yardstick": _series(row.yardstick),
        "verdict": row.verdict,
    }


def _draw_rows(axes: Any, rows: Sequence[Row]) -> None:
    """How much of each bar is used: left of the line is kept, whatever the bar's sense."""
    used = [(row.value / row.bar if row.sense == "<=" else row.bar / row.value) for row in rows]  # type: ignore[operator]
    colors = ["tab:green" if row.verdict == "pass" else "tab:red" for row in rows]
    axes.barh(range(len(rows)), [min(value, 3) for value in used], color=colors)
    for index, (row, value) in enumerate(zip(rows, used, strict=True)):
        label = f" {_digits(row.value or 0)} {row.value_unit} (bar {row.sense} {row.bar:g})"
        axes.text(max(1, min(value, 3)), index, label, va="center", fontsize=8)
    axes.axvline(1, color="black", linewidth=1)
    axes.set_yticks(range(len(rows)), [row.name for row in rows], fontsize=8)
    axes.set_xlim(0, 4)
    axes.invert_yaxis()
    axes.set_xlabel("share of the bar used; beyond 1 is missed")
    axes.set_title("Speed budget", fontsize=10)


def _draw_peers(axes: Any, peers: Sequence[PeerResult]) -> None:
    for offset, key, color in ((-0.2, "lost", "tab:orange"), (0.2, "durable", "tab:blue")):
        series = [getattr(peer, key) for peer in peers]
        medians = [one.median for one in series]
        spread = [[one.median - one.low for one in series], [one.high - one.median for one in series]]
        positions = [index + offset for index in range(len(peers))]
        axes.barh(positions, medians, 0.38, xerr=spread, color=color, label=key, error_kw={"linewidth": 0.8})
        for position, one in zip(positions, series, strict=True):
            axes.text(one.high, position, f" {_digits(one.median)}", va="center", fontsize=8)
    axes.margins(x=0.12)
    axes.set_yticks(range(len(peers)), [peer.name for peer in peers], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("seconds: training time lost per save, and from the call until durable")
    axes.set_title("Against peers", fontsize=10)
    axes.legend()
