"""The ways to divide the writes of replicas, as a table, a page and a picture. Measures nothing."""

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from bench import drawing
from bench.measure import digits, markdown_table, text
from bench.mesh import MeshResult

COLUMNS = ("stage of 8 layers", "who writes", "most MiB of a rank", "mean MiB", "max/mean", "stall s", "durable s")
_MIB = 1 << 20


def _cells(result: MeshResult) -> list[str]:
    sizes = [digits(nbytes / _MIB) for nbytes in (result.most_nbytes, result.mean_nbytes)]
    seconds = [text(series).removesuffix(" s") for series in (result.stall, result.durable)]
    return [result.stage, result.way, *sizes, f"{result.ratio:.3f}", *seconds]


def table(results: Sequence[MeshResult]) -> Table:
    """A table for people."""
    made = Table(title="16 ranks: 8 replicas of 2 parts", title_justify="left")
    for column in COLUMNS:
        made.add_column(column, justify="left" if column in COLUMNS[:2] else "right")
    for result in results:
        made.add_row(*_cells(result))
    return made


def markdown(results: Sequence[MeshResult]) -> str:
    """The same table for a page."""
    return markdown_table(COLUMNS, map(_cells, results))


def draw(results: Sequence[MeshResult], path: Path) -> None:
    """For each way the largest rank's bytes divided by the mean, and its time."""
    stages = list(dict.fromkeys(result.stage for result in results))
    if not stages:
        return
    figure = drawing.figure(9, 3.4)
    left, right = figure.subplots(1, 2)
    ways = list(dict.fromkeys(result.way for result in results))
    for number, stage in enumerate(stages):
        some = [result for result in results if result.stage == stage]
        positions = [ways.index(result.way) + 0.4 * number - 0.2 for result in some]
        durable = [result.durable.median for result in some]
        for axes, values in ((left, [result.ratio for result in some]), (right, durable)):
            axes.bar(positions, values, 0.38, label=stage)
            for position, value in zip(positions, values, strict=True):
                axes.text(position, value, digits(value), ha="center", va="bottom", fontsize=8)
    left.set(title="bytes of a rank: most by mean", ylabel="max/mean")
    right.set(title="save call until durable", ylabel="seconds of the rank with most")
    for axes in (left, right):
        axes.set_xticks(range(len(ways)), ways)
        axes.margins(y=0.12)
        axes.legend(fontsize=8)
    drawing.save(figure, path)
