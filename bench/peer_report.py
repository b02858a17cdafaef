"""A comparison of ways of saving: rows, tables, the picture. Measures nothing."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from bench import drawing
from bench.measure import Series, digits, markdown_table, text
from bench.peers import Kind

COLUMNS = (
    "how",
    "first block s",
    "block s",
    "lost s",
    "durable s",
    "CPU s",
    "step x",
    "extra GiB: peak / held",
    "GiB per rank",
)
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class PeerResult:
    """One way of saving, in the training loop of some ranks; for each save the values of the slowest rank.

    Seconds; block is the call, lost what the loop took longer until the save was on the disk, durable the time until
    then, cpu what all ranks and what they started used beyond the training. step_ratio: an iteration's time meanwhile
    by an undisturbed one's, none where no iteration ran. peak, held: bytes of the machine's memory beyond the state, at
    most and between saves. nbytes: of a rank's files. why: what kept it from running; then there is nothing else.
    """

    name: str
    ranks: int
    first_block_s: float = 0.0
    block: Series | None = None
    lost: Series | None = None
    durable: Series | None = None
    cpu: Series | None = None
    step_ratio: float | None = None
    peak_nbytes: int = 0
    held_nbytes: int = 0
    nbytes: int = 0
    note: str = ""
    why: str = ""

    @classmethod
    def absent(cls, kind: Kind, ranks: int, why: str) -> "PeerResult":
        """A row for a way that did not run."""
        return cls(kind.name, ranks, note=kind.note, why=why)

    @property
    def cells(self) -> list[str]:
        """The row under COLUMNS."""
        if self.why:
            return [self.name, self.why, *[""] * (len(COLUMNS) - 2)]
        step = "-" if self.step_ratio is None else f"{self.step_ratio:.2f}"
        spans = [text(series).removesuffix(" s") for series in (self.block, self.lost, self.durable, self.cpu)]
        memory = f"{self.peak_nbytes / _GIB:.2f} / {self.held_nbytes / _GIB:.2f}"
        return [self.name, digits(self.first_block_s), *spans, step, memory, f"{self.nbytes / _GIB:.2f}"]

    def as_json(self) -> dict[str, Any]:
        """Every number."""
        series = {key: getattr(self, key) for key in ("block", "lost", "durable", "cpu")}
        return dataclasses.asdict(self) | {key: one and one.as_json() for key, one in series.items()}


def table(peers: Sequence[PeerResult], ranks: int) -> Table:
    """A table for people, of the rows with so many ranks."""
    made = Table(title=f"The same state and loop, saved by others; {_ranks(ranks)}", title_justify="left")
    for column in COLUMNS:
        made.add_column(column, justify="left" if column == "how" else "right")
    for peer in peers:
        if peer.ranks == ranks:
            name, *rest = peer.cells
            made.add_row(name + (f"\n[dim]{peer.note}[/]" if peer.note else ""), *rest)
    return made


def markdown(peers: Sequence[PeerResult], ranks: int) -> str:
    """The same table for a page."""
    some = [peer for peer in peers if peer.ranks == ranks]
    notes = [f" ({peer.note})" if peer.note else "" for peer in some]
    return markdown_table(
        COLUMNS, ([peer.cells[0] + note, *peer.cells[1:]] for peer, note in zip(some, notes, strict=True))
    )


def draw(peers: Sequence[PeerResult], path: Path) -> None:
    """Training time lost and time until durable, side by side for each number of ranks."""
    ran = [peer for peer in peers if not peer.why]
    counts = sorted({peer.ranks for peer in ran})
    if not ran:
        return
    most = max(sum(peer.ranks == ranks for peer in ran) for ranks in counts)
    figure = drawing.figure(7 * len(counts), 1.2 + 0.55 * most)
    for axes, ranks in zip(figure.subplots(1, len(counts), squeeze=False)[0], counts, strict=True):
        _draw_one(axes, [peer for peer in ran if peer.ranks == ranks])
        axes.set_title(_ranks(ranks), fontsize=10)
    drawing.save(figure, path)


def _draw_one(axes: Any, peers: Sequence[PeerResult]) -> None:
    for offset, key, color in ((-0.2, "lost", "tab:orange"), (0.2, "durable", "tab:blue")):
        series = [getattr(peer, key) for peer in peers]
        medians = [max(0.0, one.median) for one in series]
        spread = [[m - max(0.0, one.low) for m, one in zip(medians, series, strict=True)]]
        spread.append([max(0.0, one.high) - m for m, one in zip(medians, series, strict=True)])
        positions = [index + offset for index in range(len(peers))]
        axes.barh(positions, medians, 0.38, xerr=spread, color=color, label=key, error_kw={"linewidth": 0.8})
        for position, one in zip(positions, series, strict=True):
            axes.text(max(0.0, one.high), position, f" {digits(one.median)}", va="center", fontsize=8)
    axes.margins(x=0.12)
    axes.set_yticks(range(len(peers)), [peer.name for peer in peers], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("seconds: training time lost per save, and from the call until durable")
    axes.legend(fontsize=8)


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"
