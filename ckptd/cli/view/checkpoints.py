"""The checkpoints of a job as people read them: a row for each that matters, and lines for what they have in common."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ckptd.cli.view.parts import Marks, Name, plain_table
from ckptd.cli.view.unsafe import cause_of
from ckptd.core.coordinator.save_states import State
from ckptd.shared.format.replica_attestations import doubt
from ckptd.shared.format.schemes import Scheme
from ckptd.shared.protocol.messages import End, Milestone, Tier
from ckptd.shared.protocol.status import CheckpointStatus, JobStatus, Unsafe
from ckptd.system import human

BAD_ENDS = frozenset({End.FAILED.value, End.ABANDONED.value, End.SKIPPED.value})
_NARROW_COLUMNS = 100
_TOO_NARROW_COLUMNS = 72  # for the column that is missed least: protected
_TINY_COLUMNS = 64  # ... and for incarnation and age
_MAX_ROWS = 10
_MAX_REMOVED = 3
_MAX_STEPS = 5  # named one by one


def checkpoints_of(job: JobStatus, marks: Marks, width: int, found: Sequence[Unsafe]) -> RenderableType:
    """The table. found: what is said above of the job, which is not said again."""
    shown = Rows.of(job.checkpoints)
    parity = job.scheme != Scheme.NONE and len(job.nodes) > 1
    return Group(_table(shown.rows, marks, width, parity=parity), *_remarks(shown, found))


def safest(checkpoints: list[CheckpointStatus]) -> Iterator[tuple[Milestone, CheckpointStatus]]:
    """The newest of each milestone, as far as it is newer than what is safer."""
    newest = len(checkpoints)  # they are in order, newest first
    for milestone in (Milestone.DURABLE, Milestone.PROTECTED, Milestone.STAGED):
        place = next((i for i, one in enumerate(checkpoints) if _has_reached(one, milestone)), None)
        if place is not None and place < newest:
            newest = place
            yield milestone, checkpoints[place]


def _has_reached(one: CheckpointStatus, milestone: Milestone) -> bool:
    """What was removed, or is lost, is no help."""
    if not one.tiers:
        return False
    if milestone is Milestone.PROTECTED:
        return one.protected or one.milestone == milestone
    return one.milestone == milestone if milestone is Milestone.DURABLE else one.milestone is not None


@dataclass(frozen=True)
class Rows:
    """Which checkpoints have a row, newest first, and what becomes of the others."""

    rows: list[CheckpointStatus]
    outrun: list[CheckpointStatus]  # superseded, and no better than what has a row: one line for them all
    hidden: int

    @classmethod
    def of(cls, checkpoints: list[CheckpointStatus]) -> "Rows":
        """The newest, and of those that were removed since only the first few: they are history."""
        wanted = {id(one) for _, one in safest(checkpoints)}
        outrun = [one for one in checkpoints if one.end == End.SUPERSEDED and id(one) not in wanted]
        removed = [one for one in checkpoints if _is_removed(one)][_MAX_REMOVED:]
        left_out = {id(one) for one in (*outrun, *removed)}
        rows = [one for one in checkpoints if id(one) not in left_out][:_MAX_ROWS]
        return cls(rows, outrun, len(checkpoints) - len(rows) - len(outrun))


def _is_removed(one: CheckpointStatus) -> bool:
    return one.milestone == Milestone.DURABLE and not one.tiers


def _table(checkpoints: list[CheckpointStatus], marks: Marks, width: int, *, parity: bool) -> Table:
    table = plain_table(narrow=width < _NARROW_COLUMNS)
    wide, tiny = width >= _TOO_NARROW_COLUMNS, width < _TINY_COLUMNS
    for name in ("step", *(() if tiny else ("inc",))):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("staged", *(["protected"] if wide else []), "durable"):
        table.add_column(name, justify="center", no_wrap=True)
    table.add_column("in", no_wrap=True)
    for name in ("ranks", "size", *(() if tiny else ("age",))):
        table.add_column(name, justify="right", no_wrap=True)
    newest = next((one for one in checkpoints if one.milestone is not None), None)
    for one in checkpoints:
        coming = parity and one is newest and Tier.ARENA in one.tiers
        table.add_row(
            str(one.step),
            *([] if tiny else [str(one.incarnation)]),
            _staged_mark(one, marks),
            *([_protected_mark(one, marks, coming=coming)] if wide else []),
            _durable_mark(one, marks),
            Text("removed", "dim") if _is_removed(one) else Name(", ".join(one.tiers) or marks.none),
            f"{one.ranks}/{one.world_size}",
            human.size(one.nbytes),
            *([] if tiny else [human.duration(one.age_s) if one.age_s is not None else marks.none]),
        )
    return table


def _staged_mark(one: CheckpointStatus, marks: Marks) -> Text:
    if one.milestone is not None:
        return Text(marks.reached, "green")
    return Text(marks.missed, "red") if one.end is not None else Text(marks.running, "yellow")


def _protected_mark(one: CheckpointStatus, marks: Marks, *, coming: bool) -> Text:
    """Durable outranks protected, but is no proof that parity was ever made."""
    if one.protected or one.milestone == Milestone.PROTECTED:
        return Text(marks.reached, "green")
    if coming:
        return Text(marks.running, "yellow")
    return Text("not needed" if one.milestone == Milestone.DURABLE and one.tiers else marks.none, "dim")


def _durable_mark(one: CheckpointStatus, marks: Marks) -> Text:
    if one.milestone == Milestone.DURABLE:
        return Text(marks.reached, "green")
    if one.end is not None:
        return Text(one.end, "red" if one.end in BAD_ENDS else "dim")
    if one.phase in {"draining", "committing"}:
        return Text(one.phase, "yellow")
    return Text(marks.none, "dim")


def _remarks(shown: Rows, found: Sequence[Unsafe]) -> Iterator[Text]:
    """What the table has no room for: for whom a save waits, why one ended badly, and which rows are not shown."""
    waiting = {one.reason: one for one in shown.rows if one.phase == State.STAGING and one.reason}  # the oldest of each
    above = {one.hint for one in found if one.code == "ranks_missing"}
    for one in waiting.values():
        if cause_of(one.reason) in above:
            continue
        yield Text.assemble((f"step {one.step} ", "yellow"), (human.printable(one.reason), "yellow"), overflow="fold")
    for one in shown.rows:
        if one.end in BAD_ENDS and one.reason:
            yield Text.assemble((f"step {one.step} {one.end}: ", "red"), human.printable(one.reason), overflow="fold")
        if one.milestone == Milestone.DURABLE and (text := doubt(one.replicas)):
            yield Text.assemble((f"step {one.step}: ", "yellow"), text, overflow="fold")
    if shown.outrun:
        steps = human.ranges(one.step for one in shown.outrun) if len(shown.outrun) <= _MAX_STEPS else ""
        first, last = shown.outrun[-1].step, shown.outrun[0].step
        slow = any(one.code == "store_slow" for one in found)
        why = "the store was slower than the saves" if slow else "a newer one was staged before their drain began"
        what = f"step{'' if len(shown.outrun) == 1 else 's'} {steps or f'{first} to {last}'} superseded"
        yield Text(f"{what}: {why}", style="dim")
    if shown.hidden:
        yield Text(f"and {human.counted(shown.hidden, 'older checkpoint')}", style="dim")
