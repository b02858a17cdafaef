"""``ckptd history``: the runs of a job and what happened to them, from its journal. Needs no daemon."""

from collections.abc import Sequence
from datetime import UTC, datetime

import click
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from ckptd.cli import common, journals
from ckptd.cli.view.goodput import overall
from ckptd.cli.view.parts import plain_table
from ckptd.history.goodput import totals
from ckptd.history.runs import CLOSED, LOADED, TAKEN_OVER, Damage, Loss, Restore, Run
from ckptd.history.spread import Spread, spread
from ckptd.history.summary import RunRow, Summary, rows, store_bytes_per_s
from ckptd.shared.protocol.messages import Tier
from ckptd.system import human

SCHEMA = 1
Output = Summary  # of --json
_NARROW_COLUMNS = 100
_LAST = 10  # losses and restores that are listed where they were not asked for
_LAST_RUNS = 20  # likewise


@click.command(
    epilog=common.example("ckptd history llama-7b", "ckptd history --losses --since 7d /scratch/$USER/ckpt/llama-7b")
)
@journals.target
@click.option("--since", metavar="TIME", help='Runs that were not over before, such as "24h" or "2026-11-28".')
@click.option("--run", "numbers", type=int, multiple=True, metavar="N", help="Only this run. May be repeated.")
@click.option("--losses", is_flag=True, help="Only runs with a loss or a restore; all of these are listed.")
@click.option("--saves", is_flag=True, help="List each save, too.")
@click.option("--all", "all_runs", is_flag=True, help=f"List each run, not only the last {_LAST_RUNS}.")
@common.json_option
def command(  # noqa: PLR0913, PLR0917 - one for each flag
    target: str, store: str | None, since: str | None, numbers: tuple[int, ...], losses: bool, saves: bool,
    all_runs: bool, as_json: bool,
) -> int:  # fmt: skip
    """Show the runs of JOB: saves, stalls, losses, restores, and where its time went.

    PATH is the job's directory, or a store with one job. Exit code 1 if parts of the journal are damaged.
    """
    history = journals.read(target, store)
    begin = journals.since_of(since, datetime.now(tz=UTC)) if since is not None else None
    shown = journals.chosen(history.runs, numbers, begin, losses=losses)
    summary = summary_of(history, shown, saves=saves)
    if as_json:
        common.print_json(summary)
    else:
        most = None if all_runs or numbers else _LAST_RUNS
        common.show(_view(summary, history.where, most, all_events=losses or bool(numbers), of=len(history.runs)))
    return int(history.damaged > 0)


def summary_of(history: journals.History, shown: Sequence[Run], *, saves: bool = False) -> Summary:
    """Figures of these runs of the job."""
    places = {place for place, run in enumerate(history.runs) if run in shown}
    found = [span for span in history.spans if span.run in places]
    listed = [row for place, row in enumerate(rows(history.runs, history.spans, saves=saves)) if place in places]
    staged = [save for run in shown for save in run.saves if save.staged_s is not None]
    return Summary(
        schema=SCHEMA, job=history.key.job, store=history.key.store, damaged=history.damaged,
        goodput=totals(found, shown), stall=spread(save.stall_s for save in staged),
        to_durable=spread(save.durable_s for save in staged), staged_nbytes=sum(row.staged_nbytes for row in listed),
        drained_nbytes=sum(row.drained_nbytes for row in listed), store_bytes_per_s=store_bytes_per_s(staged),
        runs=listed,
    )  # fmt: skip


def ended(row: RunRow) -> str:
    """How a run ended, in a word or two."""
    return row.how or ("no word" if row.over else "runs?")


def milliseconds(seconds: float) -> str:
    """A short duration: "12 ms", else as others are shown."""
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else human.duration(seconds)


def loss_text(loss: Loss) -> str:
    """A sentence."""
    ranks = f", {human.counted(loss.ranks, 'rank')}" if loss.ranks else ""
    return human.printable(f"{loss.node} lost: {loss.what}{ranks}")


def restore_text(restore: Restore) -> str:
    """A sentence."""
    tiers = ", ".join(f"{tier} ({human.counted(ranks, 'rank')})" for tier, ranks in restore.tiers.items())
    lost = f"; {human.counted(restore.lost_steps, 'step')} lost" if restore.lost_steps else ""
    return f"step {restore.step} restored in {human.duration(restore.seconds)} from {tiers or 'nowhere'}{lost}"


def damage_text(damage: Damage) -> str:
    """A sentence."""
    whose = f"rank {damage.rank} of step {damage.step}" if damage.rank is not None else f"step {damage.step}"
    where = "on the store" if damage.tier == Tier.PFS else f"in memory of {damage.node}"
    what = f"parity of {whose}" if damage.tier == Tier.REBUILT else whose
    state = f"made good from {damage.mended}" if damage.mended else "not made good"
    return human.printable(f"scrub found {what} damaged {where}: {damage.what}; {state}")


def _view(summary: Summary, where: str, most: int | None, *, all_events: bool, of: int) -> RenderableType:
    found = summary.goodput
    body: list[RenderableType] = []
    left_out = f" of {of}" if len(summary.runs) < of else ""
    body.append(Text(f"{len(summary.runs)}{left_out} {'run' if of == 1 else 'runs'}, {overall(found)}"))
    if summary.stall is not None:
        body.append(Text(_saves(summary, summary.stall)))
    if summary.runs:
        listed = summary.runs[-most:] if most is not None else summary.runs
        if len(listed) < len(summary.runs):
            body += [Text(), Text(f"the last {len(listed)} of {len(summary.runs)} runs; all: --all", "dim")]
        body += [Text(), _table(listed)]
    body += _events(summary.runs, None if all_events else _LAST)
    for row in summary.runs:
        body += [Text(f"run {row.incarnation}: {line}") for line in _save_lines(row)]
    dropped = sum(row.missing for row in summary.runs)
    if dropped:
        body.append(Text(f"{human.counted(dropped, 'record')} dropped while the store was away", "yellow"))
    if summary.damaged:
        text = (
            f"{human.counted(summary.damaged, 'damaged part')} of the journal passed over: figures may lack something"
        )
        body.append(Text(text, "yellow"))
    return Group(Text(human.printable(where), "bold", overflow="fold"), Padding(Group(*body), (0, 0, 0, 2)))


def _saves(summary: Summary, stall: Spread) -> str:
    text = f"{human.counted(stall.count, 'save')} of {human.size(summary.staged_nbytes // stall.count)}, "
    text += f"stall {milliseconds(stall.median)} (p99 {milliseconds(stall.p99)})"
    if summary.to_durable is not None:
        text += f", durable after {human.duration(summary.to_durable.median)}"
    rate = summary.store_bytes_per_s
    return text + (f", store {human.rate(rate)}" if rate is not None else "")


def _table(listed: Sequence[RunRow]) -> RenderableType:
    table = plain_table(narrow=common.console().width < _NARROW_COLUMNS)
    for name in ("run", "began", "lasted", "ended", "ranks", "step", "saves", "durable", "stall", "ETTR"):
        table.add_column(name, justify="left" if name in {"began", "ended"} else "right", no_wrap=True)
    for row in listed:
        end = row.last if row.ended is None else row.ended
        ettr = row.goodput.ettr
        cells = [str(row.incarnation), journals.when(row.began), human.duration(end - row.began)]
        figures = [
            str(row.world_size),
            "-" if row.newest_step is None else str(row.newest_step),
            str(sum(row.saves_by_end.values())),
            str(row.saves_by_end.get("durable", 0)),
            milliseconds(row.stall.median) if row.stall else "-",
            "-" if ettr is None else f"{100 * ettr:.1f} %",
        ]
        table.add_row(*cells, Text(human.printable(ended(row)), _style(row)), *figures)
    return table


def _style(row: RunRow) -> str:
    return "red" if row.over and row.how not in {CLOSED, TAKEN_OVER, LOADED} else ""


def _events(listed: Sequence[RunRow], most: int | None) -> list[RenderableType]:
    found = [(one.at, row.incarnation, loss_text(one), "red") for row in listed for one in row.losses]
    found += [(one.at, row.incarnation, restore_text(one), "green") for row in listed for one in row.restores]
    for row in listed:
        styles = (("green" if one.mended else "red", one) for one in row.damages)
        found += [(one.at, row.incarnation, damage_text(one), style) for style, one in styles]
    found.sort(key=lambda event: event[0])
    lines: list[RenderableType] = [Text()] if found else []
    if most is not None and len(found) > most:
        lines.append(Text(f"the last {most} of {len(found)} losses, restores and damages; all: --losses", "dim"))
        found = found[-most:]
    for at, run, text, style in found:
        lines.append(Text.assemble((f"{journals.when(at)}  run {run}  ", "dim"), (text, style)))
    return lines


def _save_lines(row: RunRow) -> list[str]:
    lines = []
    for save in row.saves:
        parts = [journals.when(save.at), f"step {save.step}", save.end or "open", human.size(save.nbytes)]
        parts.append(f"stall {milliseconds(save.stall_s)}")
        parts += [f"protected {human.duration(save.protected_s)}"] if save.protected_s is not None else []
        parts += [f"durable {human.duration(save.durable_s)}"] if save.durable_s is not None else []
        lines.append("  ".join([*parts, human.printable(save.reason)]).rstrip())
    return lines
