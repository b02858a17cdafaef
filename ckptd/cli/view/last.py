"""The last state of a job that no daemon here serves, as people read it: what would be lost first, and what to type."""

import time
from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.text import Text

from ckptd.cli.history import loss_text
from ckptd.cli.last_state import Output, living_text
from ckptd.cli.view.parts import Facts, Name
from ckptd.history.last import LastRun, LastSave
from ckptd.history.runs import CLOSED
from ckptd.system import human

_HOW = {
    CLOSED: "closed",
    "lost": "lost: its ranks ended without a word",
    "failed": "failed: an exception ended it",
    "taken over": "another start took the job over",
    "loaded": "a load began the next run",
}


def view(last: Output, now: float | None = None) -> RenderableType:
    """now: seconds since 1970."""
    now = time.time() if now is None else now
    rows = Facts()
    found = list(_unsafe(last))
    for place, (text, hint) in enumerate(found):
        is_said = place + 1 < len(found) and found[place + 1][1] == hint  # below the last one that it is for
        rows.error(text if is_said else f"{text}\nhint: {hint}", label="unsafe")
    if not last.unsaved and last.durable is not None and not _may_run(last.run) and not last.memory.ranks:
        rows.add("next", Text(f"start the training again: load() goes on from step {last.durable.step}", "cyan"))
    rows.add("safe", Text(_safe(last.durable, now), "green" if last.durable else "yellow"))
    if last.run is not None:
        for line in _run(last.run, now):
            rows.add("last", Text(human.printable(line)))
        if last.newest_step is not None:
            rows.add("step", Text(_step(last, last.newest_step)))
    for what in _problems(last):
        rows.error(what)
    rows.add("store", Name(last.store))
    rows.add("more", Text(f"ckptd history {human.printable(last.where)}", "dim"))
    title = Text(human.printable(f"{last.job}: no daemon of this node serves it"), "bold", overflow="fold")
    return Group(title, rows.grid)


def _unsafe(last: Output) -> Iterator[tuple[str, str]]:
    takes_over = f"ckptd run --arena {last.memory.arena} takes over what is staged there"
    if last.memory.ranks:
        yield living_text(last.memory.ranks), takes_over
    if last.unsaved:
        yield _unsaved(last, last.unsaved[0], takes_over)
    elif _may_run(last.run):
        yield "no record of its end: it runs elsewhere, or was lost without a word", _elsewhere(last.run)


def _unsaved(last: Output, newest: LastSave, takes_over: str) -> tuple[str, str]:
    back = f"load() goes on from step {last.durable.step}" if last.durable is not None else "nothing is durable"
    text = f"step {newest.step} was staged and is not on the store"
    if last.kept is not None:
        ranks = f"{len(last.memory.holders)} of {human.counted(last.memory.world_size, 'rank')}"
        return f"{text}: it is in memory here ({ranks})", takes_over
    return f"{text}, and not in memory here: without it {back}", _elsewhere(last.run)


def _elsewhere(run: LastRun | None) -> str:
    where = human.printable(run.coordinator) if run is not None else "its nodes"
    return f"ckptd status on {where} shows what a daemon there still has"


def _may_run(run: LastRun | None) -> bool:
    return run is not None and not run.over


def _safe(durable: LastSave | None, now: float) -> str:
    if durable is None:
        return "nothing is durable"
    return f"durable {durable.step}" + (f" ({_ago(durable.at, now)})" if durable.at is not None else "")


def _run(run: LastRun, now: float) -> Iterator[str]:
    where = (
        run.coordinator if run.nodes == 1 else f"{human.counted(run.nodes, 'node')}, coordinated by {run.coordinator}"
    )
    yield f"run {run.incarnation} of {human.counted(run.world_size, 'rank')} on {where}"
    if run.over and run.ended is not None:
        yield f"{_HOW.get(run.how, run.how)}, {_ago(run.ended, now)}"
    else:
        yield f"no record of its end; last record {_ago(run.last, now)}"
    if run.loss is not None:
        yield f"{loss_text(run.loss)}, {_ago(run.loss.at, now)}"


def _step(last: Output, reached: int) -> str:
    if last.durable is None or reached <= last.durable.step:
        return f"{reached} was reached"
    again = human.counted(reached - last.durable.step, "step")
    return f"{reached} was reached: {again} after the durable one"


def _problems(last: Output) -> Iterator[str]:
    if last.run is not None and last.run.problem is not None:
        yield f"{last.run.problem.text}"
    yield from last.problems
    if last.damaged:
        yield f"{human.counted(last.damaged, 'damaged part')} of the journal passed over"


def _ago(at: float, now: float) -> str:
    return f"{human.duration(max(0.0, now - at))} ago"
