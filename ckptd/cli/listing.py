"""``ckptd list``: what lies on the store. Needs no daemon and changes nothing."""

import os
from datetime import datetime

import click
import msgspec
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from ckptd.checkpoint.ranking import Condition, Order, check_key, condition_of, order_of, ordered
from ckptd.cli import common
from ckptd.cli.view.parts import error_text, plain_table
from ckptd.shared.base.errors import CkptdError
from ckptd.shared.base.ids import JobKey
from ckptd.shared.format.integrity import XXH3, Integrity
from ckptd.shared.format.replica_attestations import Compared, doubt
from ckptd.shared.format.save_metadata import Scalar
from ckptd.shared.stores.kinds import absolute
from ckptd.store.facts import CommittedEntry, PartialEntry
from ckptd.store.interface import Standing, Store
from ckptd.store.opening import jobs_at, open_store
from ckptd.store.trainer_files import how_to_publish
from ckptd.system import human

SCHEMA = 1
_NARROW_COLUMNS = 100
_KEYS, _NARROW_KEYS = 6, 2  # columns for metadata
_VALUE_CHARS = 12


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One committed checkpoint."""

    step: int
    incarnation: int
    counter: int
    world_size: int
    nbytes: int
    committed_at: str  # ISO 8601, UTC
    latest: bool
    pinned: bool
    unpublished: bool  # a trainer's files are not where it wanted them
    superseded: str  # not empty: the session that took the job over before this was committed
    replicas: str  # of what ranks hold alike "all" or a "window" was compared, or it is "differing"; empty: nothing is
    without_metadata: str  # not empty: why torch.distributed.checkpoint alone does not read it
    run: str  # id of the run that saved it
    path: str
    dropped: list[str]  # keys of the state below which it has nothing more (ckptd prune --drop)
    metadata: dict[str, Scalar]  # what the training said of the save; null: a number that is not finite


class PartialRow(msgspec.Struct, frozen=True, kw_only=True):
    """One unfinished directory. finishable: its votes suffice to commit it."""

    step: int
    incarnation: int
    counter: int
    finishable: bool
    missing: str
    voted: list[str]
    path: str


class JobListing(msgspec.Struct, frozen=True, kw_only=True):
    """One job's directory."""

    job: str
    store: str
    store_id: str  # for connect(store_id=...)
    checkpoints: list[Row]  # newest first
    partials: list[PartialRow]
    problems: list[str]
    not_listed: int = 0  # checkpoints that --where leaves out


class Output(msgspec.Struct, frozen=True, kw_only=True):
    """What --json prints."""

    schema: int = SCHEMA
    jobs: list[JobListing]


@click.command(
    epilog=common.example("ckptd list /scratch/$USER/ckpt", "ckptd list --sort loss /scratch/$USER/ckpt/llama")
)
@click.argument("path", type=click.Path())
@click.option("--sort", metavar="KEY[:max]", help="By metadata of the saves, the smallest first, or the largest.")
@click.option("--where", multiple=True, metavar="KEY<VALUE", help="Only those, such as 'loss<1.5'. Repeatable.")
@common.json_option
@common.integrity_options
def command(path: str, sort: str | None, where: tuple[str, ...], as_json: bool, integrity: Integrity) -> int:
    """List the checkpoints in PATH, a store or one job's directory in it, with the metadata of their saves.

    Exit code 1 if something there is damaged. Digests are not read: that is ckptd verify.
    """
    conditions = [condition_of(text) for text in where]
    jobs = [_listing(key, integrity) for key in jobs_at(absolute(path))]
    jobs = _chosen(jobs, conditions, order_of(sort) if sort is not None else None)
    if as_json:
        common.print_json(Output(jobs=jobs))
    else:
        narrow = common.console().width < _NARROW_COLUMNS
        for job in jobs:
            common.show(_view(job, narrow=narrow))
    return int(any(job.problems for job in jobs))


def _chosen(jobs: list[JobListing], conditions: list[Condition], order: Order | None) -> list[JobListing]:
    """With the checkpoints that are asked for, in the order that is asked for. Raises UsageError."""
    rows = [row.metadata for job in jobs for row in job.checkpoints]
    for key in [*(one.key for one in conditions), *([order.key] if order else [])]:
        check_key(key, rows)
    made = []
    for job in jobs:
        chosen = [row for row in job.checkpoints if all(one.matches(row.metadata) for one in conditions)]
        chosen = ordered(chosen, lambda row: row.metadata, order) if order else chosen
        left_out = len(job.checkpoints) - len(chosen)
        made.append(msgspec.structs.replace(job, checkpoints=chosen, not_listed=left_out))
    return made


def _listing(key: JobKey, integrity: Integrity = XXH3) -> JobListing:
    store = open_store(key.store, integrity)
    found = store.scan(key.job)
    standings, unknown = store.standings(key.job)
    problems = [*found.problems, *unknown]
    store_id = ""
    try:
        store_id = store.store_id() or ""
    except (OSError, CkptdError) as error:
        problems.append(str(error))
    return JobListing(
        job=key.job,
        store=key.store,
        store_id=store_id,
        checkpoints=[
            _row(store, entry, standings[entry.dirname]) for entry in found.committed if entry.dirname in standings
        ],
        partials=[_partial_row(store, key.job, entry) for entry in found.partials],
        problems=problems,
    )


def _row(store: Store, entry: CommittedEntry, standing: Standing) -> Row:
    committed = entry.committed
    return Row(
        step=committed.step, incarnation=committed.incarnation, counter=committed.counter,
        world_size=committed.world_size, nbytes=committed.nbytes, path=store.where(committed.job, committed.save),
        latest=standing.latest, pinned=standing.pinned, unpublished=standing.unpublished,
        committed_at=standing.committed_at.isoformat(timespec="seconds"), run=committed.run,
        superseded=_takeover(standing.superseded), replicas=committed.replicas, without_metadata=committed.left_out,
        metadata=committed.metadata, dropped=list(committed.dropped),
    )  # fmt: skip


def _takeover(incarnation: int) -> str:
    return f"incarnation {incarnation} took the job over" if incarnation else ""


def _partial_row(store: Store, job: str, entry: PartialEntry) -> PartialRow:
    return PartialRow(
        step=entry.save.step, incarnation=entry.save.incarnation, counter=entry.save.counter, voted=entry.voted,
        finishable=entry.finishable, missing=entry.missing, path=store.where(job, entry.save, unfinished=True),
    )  # fmt: skip


def _words(row: Row) -> list[tuple[str, bool]]:
    late = (f"superseded: {row.superseded}", bool(row.superseded))
    differing = row.replicas == Compared.DIFFERING
    doubted = ("replicas differed" if differing else "replicas not compared", bool(doubt(row.replicas)))
    without = (f"without {', '.join(row.dropped)}", bool(row.dropped))
    return [("latest", row.latest), ("pinned", row.pinned), ("unpublished", row.unpublished), late, doubted, without]


def _keys(rows: list[Row], most: int) -> list[str]:
    """Of the metadata those that get a column: so many, in the order in which trainings gave them."""
    return list(dict.fromkeys(key for row in rows for key in row.metadata))[:most]


def _shown(value: Scalar) -> str:
    """A value of metadata in a table. --json has all of it."""
    if isinstance(value, bool) or value is None:
        return "not finite" if value is None else str(value).lower()
    text = f"{value:.6g}" if isinstance(value, float) else human.printable(str(value))
    return text if len(text) <= _VALUE_CHARS else f"{text[: _VALUE_CHARS - 1]}…"


def _view(job: JobListing, *, narrow: bool) -> RenderableType:
    none = f"none of {job.not_listed} checkpoints is so" if job.not_listed else "no committed checkpoint"
    body: list[RenderableType] = [Text(none, style="dim")]
    if job.checkpoints:
        table = plain_table(narrow=narrow)
        for name in ("step", "inc", "ranks", "size", "committed"):
            table.add_column(name, justify="right", no_wrap=True)
        keys = _keys(job.checkpoints, _NARROW_KEYS if narrow else _KEYS)
        for key in keys:
            table.add_column(_shown(key), justify="right", no_wrap=True)
        table.add_column("")
        for row in job.checkpoints:
            when = datetime.fromisoformat(row.committed_at).astimezone().strftime("%Y-%m-%d %H:%M:%S")
            words = [word for word, said in _words(row) if said]
            table.add_row(
                str(row.step),
                str(row.incarnation),
                str(row.world_size),
                human.size(row.nbytes),
                when,
                *(_shown(row.metadata[key]) if key in row.metadata else "" for key in keys),
                Text(human.printable(", ".join(words)), "green"),
            )
        body = [table]
    for row in (row for row in job.checkpoints if row.unpublished):
        state = f"its daemon publishes it while it knows where to; else {how_to_publish(row.path)}"
        body.append(Text.assemble((f"unpublished step {row.step}: ", "yellow"), human.printable(state)))
    for row in (row for row in job.checkpoints if row.without_metadata):
        state = f"{row.without_metadata}; for plain dcp.load: ckptd export --format dcp {row.path} OUT"
        body.append(Text.assemble((f"no .metadata in step {row.step}: ", "yellow"), human.printable(state)))
    for partial in job.partials:
        finished = f"all votes are in: the next daemon commits it, or: ckptd commit {partial.path}"
        state = finished if partial.finishable else partial.missing
        body.append(Text.assemble((f"unfinished step {partial.step}: ", "yellow"), human.printable(state)))
    body += map(error_text, job.problems)
    heading: RenderableType = Text(human.printable(os.path.join(job.store, job.job)), "bold", overflow="fold")
    if job.store_id:
        heading = Group(heading, Text(f"  store id {job.store_id}", style="dim"))
    return Group(heading, Padding(Group(*body), (0, 0, 0, 2)))
