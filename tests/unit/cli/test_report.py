"""``ckptd report``: the page as HTML, its figures beside the journal's, and its picture in a real browser."""

import json
import os
import re
import stat
import sys
from html.parser import HTMLParser

import pytest
from msgspec import structs

from ckptd import cli
from ckptd.cli import history as verb
from ckptd.cli import journals
from ckptd.cli.page import charts, colors
from ckptd.cli.view.goodput import share
from ckptd.history.goodput import Kind, spans, totals
from ckptd.history.runs import runs_of
from ckptd.shared.protocol.journal import Damaged, Durable, Problem
from ckptd.system import human
from tests.unit.cli.report_picture import BROWSERS, browser, picture
from tests.unit.history import stored
from tests.unit.history.played import BEGAN, Training, played, scrubbed
from tests.unit.history.test_runs import flat

VOID = {"meta", "br"}
MAY_REFER = re.compile(r"#[\w-]+\Z")
NAMESPACES = {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}


class Page(HTMLParser):
    """Tables by id as rows of texts; all tags, attributes and text. Raises AssertionError where tags do not match."""

    def __init__(self, text):
        super().__init__()
        self.tables, self.tags, self.attributes, self.titles = {}, [], [], []
        self._open, self._row = [], None
        self.text = ""
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, *pair) for pair in attrs]
        if tag not in VOID:
            self._open.append(tag)
        if tag == "table":
            self.rows = self.tables[dict(attrs)["id"]] = []
        if tag == "tr":
            self.rows.append([])
        if tag in {"td", "th"}:
            self.rows[-1].append("")

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, *pair) for pair in attrs]

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        self.text += data
        if self._open and self._open[-1] in {"td", "th"}:
            self.rows[-1][-1] += data
        if self._open and self._open[-1] == "title":
            self.titles.append(data)


@pytest.fixture(scope="module")
def journal():
    return played(Training(jitter=0.5), failures=4).journal


def write(tmp_path, journal, *flags):
    """The page of a journal, and what the command said."""
    tmp_path.mkdir(exist_ok=True)
    out = tmp_path / "page.html"
    code = cli.invoke(["report", stored.write(tmp_path / "llama", journal), "-o", str(out), *flags])
    return code, out.read_text(encoding="utf-8") if out.exists() else ""


@pytest.fixture
def page(tmp_path, journal):
    return write(tmp_path, journal)[1]


def test_the_page_refers_to_nothing_outside(page):
    found = Page(page)
    assert not {"script", "link", "img", "iframe", "object", "embed", "base"} & {*found.tags}
    for tag, name, value in found.attributes:
        if name in {"href", "xlink:href", "src", "srcset", "action", "data"}:
            assert MAY_REFER.match(value), (tag, name, value)
        assert not name.startswith("on")
    assert {*re.findall(r"[a-z]+://[^\s\"'<)]*", page)} <= NAMESPACES
    assert all(MAY_REFER.match(target) for target in re.findall(r"url\(([^)]*)\)", page))
    assert "@import" not in page


def test_each_reference_of_a_chart_has_its_target(page):
    """Charts of one page share no id: a marker of one would be drawn in another."""
    found = Page(page)
    ids = [value for _, name, value in found.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    used = {value.removeprefix("#") for _, name, value in found.attributes if name in {"href", "xlink:href"}}
    used |= set(re.findall(r"url\(#([^)]*)\)", page))
    assert used
    assert used <= set(ids)


def test_its_tables_have_the_figures_of_the_journal(page, journal):
    runs = runs_of(flat(journal))
    found = Page(page)
    head, *rows = found.tables["runs"]
    rows = [dict(zip(head, row, strict=True)) for row in rows]
    assert [int(row["run"]) for row in rows] == [run.incarnation for run in runs]
    assert [int(row["saves"]) for row in rows] == [len(run.saves) for run in runs]
    assert [int(row["step"]) for row in rows] == [run.top for run in runs]
    assert [row["began"] for row in rows] == [journals.when(run.began) for run in runs]
    assert [int(row["durable"]) for row in rows] == [sum(save.end == "durable" for save in run.saves) for run in runs]
    time = totals(spans(runs), runs)
    spent = {name: (seconds, share) for name, seconds, share in found.tables["goodput"][1:]}
    assert spent["training"] == (human.duration(time.training_s), share(time.training_s, time.total_s))
    assert spent["repeated steps"][0] == human.duration(time.repeated_s)
    assert f"<dt>ETTR</dt><dd>{100 * time.ettr:.3g} %</dd>" in page
    events = sum(len(run.losses) + len(run.restores) for run in runs)
    assert len(found.tables["events"]) == 1 + events


def test_the_advice_is_that_of_the_command(capsys, page, tmp_path):
    capsys.readouterr()
    cli.invoke(["advise", str(tmp_path / "llama"), "--json"])
    advice = json.loads(capsys.readouterr().out)
    rows = Page(page).tables["advice"][1:]
    assert [row[0] for row in rows] == [f"{one['steps']} step{'s'[: one['steps'] != 1]}" for one in advice["choices"]]
    assert [row[0] for row in rows if "best" in row[-1]] == [f"{advice['best']['steps']} steps"]


def test_losses_and_restores_are_named_in_the_timeline(page, journal):
    runs = runs_of(flat(journal))
    texts = [verb.loss_text(one) for run in runs for one in run.losses]
    texts += [verb.restore_text(one) for run in runs for one in run.restores]
    assert sorted(Page(page).titles[1:]) == sorted(texts)
    labels = re.findall(r">(run [0-9]+)</text>", page)
    assert labels == [f"run {run.incarnation}" for run in runs]


def test_damage_that_scrubs_found_is_in_the_timeline_and_in_words(tmp_path, page, journal):
    _, damaged = write(tmp_path / "scrubbed", scrubbed(journal))
    texts = [verb.damage_text(one) for run in runs_of(flat(scrubbed(journal))) for one in run.damages]
    assert len(texts) == 2
    found = Page(damaged)
    assert sorted(found.titles[1:]) == sorted([*Page(page).titles[1:], *texts])
    assert [row[-1] for row in found.tables["events"] if row[-1] in texts] == texts
    assert "<dt>damage</dt><dd>2, 1 made good</dd>" in damaged
    legend = {"damage", "damage made good"}
    assert legend <= set(re.findall(r">([^<]+)</text>", damaged))
    assert not legend & set(re.findall(r">([^<]+)</text>", page)), "where there is none, nothing speaks of it"


def test_much_damage_makes_no_large_page(tmp_path, journal):
    first, second, *others = scrubbed(journal)
    (one,) = [entry for entry in second if isinstance(entry, Damaged) and entry.mended]
    much = [structs.replace(one, at=one.at + number / 10, rank=number) for number in range(5000)]
    _, page = write(tmp_path, [first, [*second, *much], *others])
    assert "<dt>damage</dt><dd>5,002, 5,001 made good</dd>" in page
    assert len(page) < 2 << 20


def test_each_colour_has_a_light_and_a_dark_value(page):
    used = set(re.findall(r"var\(--([a-z]+)\)", page))
    light, _, dark = page.partition("@media screen and (prefers-color-scheme:dark)")
    assert used >= {kind.value for kind in Kind} | {"ink", "paper", "drain", "loss"}
    assert [name for name in used if f"--{name}:#" not in light or f"--{name}:#" not in dark] == []
    drawn = re.findall(r"(?:fill|stroke): *(#[0-9a-f]{6})", page)
    assert drawn == [], "a chart has a colour that no theme knows"


def test_the_same_journal_is_the_same_page(tmp_path, page):
    out = tmp_path / "again.html"
    cli.invoke(["report", str(tmp_path / "llama"), "-o", str(out)])
    assert out.read_text() == page


@pytest.mark.parametrize("nbytes", [3 << 20, 64 << 30, 5 << 40])
def test_a_page_has_one_unit_for_the_same_bytes(tmp_path, nbytes):
    """Figures above and charts below: of powers of 1024."""
    _, page = write(tmp_path, played(Training(nbytes=nbytes), failures=1).journal)
    unit = {3 << 20: "MiB", 64 << 30: "GiB", 5 << 40: "TiB"}[nbytes]
    assert re.findall(r">([KMGT]i?B)</text>", page) == [unit]
    (stated,) = re.findall(r"<dt>store</dt><dd>[0-9.]+ ([KMGT]iB/s)</dd>", page)
    assert re.findall(r">([KMGT]i?B/s)</text>", page) == [stated]


@pytest.mark.parametrize("at", [0.0, 1e11])
@pytest.mark.parametrize("seconds", [0.0, 1e9])
def test_any_times_that_a_journal_can_have_are_drawn(tmp_path, journal, at, seconds):
    """A clock that was never set, and durations as long as a record may say."""
    whole = flat([journal[0]])
    moved = [structs.replace(one, at=at) for one in whole]
    moved = [structs.replace(one, seconds=seconds) if hasattr(one, "seconds") else one for one in moved]
    moved = [structs.replace(one, drain_s=seconds) if isinstance(one, Durable) else one for one in moved]
    for name, entries in (("all", moved), ("but the begin", [*whole, *moved[1:]])):
        code, page = write(tmp_path / name, [entries])
        assert code == 0
        Page(page)


@pytest.mark.parametrize("at", [2e11, 2.5e11])
def test_a_time_that_no_reader_can_draw_is_damage(tmp_path, journal, at):
    code, page = write(tmp_path, [[*journal[0], Problem(at=at, text="late")]])
    assert code == 1
    assert "1 damaged part" in page


def test_text_of_the_journal_is_data(tmp_path, journal):
    bad = '<script>alert("1")</script>\x1b[2J'
    problem = Problem(at=BEGAN + 9, text=bad)
    _, page = write(tmp_path, [[*journal[0], problem], *journal[1:]])
    assert "<script>" not in page
    assert ['<script>alert("1")</script>\N{REPLACEMENT CHARACTER}[2J' in row for row in Page(page).tables["problems"]]
    assert "\x1b" not in page


def test_a_job_of_many_runs_stays_readable(tmp_path):
    _, page = write(tmp_path, played(Training(step_s=20.0), failures=60, mean_s=3000.0).journal)
    assert len(re.findall(r">run [0-9]+</text>", page)) == charts.TIMELINE_RUNS
    assert "The last 40 of 61 runs." in page
    assert len(Page(page).tables["runs"]) == 62
    assert len(page) < 3 << 20


def test_a_long_run_makes_no_large_page(tmp_path):
    play = played(Training(save_every=2, jitter=0.2), failures=1, mean_s=60_000.0)
    assert sum(len(one) for one in play.journal) > 20_000
    page = write(tmp_path, play.journal)[1]
    assert len(page) < 2 << 20
    assert re.search(r"Bytes of each save\. 1 of [0-9]+ is shown\.", page)


@pytest.mark.parametrize("kept", [1, 2])
def test_a_job_that_has_just_begun_has_a_page(tmp_path, journal, kept):
    code, page = write(tmp_path, [journal[0][:kept]])
    assert code == 0
    assert "No advice: it needs two saves" in page
    Page(page)


def test_damage_is_on_the_page(tmp_path, journal, capsys):
    job = stored.write(tmp_path / "llama", journal)
    stored.damage(job)
    out = tmp_path / "page.html"
    assert cli.invoke(["report", job, "-o", str(out), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["damaged"], found["runs"], found["nbytes"]) == (1, 5, out.stat().st_size)
    assert "1 damaged part of the journal passed over: figures may lack something" in out.read_text()


def test_a_page_that_cannot_be_written_leaves_nothing(tmp_path, journal, capsys):
    job = stored.write(tmp_path / "llama", journal)
    assert cli.invoke(["report", job, "-o", str(tmp_path / "no" / "page.html")]) == 2
    assert "page.html: No such file or directory" in capsys.readouterr().err
    (tmp_path / "there").mkdir()
    assert cli.invoke(["report", job, "-o", str(tmp_path / "there")]) == 2
    assert "there: it is there and is no regular file\nhint: -o report.html is a file" in capsys.readouterr().err
    assert not (tmp_path / "there.part").exists()


def test_what_is_no_file_is_never_replaced_and_a_link_stays_one(tmp_path, journal, capsysbinary):
    job = stored.write(tmp_path / "llama", journal)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to(tmp_path / "pipe")
    assert cli.invoke(["report", job, "-o", str(tmp_path / "device")]) == 2
    assert (tmp_path / "device").is_symlink()
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    (tmp_path / "old.html").write_text("old")
    (tmp_path / "link.html").symlink_to(tmp_path / "old.html")
    capsysbinary.readouterr()
    assert cli.invoke(["report", job, "-o", str(tmp_path / "link.html")]) == 0
    assert (tmp_path / "link.html").is_symlink()
    page = (tmp_path / "old.html").read_bytes()
    capsysbinary.readouterr()
    assert cli.invoke(["report", job, "-o", "-"]) == 0
    assert len(capsysbinary.readouterr().out) == len(page)


def test_without_the_library_the_command_says_what_to_install(tmp_path, journal, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, page = write(tmp_path, journal)
    err = capsys.readouterr().err
    assert (code, page) == (2, "")
    assert "hint: pip install 'ckptd[report]'" in err


# --- in a browser ---


def pixels(page, out, *, dark):
    """Rows of (red, green, blue), 0 to 255."""
    from matplotlib.image import imread  # noqa: PLC0415

    picture(page, out, dark=dark, size=(1040, 2400))
    return (imread(out)[:, :, :3] * 255).round().astype(int)


def is_color(image, name, *, dark, near=12):
    color = colors.COLORS[name]
    value = (color.dark if dark else color.light).removeprefix("#")
    wanted = [int(value[at : at + 2], 16) for at in (0, 2, 4)]
    return (abs(image - wanted) <= near).all(axis=2)


def blots(mask, least):
    """Bounding boxes (top, left, bottom, right) of connected parts of at least so many pixels."""
    left = {(int(y), int(x)) for y, x in zip(*mask.nonzero(), strict=True)}
    found = []
    while left:
        part, todo = [], [left.pop()]
        while todo:
            y, x = todo.pop()
            part.append((y, x))
            near = {(y + dy, x + dx) for dy in (-1, 0, 1) for dx in (-1, 0, 1)} & left
            left -= near
            todo += near
        if len(part) >= least:
            ys, xs = zip(*part, strict=True)
            found.append((min(ys), min(xs), max(ys), max(xs)))
    return found


@pytest.mark.process
@pytest.mark.skipif(browser() is None, reason=f"no browser: apt-get install {BROWSERS[0]}")
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_browser_shows_damage_where_it_was_found(tmp_path, journal, dark):
    """Filled; what was made good is a frame around the paper's colour."""
    write(tmp_path, scrubbed(journal))
    image = pixels(tmp_path / "page.html", tmp_path / "page.png", dark=dark)
    runs = runs_of(flat(scrubbed(journal)))
    losses = [one.at for run in runs for one in run.losses]
    crosses = [(left + right) / 2 for _, left, _, right in sorted(blots(is_color(image, "loss", dark=dark), 25))[1:]]
    scale = (crosses[-1] - crosses[0]) / (losses[-1] - losses[0])
    mask = is_color(image, "damage", dark=dark)
    marks = sorted(blots(mask, 12), key=lambda box: (box[0] // 20, box[1]))
    assert len(marks) == 4, "two of the legend, two of the run"
    made_good, lasts = marks[2:]
    expected = [crosses[0] + scale * (one.at - losses[0]) for one in runs[1].damages]
    assert [(left + right) / 2 for _, left, _, right in (made_good, lasts)] == pytest.approx(expected, abs=2)
    filled = [bool(mask[(top + bottom) // 2, (left + right) // 2]) for top, left, bottom, right in (made_good, lasts)]
    assert filled == [False, True]


@pytest.mark.process
@pytest.mark.skipif(browser() is None, reason=f"no browser: apt-get install {BROWSERS[0]}")
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_browser_shows_what_the_journal_says(tmp_path, journal, page, dark):
    """Losses where they were, and as much green over time as the job trained; in the colours of the theme."""
    image = pixels(tmp_path / "page.html", tmp_path / "page.png", dark=dark)
    paper = (0x14, 0x19, 0x1E) if dark else (255, 255, 255)
    assert tuple(image[-1, 5]) == paper
    runs = runs_of(flat(journal))
    losses = sorted(one.at for run in runs for one in run.losses)
    _legend, *marks = sorted(blots(is_color(image, "loss", dark=dark), 25))
    assert len(marks) == len(losses)
    middles = [(left + right) / 2 for _, left, _, right in marks]  # one below the other, from left to right
    scale = (middles[-1] - middles[0]) / (losses[-1] - losses[0])
    assert middles == pytest.approx([middles[0] + scale * (at - losses[0]) for at in losses], abs=2)
    kinds = {kind: is_color(image, kind.value, dark=dark) for kind in Kind}
    green = kinds[Kind.TRAINING]
    boxes = blots(green, 200)
    top, _, bottom, _ = max(boxes, key=lambda box: box[2] - box[0])  # a part of the time in which all was training
    inside = [box for box in boxes if box[0] >= top - 2 and box[2] <= bottom + 2]
    left, right = min(box[1] for box in inside), max(box[3] for box in inside)
    assert right - left > 500
    shown = {kind: int(mask[top:bottom, left - 3 : right + 3].sum()) for kind, mask in kinds.items()}
    true = totals(spans(runs), runs)
    assert shown[Kind.TRAINING] / sum(shown.values()) == pytest.approx(true.ettr, abs=0.03)
    assert shown[Kind.START] / sum(shown.values()) == pytest.approx(true.start_s / true.total_s, abs=0.02)
