"""The figures of a run, as they lie in docs/charts/data.json, and the charts that are drawn from them."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from bench import drawing
from bench.charts.values import Constants, Stated
from tests.simulation.milestones import Times

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DATA = "data.json"
MILESTONES = {
    "staged_s": "staged",
    "protected_s": "protected",
    "durable_s": "durable",
    "restored_s": "restored",
}
CHOSEN = "xor"  # the scheme of the first chart
_TICKS = [base * 10**power for power in range(-3, 4) for base in (1, 2, 5)]
_SCHEMES = {"none": "redundancy off", "xor": "xor", "double": "double"}
_MARKS = {"none": "C0^-", "xor": "C1o-", "double": "C2s-"}


@dataclass(frozen=True, slots=True)
class Data:
    """Of one run. taken: the day; machine: on which the constants were measured."""

    taken: str
    machine: dict[str, Any]
    stated: Stated
    constants: Constants
    plays: list[Times]

    @property
    def raw(self) -> bytes:
        """As the file has it."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"

    @property
    def digest(self) -> str:
        """Names these figures in each chart."""
        return hashlib.sha256(self.raw).hexdigest()[:16]

    @property
    def sizes(self) -> list[int]:
        """Numbers of nodes."""
        return sorted({one.nodes for one in self.plays})

    @property
    def schemes(self) -> list[str]:
        """Those that were played, in the order of the legend."""
        return [name for name in _SCHEMES if any(one.scheme == name for one in self.plays)]

    def of(self, scheme: str) -> list[Times]:
        """Its plays by size."""
        return sorted((one for one in self.plays if one.scheme == scheme), key=lambda one: one.nodes)


def read(folder: Path) -> Data:
    """Raises FileNotFoundError, msgspec.ValidationError."""
    return msgspec.json.decode((folder / DATA).read_bytes(), type=Data)


def write(folder: Path, data: Data) -> None:
    """The figures, beside the charts."""
    (folder / DATA).write_bytes(data.raw)


def draw(folder: Path, data: Data) -> None:
    """All charts. Each names the figures that it was drawn from."""
    for name, make in FIGURES.items():
        drawing.save(make(data), folder / name, identifier=data.digest)


def _nodes(axis: "Axes", sizes: Sequence[int]) -> None:
    axis.set_xscale("log")
    axis.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axis.minorticks_off()
    axis.set_xlabel("nodes, 8 ranks each")
    axis.grid(visible=True, alpha=0.3)


def _line(axis: "Axes", plays: Sequence[Times], what: str, label: str, form: str) -> None:
    points = [(one.nodes, value) for one in plays if (value := getattr(one, what)) is not None]
    if points:
        axis.plot([nodes for nodes, _ in points], [value for _, value in points], form, label=label)


def milestones(data: Data) -> Any:
    """Seconds until each milestone, over the number of nodes."""
    figure = drawing.figure(7, 4)
    axis = figure.subplots()
    for (what, label), mark in zip(MILESTONES.items(), "o^sD", strict=True):
        _line(axis, data.of(CHOSEN), what, label, f"{mark}-")
    axis.set_yscale("log")
    low, high = axis.get_ylim()
    ticks = [tick for tick in _TICKS if low <= tick <= high]
    axis.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    _nodes(axis, data.sizes)
    axis.set(ylabel="seconds", title=f"redundancy {CHOSEN}, {data.stated.nbytes / 2**30:g} GiB a rank")
    figure.legend(loc="outside right center")
    return figure


def schemes(data: Data) -> Any:
    """A panel for each milestone, a line for each scheme. Each panel begins at zero."""
    figure = drawing.figure(9, 6)
    for axis, (what, label) in zip(figure.subplots(2, 2).flat, MILESTONES.items(), strict=True):
        for scheme in data.schemes:
            _line(axis, data.of(scheme), what, _SCHEMES[scheme], _MARKS[scheme])
        _nodes(axis, data.sizes)
        axis.set(title=label, ylabel="seconds")
        axis.set_ylim(0, 1.15 * axis.get_ylim()[1])
    handles = axis.get_legend_handles_labels()
    figure.legend(*handles, loc="outside upper center", ncols=len(data.schemes))
    return figure


FIGURES = {"milestones.svg": milestones, "schemes.svg": schemes}
