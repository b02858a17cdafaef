"""The charts of a report, drawn by matplotlib as SVG that stands in a page."""

import io
import re
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, TypeVar

from ckptd.cli.page.colors import mark, themed
from ckptd.history.goodput import Kind, Span, over_time
from ckptd.history.runs import Damage, Loss, Restore, Run, Save
from ckptd.shared.base.errors import UsageError
from ckptd.system import human

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TIMELINE_RUNS: Final = 40  # of more, the last
_POINTS: Final = 3000  # of a chart: more would lie on each other, and make the page large
_MARKS: Final = 100  # of a row, where each has a text
_BUCKETS: Final = 60
_BINS: Final = 24
_COLUMNS: Final = 9  # of a wide legend
_DROPPED_RE: Final = re.compile(r"<metadata>.*?</metadata>|<style type=\"text/css\">.*?</style>", re.DOTALL)
_ID_RE: Final = re.compile(r'(\bid="|url\(#|href="#)')
_TITLED_RE: Final = re.compile(r'<g id="([^"]*-title-([0-9]+))">')


Event = Loss | Restore | Damage
_T = TypeVar("_T")


def thinned(found: Sequence[_T], most: int = _POINTS) -> Sequence[_T]:
    """Those that a chart with a point for each shows: one of so many, each as far from the next."""
    return found[:: max(1, -(-len(found) // most))]


class Chart:
    """An empty figure, in inches. title(artist, text) shows text where the artist is pointed at."""

    def __init__(self, width: float, height: float) -> None:
        try:
            from matplotlib.figure import Figure  # noqa: PLC0415 - an extra, and slow to import
        except ImportError:
            raise UsageError("the report is drawn by matplotlib, which is not installed",
                             hint="pip install 'ckptd[report]'") from None  # fmt: skip
        self.figure = Figure(figsize=(width, height), layout="constrained")
        self._titles: list[str] = []

    def title(self, artist: Any, text: str) -> None:
        """For whom points at it, and for those who cannot see it."""
        artist.set_gid(f"title-{len(self._titles)}")
        self._titles.append(text)

    def svg(self, name: str) -> str:
        """For a page. name: stands before each id, so that charts of one page do not share one."""
        import matplotlib as mpl  # noqa: PLC0415

        out = io.StringIO()
        with mpl.rc_context({"svg.hashsalt": "ckptd", "svg.fonttype": "none"}):
            self.figure.savefig(out, format="svg", metadata={"Date": None}, transparent=True)
        text = out.getvalue()
        text = _DROPPED_RE.sub("", text[text.index("<svg") :])
        text = _ID_RE.sub(rf"\g<1>{name}-", text)
        return themed(_TITLED_RE.sub(self._titled, text))

    def _titled(self, found: re.Match[str]) -> str:
        text = self._titles[int(found[2])]
        return f"{found[0]}<title>{_escaped(text)}</title>"


def timeline(runs: Sequence[Run], found: Sequence[Span], texts: Callable[[Event], str]) -> str:
    """A row for each run: what its time was used for, saves, drains, restores, losses, damage. texts: of an event."""
    first = max(0, len(runs) - TIMELINE_RUNS)
    shown = runs[first:]
    chart = Chart(9.5, 1.1 + 0.42 * len(shown))
    axis = chart.figure.subplots()
    for kind in Kind:
        bars: dict[int, list[tuple[float, float]]] = {}
        for span in found:
            if span.kind is kind and span.run >= first:
                bars.setdefault(span.run - first, []).append((_days(span.start), _days(span.stop) - _days(span.start)))
        for place, widths in bars.items():
            axis.broken_barh(_joined(widths), (place - 0.32, 0.28), facecolors=mark(kind.value))
    for place, run in enumerate(shown):
        _row(chart, axis, place, run, texts)
    axis.set_yticks(range(len(shown)), [f"run {run.incarnation}" for run in shown])
    axis.set_ylim(len(shown) - 0.4, -0.6)
    _of_time(axis)
    handles = [_patch(kind.value, mark(kind.value)) for kind in Kind] + [_patch("drain", mark("drain"))]
    handles += [_line("save", mark("save"), "|"), _line("loss", mark("loss"), "X")]
    if any(run.damages for run in shown):
        handles += [_line("damage", mark("damage"), "D"), _line("damage made good", mark("damage"), "D", filled=False)]
    _legend(chart, handles, columns=min(len(handles), _COLUMNS))
    return chart.svg("timeline")


def _row(chart: Chart, axis: "Axes", place: int, run: Run, texts: Callable[[Event], str]) -> None:
    staged = [save for save in run.saves if save.staged_s is not None]
    ticks = [_days(save.at) for save in thinned(staged)]
    axis.plot(ticks, [place + 0.06] * len(ticks), "|", color=mark("save"), markersize=5)
    drains = [
        (_days(save.at + save.durable_s - save.drain_s), save.drain_s / 86400)
        for save in staged
        if save.durable_s is not None and save.drain_s is not None
    ]
    axis.broken_barh(_joined(drains), (place + 0.14, 0.16), facecolors=mark("drain"))
    for loss in run.losses:
        chart.title(axis.plot(_days(loss.at), place - 0.18, "X", color=mark("loss"), markersize=8)[0], texts(loss))
    for restore in run.restores:
        at = _days(restore.at)
        chart.title(axis.plot(at, place - 0.18, ">", color=mark("restore"), markersize=7)[0], texts(restore))
    for damage in thinned(run.damages, _MARKS):
        face = "none" if damage.mended else mark("damage")
        (drawn,) = axis.plot(_days(damage.at), place + 0.4, "D", color=mark("damage"), mfc=face, markersize=5)
        chart.title(drawn, texts(damage))


def _joined(bars: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Begin and width; bars that nearly touch are one, so that a page of a month stays small."""
    if not bars:
        return []
    ordered = sorted(bars)
    near = (ordered[-1][0] + ordered[-1][1] - ordered[0][0]) / 2000
    found = [ordered[0]]
    for start, width in ordered[1:]:
        last, size = found[-1]
        if start - (last + size) <= near and width < near:
            found[-1] = (last, start + width - last)
        else:
            found.append((start, width))
    return found


def histogram(seconds: Sequence[float], name: str, color: str, what: str) -> str:
    """How often a duration was how long."""
    chart = Chart(4.6, 2.6)
    axis = chart.figure.subplots()
    unit, scale = ("ms", 1000.0) if max(seconds) < 1 else ("s", 1.0)
    values = [scale * one for one in seconds]
    low, high = min(values), max(values)
    span = (low, high) if high > low else (0.9 * low, 1.1 * low or 1.0)
    axis.hist(values, bins=min(_BINS, max(5, len(values) // 4)), range=span, color=mark(color))
    axis.set_xlabel(f"{what}, {unit}")
    axis.set_ylabel("saves")
    axis.locator_params(axis="y", integer=True)
    _plain(axis)
    return chart.svg(name)


def bytes_over_saves(saves: Sequence[Save], value: Callable[[Save], float], name: str, color: str, what: str) -> str:
    """A point for each save, as many as the chart has room for. what: of the axis; {}: the unit, as in the text."""
    chart, saves = Chart(4.6, 2.6), thinned(saves)
    axis = chart.figure.subplots()
    values = [value(save) for save in saves]
    unit, nbytes = human.size_unit(max(values, default=0.0))
    axis.plot(
        [_days(save.at) for save in saves], [one / nbytes for one in values], ".", color=mark(color), markersize=4
    )
    axis.set_ylim(bottom=0)
    axis.set_ylabel(what.format(unit))
    _of_time(axis)
    return chart.svg(name)


def goodput(found: Sequence[Span]) -> str:
    """Shares of the time by what it was used for, over time."""
    chart = Chart(9.5, 2.8)
    axis = chart.figure.subplots()
    parts = over_time(found, _BUCKETS)
    width = (found[-1].stop - found[0].start) / _BUCKETS
    lefts = [_days(start) for start, _ in parts]
    bottom = [0.0] * len(parts)
    for kind in Kind:
        shares = [100 * one[kind] / width for _, one in parts]
        axis.bar(lefts, shares, width / 86400, bottom, align="edge", color=mark(kind.value), antialiased=False)
        bottom = [low + share for low, share in zip(bottom, shares, strict=True)]
    axis.set_ylim(0, 100)
    axis.set_ylabel("% of the time")
    _of_time(axis)
    _legend(chart, [_patch(kind.value, mark(kind.value)) for kind in Kind], columns=len(Kind))
    return chart.svg("goodput")


def _days(at: float) -> float:
    return at / 86400  # since 1970, as matplotlib.dates has it


def _of_time(axis: "Axes") -> None:
    from matplotlib import dates  # noqa: PLC0415

    zone = datetime.now(tz=UTC).astimezone().tzinfo
    made: Any = dates  # has no types
    locator = made.AutoDateLocator(tz=zone, minticks=3, maxticks=8)
    axis.xaxis.set_major_locator(locator)
    axis.xaxis.set_major_formatter(made.ConciseDateFormatter(locator, tz=zone))
    _plain(axis)


def _plain(axis: "Axes") -> None:
    axis.spines[["top", "right"]].set_visible(False)
    axis.spines[["left", "bottom"]].set_color(mark("line"))
    axis.tick_params(colors=mark("soft"), labelsize=8)
    axis.grid(axis="x", color=mark("line"), linewidth=0.5)
    axis.set_axisbelow(True)
    for label in (axis.xaxis.label, axis.yaxis.label, axis.xaxis.get_offset_text()):
        label.set(color=mark("soft"), fontsize=8)


def _patch(label: str, color: str) -> Any:
    from matplotlib.patches import Patch  # noqa: PLC0415

    return Patch(color=color, label=label)


def _line(label: str, color: str, marker: str, *, filled: bool = True) -> Any:
    from matplotlib.lines import Line2D  # noqa: PLC0415

    face = color if filled else "none"
    return Line2D([], [], color=color, marker=marker, markerfacecolor=face, linestyle="none", label=label)


def _legend(chart: Chart, handles: Sequence[Any], *, columns: int) -> None:
    legend = chart.figure.legend(handles=handles, loc="outside upper left", ncols=columns, frameon=False, fontsize=8)
    for text in legend.get_texts():
        text.set_color(mark("ink"))


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
