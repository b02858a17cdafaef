"""The page of a report: HTML with its style and its charts inside, and nothing from elsewhere."""

from collections.abc import Iterable, Sequence
from html import escape

from ckptd.cli import history as verb
from ckptd.cli import journals
from ckptd.cli.advise import name_of, percent, sentences
from ckptd.cli.page import charts, colors
from ckptd.cli.view.goodput import share, time_lost
from ckptd.history.advice import Advice
from ckptd.history.runs import Damage, Loss, Run, Save
from ckptd.history.summary import RunRow, Summary
from ckptd.system import human

PROBLEMS = 50  # of more, the last
_EVENTS = 500
_STYLE = """
body{margin:0 auto;max-width:1000px;padding:24px;background:var(--paper);color:var(--ink);
 font:14px/1.45 system-ui,"Segoe UI",Roboto,sans-serif}
h1{font-size:22px;margin:0 0 2px;overflow-wrap:anywhere}h2{font-size:16px;margin:28px 0 6px}
p{margin:4px 0}.soft{color:var(--soft)}.bad{color:var(--loss)}
dl{display:flex;flex-wrap:wrap;gap:10px 28px;margin:16px 0}dl div{min-width:90px}
dt{color:var(--soft);font-size:12px}dd{margin:0;font-size:19px}
.pair{display:flex;flex-wrap:wrap;gap:12px}.pair figure{flex:1 1 420px}
figure{margin:0;break-inside:avoid}svg{width:100%;height:auto}figcaption{color:var(--soft);font-size:12px}
.wide{overflow-x:auto}table{border-collapse:collapse;font-size:13px;font-variant-numeric:tabular-nums}
th,td{padding:3px 12px 3px 0;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap}
th{color:var(--soft);font-weight:500}.text{text-align:left}td.text{white-space:normal}
tr{break-inside:avoid}.best{font-weight:600}
@media print{body{max-width:none;padding:0}h2{break-after:avoid}}
"""
Cell = str | tuple[str, str]  # text, and a class


def page(history: journals.History, summary: Summary, advice: Advice | str) -> str:
    """The whole document. Text of the journal is escaped: it is data."""
    title = f"{summary.job}: what its checkpoints cost"
    body = [
        f"<h1>{_text(summary.job)}</h1>",
        f'<p class="soft">{_text(history.where)}; {_text(_until(summary))}</p>',
        *_warnings(summary),
        _facts(summary),
        *_goodput(history, summary),
        *_saves(history.runs),
        *_advice(advice),
        *_runs(summary.runs),
        *_events(summary.runs),
        *_problems(summary.runs),
        '<p class="soft">docs/history.md of ckptd defines these figures.</p>',
    ]
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{_text(title)}</title>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<style>{colors.style()}{_STYLE}</style>\n</head>\n<body>\n" + "\n".join(body) + "\n</body>\n</html>\n"
    )


def _text(text: str) -> str:
    return escape(human.printable(text))


def _until(summary: Summary) -> str:
    return f"its journal until {journals.when(max(row.last for row in summary.runs))}"


def _warnings(summary: Summary) -> list[str]:
    found = []
    if summary.damaged:
        found.append(f"{human.counted(summary.damaged, 'damaged part')} of the journal passed over")
    if dropped := sum(row.missing for row in summary.runs):
        found.append(f"{human.counted(dropped, 'record')} dropped while the store was away")
    return [f'<p class="bad">{_text(one)}: figures may lack something</p>' for one in found]


def _facts(summary: Summary) -> str:
    found, stall, durable = summary.goodput, summary.stall, summary.to_durable
    rate = summary.store_bytes_per_s
    facts = [
        ("ETTR", share(found.training_s, found.total_s)),
        ("time", human.duration(found.total_s)),
        ("runs", str(len(summary.runs))),
        ("failures", str(found.failures)),
        ("saves", str(stall.count if stall else 0)),
        ("stall, median", verb.milliseconds(stall.median) if stall else "-"),
        ("stall, p99", verb.milliseconds(stall.p99) if stall else "-"),
        ("durable after", human.duration(durable.median) if durable else "-"),
        ("store", human.rate(rate) if rate else "-"),
        ("staged", human.size(summary.staged_nbytes)),
        ("to the store", human.size(summary.drained_nbytes)),
    ]
    if damages := [one for row in summary.runs for one in row.damages]:
        facts.append(("damage", f"{len(damages):,}, {sum(bool(one.mended) for one in damages):,} made good"))
    return "<dl>" + "".join(f"<div><dt>{_text(k)}</dt><dd>{_text(v)}</dd></div>" for k, v in facts) + "</dl>"


def _goodput(history: journals.History, summary: Summary) -> list[str]:
    found = summary.goodput
    if not history.spans:
        return []
    lost = [("training", found.training_s), *time_lost(found)]
    body: list[list[Cell]] = [
        [(name, "text"), human.duration(seconds), share(seconds, found.total_s)] for name, seconds in lost
    ]
    shown = history.runs[-charts.TIMELINE_RUNS :]
    more = f" The last {len(shown)} of {len(history.runs)} runs." if len(shown) < len(history.runs) else ""
    return [
        _figure(
            "Runs",
            charts.timeline(history.runs, history.spans, event_text),
            f"Each run: above, what its time was used for; below, saves, drains to the store, and damage.{more}",
        ),
        _figure("Goodput over time", charts.goodput(history.spans), "Training is what counts; ETTR is its share."),
        _table("goodput", [("", "text"), "time", "share"], body),
    ]


def _saves(runs: Sequence[Run]) -> list[str]:
    staged = [save for run in runs for save in run.saves if save.staged_s is not None]
    if not staged:
        return []
    stalls = charts.histogram([save.stall_s for save in staged], "stall", "stall", "stall of a save")
    figures = [_inner(stalls, "How long training waited for a save.")]
    durable = [save.durable_s for save in staged if save.durable_s is not None]
    if durable:
        drawn = charts.histogram(durable, "durable", "drain", "from staged to durable")
        figures.append(_inner(drawn, "How long a save took until the store had it."))
        drained = [save for save in staged if save.drain_s]
        rates = charts.bytes_over_saves(
            drained, lambda save: save.drained_nbytes / (save.drain_s or 1), "rate", "drain", "{}/s"
        )
        figures.append(_inner(rates, f"Rate of the store, each drain.{_shown(drained)}"))
    sizes = charts.bytes_over_saves(staged, lambda save: save.nbytes, "bytes", "save", "{}")
    figures.append(_inner(sizes, f"Bytes of each save.{_shown(staged)}"))
    return ["<h2>Saves</h2>", '<div class="pair">', *figures, "</div>"]


def _shown(saves: Sequence[Save]) -> str:
    each = -(-len(saves) // max(1, len(charts.thinned(saves))))
    return f" 1 of {each} is shown." if each > 1 else ""


def _advice(advice: Advice | str) -> list[str]:
    if isinstance(advice, str):
        return ["<h2>How often to save</h2>", f'<p class="soft">No advice: {_text(advice)}</p>']
    heads: list[Cell] = ["save every", "that is", "drain", "stalls", "repeated", "checkpoints", "ETTR", ("", "text")]
    body: list[list[Cell]] = []
    for one in advice.choices:
        figures = [percent(one.stalls), percent(one.repeated), percent(one.checkpoints), percent(one.ettr)]
        cells = [human.counted(one.steps, "step"), human.duration(one.seconds), human.duration(one.drain_seconds)]
        body.append([*cells, *figures, (name_of(one, advice), "text best")])
    return [
        "<h2>How often to save</h2>",
        *(f"<p>{_text(line)}</p>" for line in sentences(advice)),
        _table("advice", heads, body),
    ]


def _runs(rows: Sequence[RunRow]) -> list[str]:
    heads: list[Cell] = [
        "run",
        ("began", "text"),
        "lasted",
        ("ended", "text"),
        "ranks",
        "nodes",
        "step",
        "durable step",
    ]
    heads += ["saves", "durable", "stall", "durable after", "store", "ETTR"]
    body: list[list[Cell]] = []
    for row in rows:
        end = row.last if row.ended is None else row.ended
        body.append(
            [
                str(row.incarnation), (journals.when(row.began), "text"), human.duration(end - row.began),
                (verb.ended(row), "text"), str(row.world_size), str(row.nodes), _or_none(row.newest_step),
                _or_none(row.newest_durable_step), str(sum(row.saves_by_end.values())),
                str(row.saves_by_end.get("durable", 0)), verb.milliseconds(row.stall.median) if row.stall else "-",
                human.duration(row.to_durable.median) if row.to_durable else "-",
                human.rate(row.store_bytes_per_s) if row.store_bytes_per_s else "-",
                share(row.goodput.training_s, row.goodput.total_s),
            ]
        )  # fmt: skip
    return ["<h2>All runs</h2>", _table("runs", heads, body)]


def _or_none(step: int | None) -> str:
    return "-" if step is None else str(step)


def event_text(event: charts.Event) -> str:
    """A sentence."""
    match event:
        case Loss():
            return verb.loss_text(event)
        case Damage():
            return verb.damage_text(event)
        case _:
            return verb.restore_text(event)


def _events(rows: Sequence[RunRow]) -> list[str]:
    found: list[tuple[float, int, str]] = []
    for row in rows:
        events: list[charts.Event] = [*row.losses, *row.restores, *row.damages]
        found += [(one.at, row.incarnation, event_text(one)) for one in events]
    if not found:
        return []
    found.sort()
    left_out = f" (the last {_EVENTS} of {len(found)})" if len(found) > _EVENTS else ""
    body: list[list[Cell]] = [
        [(journals.when(at), "text"), str(run), (text, "text")] for at, run, text in found[-_EVENTS:]
    ]
    head = f"<h2>Losses, restores and damage{left_out}</h2>"
    return [head, _table("events", [("at", "text"), "run", ("", "text")], body)]


def _problems(rows: Sequence[RunRow]) -> list[str]:
    found = [(one.at, row.incarnation, one.times, one.text) for row in rows for one in row.problems]
    if not found:
        return []
    found.sort()
    left_out = f" (the last {PROBLEMS} of {len(found)})" if len(found) > PROBLEMS else ""
    body: list[list[Cell]] = [
        [(journals.when(at), "text"), str(run), str(times), (text, "text")]
        for at, run, times, text in found[-PROBLEMS:]
    ]
    heads: list[Cell] = [("at", "text"), "run", "times", ("", "text")]
    return [f"<h2>Problems{left_out}</h2>", _table("problems", heads, body)]


def _figure(head: str, svg: str, caption: str) -> str:
    return f"<h2>{_text(head)}</h2>\n{_inner(svg, caption)}"


def _inner(svg: str, caption: str) -> str:
    drawn = svg.replace("<svg ", f'<svg role="img" aria-label="{_text(caption)}" ', 1)
    return f"<figure>{drawn}<figcaption>{_text(caption)}</figcaption></figure>"


def _table(name: str, heads: Sequence[Cell], rows: Iterable[Sequence[Cell]]) -> str:
    head = "".join(_cell("th", cell) for cell in heads)
    body = "\n".join(f"<tr>{''.join(_cell('td', cell) for cell in row)}</tr>" for row in rows)
    return f'<div class="wide"><table id="{name}"><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></div>'


def _cell(tag: str, cell: Cell) -> str:
    text, kind = cell if isinstance(cell, tuple) else (cell, "")
    return f'<{tag} class="{kind}">{_text(text)}</{tag}>' if kind else f"<{tag}>{_text(text)}</{tag}>"
