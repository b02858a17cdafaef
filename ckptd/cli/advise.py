"""``ckptd advise``: how often a job should save and drain, from its journal. Needs no daemon."""

import click
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from ckptd.cli import common, journals
from ckptd.cli.history import milliseconds
from ckptd.cli.view.parts import plain_table
from ckptd.history.advice import Advice, advise
from ckptd.history.intervals import Choice
from ckptd.shared.base.errors import CkptdError, UsageError
from ckptd.system import human
from ckptd.system.units import parse_duration_s

SCHEMA = 1


class Output(Advice, frozen=True, kw_only=True):
    """What --json prints."""

    schema: int = SCHEMA
    job: str
    store: str


@click.command(epilog=common.example("ckptd advise llama-7b", "ckptd advise --mtbf 3h /scratch/$USER/ckpt/llama-7b"))
@journals.target
@click.option("--mtbf", metavar="DURATION", help="Mean time between failures, without restarts.  [as in the journal]")
@common.json_option
def command(target: str, store: str | None, mtbf: str | None, as_json: bool) -> int:
    """Show how often JOB should save and drain, and what other intervals would cost.

    Exit code 1 if the journal has too little to say so.
    """
    mtbf_s = mtbf_of(mtbf)
    history = journals.read(target, store)
    advice = advise(history.runs, history.spans, mtbf_s)
    if isinstance(advice, str):
        raise CkptdError(f"no advice for {history.where}: {advice}", hint=f"what it has: ckptd history {history.where}")
    if as_json:
        said = {name: getattr(advice, name) for name in Advice.__struct_fields__}
        common.print_json(Output(job=history.key.job, store=history.key.store, **said))
    else:
        common.show(_view(advice, history.where))
    return 0


def mtbf_of(text: str | None) -> float | None:
    """Seconds. Raises UsageError."""
    if text is None:
        return None
    try:
        seconds = parse_duration_s(text)
    except ValueError as error:
        raise UsageError(f"--mtbf: {error}", hint='such as "90m" or "3h"') from None
    if seconds <= 0:
        raise UsageError(f"--mtbf: {text} is no time between failures", hint='such as "90m" or "3h"')
    return seconds


def percent(part: float) -> str:
    """Of a share."""
    return f"{100 * part:.2f} %"


def sentences(advice: Advice) -> list[str]:
    """What to do, what it was computed from, and what to keep in mind."""
    best, now = advice.best, advice.now
    each = "each save" if best.drain_saves == 1 else f"one save of {best.drain_saves}"
    lost = f"stalls {percent(best.stalls)}, repeated steps {percent(best.repeated)}"
    lines = [
        f"save every {_interval(best)}, drain {each}: connect(drain_every={advice.drain_every})",
        f"checkpoints then take {percent(best.checkpoints)} of the time: {lost}; restarts {percent(best.restarts)}",
    ]
    if now is not None and (now.steps, now.drain_saves) != (best.steps, best.drain_saves):
        seldom = f", one of {now.drain_saves} drained" if now.drain_saves > 1 else ""
        lines.append(f"now: every {_interval(now)}{seldom}, checkpoints take {percent(now.checkpoints)}")
    notes = [f"note: {note}" for note in advice.notes]
    first = notes if advice.mtbf_from == "none" else []  # without a failure the rest is no more than a guess
    return [*first, *lines, *_measured(advice), *([] if first else notes)]


def _interval(one: Choice) -> str:
    return f"{human.counted(one.steps, 'step')} ({human.duration(one.seconds)})"


def _measured(advice: Advice) -> list[str]:
    costs = advice.costs
    failures = human.counted(advice.failures, "failure")
    how = {"given": "as given", "journal": f"{failures} in the journal", "none": "seen without one"}[advice.mtbf_from]
    parts = [f"a step takes {milliseconds(costs.step_s)}", f"a stall {milliseconds(costs.stall_s)}"]
    parts.append(f"stage {milliseconds(advice.stage_s)}")
    parts += [] if advice.protect_s is None else [f"protect {milliseconds(advice.protect_s)}"]
    parts += [f"a drain {human.duration(costs.drain_s)}", f"a restart {human.duration(costs.restart_s)}"]
    forms = {"Young": advice.young_s, "Daly": advice.daly_s, "availability": advice.availability_s}
    said = ", ".join(f"{name} {human.duration(seconds)}" for name, seconds in forms.items())
    read = f"{advice.restores_from_store} of {human.counted(advice.restores, 'restore')}"
    return [
        f"mean time between failures: {human.duration(advice.mtbf_s)}, {how}",
        ", ".join(parts),
        f"{percent(costs.store_share)} of failures are taken to need the store: {read} read it",
        f"training between saves by closed forms: {said}",
    ]


def name_of(choice: Choice, advice: Advice) -> str:
    """What a row of the table is."""
    names = [("best", choice == advice.best), ("now", choice == advice.now)]
    return ", ".join(name for name, is_it in names if is_it)


def _view(advice: Advice, where: str) -> RenderableType:
    table = plain_table(narrow=True)
    for name in ("save every", "that is", "drain", "stalls", "repeated", "checkpoints", "ETTR"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    for one in advice.choices:
        table.add_row(
            human.counted(one.steps, "step"), human.duration(one.seconds), human.duration(one.drain_seconds),
            percent(one.stalls), percent(one.repeated), percent(one.checkpoints), percent(one.ettr),
            Text(name_of(one, advice), "green"),
        )  # fmt: skip
    body: list[RenderableType] = [*map(Text, sentences(advice)), Text(), table]
    return Group(Text(human.printable(where), "bold", overflow="fold"), Padding(Group(*body), (0, 0, 0, 2)))
