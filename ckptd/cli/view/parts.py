"""What every view is made of: glyphs, bars, rows of facts, names that are shortened instead of wrapped."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.segment import Segment
from rich.style import Style
from rich.table import Table
from rich.text import Text

from ckptd.system import human

NEARLY_FULL = 0.9  # of the memory that may be used
_LEAST_COLUMNS = 8  # of a name that has to make room
_LEVELS = "▁▂▃▄▅▆▇█"
_ASCII_LEVELS = "0123456789"


@dataclass(frozen=True)
class Marks:
    """Glyphs in Unicode or ASCII. Each is distinct without colour."""

    reached: str
    running: str
    missed: str
    none: str
    used: str
    free: str
    dot: str
    done: str
    rest: str
    levels: str
    gap: str  # of a name that is shortened


UNICODE = Marks(
    reached="✓", running="…", missed="✗", none="–", used="■", free="□", dot="·", done="━", rest="─",  # noqa: RUF001
    levels=_LEVELS, gap="…",
)  # fmt: skip
ASCII = Marks(
    reached="yes", running="...", missed="no", none="-", used="#", free=".", dot="-", done="#", rest=".",
    levels=_ASCII_LEVELS, gap="...",
)  # fmt: skip


def marks_for(options: ConsoleOptions) -> Marks:
    """The glyphs that this console can encode."""
    return ASCII if options.ascii_only else UNICODE


@dataclass(frozen=True)
class Name:
    """A text from outside on one line: never markup, never control codes; its middle goes where it is too long."""

    text: str
    style: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        text = human.printable(self.text).replace("\n", " ")
        yield Text(shortened(text, options.max_width, marks_for(options).gap), self.style, no_wrap=True)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        columns = cell_len(human.printable(self.text))
        return Measurement(min(_LEAST_COLUMNS, columns), min(columns, options.max_width))


def shortened(text: str, columns: int, gap: str = "…") -> str:
    """The text, or its two ends around a gap: names differ at the end, and begin with where they belong."""
    if cell_len(text) <= columns:
        return text
    room = columns - cell_len(gap)
    if room < 2:  # noqa: PLR2004 - nothing to put around it
        return set_cell_size(text, max(columns, 0)).rstrip()
    head = set_cell_size(text, room // 2).rstrip()
    tail = text
    while cell_len(tail) > room - room // 2:
        tail = tail[1:]
    return f"{head}{gap}{tail}"


def bar(done: float, total: float, columns: int, style: str, marks: Marks) -> Text:
    """How much of total is done; an empty total is a full bar, and a bar that is not done is not full."""
    share = done / total if total else 1.0
    full = columns if share >= 1 else min(int(share * columns), columns - 1)
    return Text.assemble((marks.done * full, style), (marks.rest * (columns - full), "dim"))


def levels(shares: Iterable[float], marks: Marks) -> str:
    """One glyph for each share of 1; the last one is for what is done."""
    last = len(marks.levels) - 1
    return "".join(marks.levels[last if share >= 1 else min(int(max(share, 0) * last), last - 1)] for share in shares)


def plain_table(*, narrow: bool) -> Table:
    """The look of every table: no lines, a dim head."""
    return Table(box=None, padding=(0, 1 if narrow else 3, 0, 0), pad_edge=False, header_style="dim")


@dataclass(frozen=True)
class Column:
    """Of ``Rows``. named: its text may be shortened to make room."""

    head: str
    right: bool = False
    named: bool = False


Cell = tuple[tuple[str, str], ...]  # pieces of text, each with its style


class Rows:
    """A table of one line a row. Of a thousand rows it makes a page in a fifth of the time that a Table takes."""

    def __init__(self, columns: Sequence[Column], *, narrow: bool) -> None:
        self._columns = columns
        self._gap = 1 if narrow else 3
        self._rows: list[Sequence[Cell]] = [[((column.head, "dim"),) for column in columns]]

    def add(self, cells: Sequence[Cell]) -> None:
        """One row, a cell for each column."""
        self._rows.append(cells)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        widths = self._widths(options.max_width)
        styles: dict[str, Style] = {"": Style.null()}
        for row in self._rows:
            for text, style in self._pieces(row, widths, marks_for(options).gap):
                if style not in styles:
                    styles[style] = console.get_style(style)
                yield Segment(text, styles[style])
            yield Segment.line()

    def _pieces(self, row: Sequence[Cell], widths: Sequence[int], gap: str) -> Iterator[tuple[str, str]]:
        blank = 0  # said once something follows
        for column, width, cell in zip(self._columns, widths, row, strict=True):
            used = _columns_of(cell)
            if used > width:
                cell = ((shortened("".join(text for text, _ in cell), width, gap), cell[0][1]),)  # noqa: PLW2901
                used = width
            blank += width - used if column.right else 0
            yield " " * blank, ""
            yield from cell
            blank = self._gap + (0 if column.right else width - used)

    def _widths(self, room: int) -> list[int]:
        """Of each column; the longest names make room for what is no name."""
        widths = [max(_columns_of(row[place]) for row in self._rows) for place in range(len(self._columns))]
        while (excess := sum(widths) + self._gap * (len(widths) - 1) - room) > 0:
            named = [place for place, column in enumerate(self._columns) if column.named]
            able = [place for place in named if widths[place] > _LEAST_COLUMNS]
            if not able:
                break
            widest = max(able, key=lambda place: widths[place])
            next_one = max((widths[place] for place in able if place != widest), default=0)
            least = min(next_one, widths[widest] - 1)
            widths[widest] = max(_LEAST_COLUMNS, widths[widest] - excess, least)
        return widths


def _columns_of(cell: Cell) -> int:
    return sum(cell_len(text) for text, _ in cell)


class Facts:
    """Labels on the left, values on the right."""

    def __init__(self) -> None:
        self.grid = Table.grid(padding=(0, 2, 0, 0))
        self.grid.add_column(no_wrap=True, min_width=6)
        self.grid.add_column(overflow="fold")

    def add(self, label: str, what: RenderableType, style: str = "dim") -> None:
        """One row."""
        self.grid.add_row(Text(label, style), what)

    def error(self, error: str, style: str = "bold red", *, label: str = "error") -> None:
        """An error, and each line of it that says what to type on a row of its own."""
        for kind, line in error_lines(error):
            is_hint = kind == "hint"
            shown = Hint(line) if is_hint else Text(line)
            self.add(label if kind == "error" else kind, shown, "cyan" if is_hint else style)


@dataclass(frozen=True)
class Hint:
    """What to type. Where it needs more than a line, each part begins one: a command stays whole, to be copied."""

    text: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        fits = cell_len(self.text) <= options.max_width
        yield Text(self.text if fits else self.text.replace("; ", "\n"), "cyan")

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement.get(console, options, Text(self.text))


def error_lines(error: str) -> list[tuple[str, str]]:
    """The lines of an error that go together: what is wrong, then what to do."""
    lines: list[tuple[str, str]] = []
    for line in filter(None, map(str.strip, human.printable(error).splitlines())):
        hint = line.removeprefix("hint:").strip() if line.startswith("hint:") else ""
        lines.append(("hint", hint) if hint else ("" if lines else "error", line))
    return lines


def error_text(error: str) -> Text:
    """The same as a text: the message in red, its hint lines in cyan."""
    text = Text()
    for number, (label, line) in enumerate(error_lines(error)):
        text.append("" if number == 0 else "\n")
        text.append("error: " if number == 0 else "", style="bold red")
        text.append(f"    hint: {line}" if label == "hint" else line, style="cyan" if label == "hint" else "")
    return text
