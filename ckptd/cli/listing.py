"""``ckptd list``: what lies on the store. Needs no daemon and changes nothing."""

import os
from datetime import datetime

import click
import msgspec
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from ckptd.cli import common
from ckptd.cli.view.parts import error_text, plain_table
from ckptd.shared.base.errors import CkptdError
from ckptd.shared.base.ids import JobKey
from ckptd.shared.format.integrity import XXH3, Integrity
from ckptd.shared.format.replica_attestations import Compared, doubt
from ckptd.shared.stores.kinds import absolute
from ckptd.store.facts import CommittedEntry, PartialEntry
from ckptd.store.interface import Standing, Store
from ckptd.store.opening import jobs_at, open_store
from ckptd.store.trainer_files import how_to_publish
from ckptd.system import human

SCHEMA = 1
_NARROW_COLUMNS = 100


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


@click.command(epilog=common.example("ckptd list /scratch/$USER/ckpt", "ckptd list --json /scratch/$USER/ckpt/llama"))
@click.argument("path")
@common.json_option
@common.integrity_options
def command(path: str, as_json: bool, integrity: Integrity) -> int:
    """List the checkpoints in PATH, a store or one job's directory in it.

    Exit code 1 if something there is damaged. Digests are not read: that is ckptd verify.
    """
    jobs = [_listing(key, integrity) for key in jobs_at(absolute(path))]
    if as_json:
        common.print_json({"schema": SCHEMA, "jobs": jobs})
    else:
        narrow = common.console().width < _NARROW_COLUMNS
        for job in jobs:
            common.show(_view(job, narrow=narrow))
    return int(any(job.problems for job in jobs))


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
    return [("latest", row.latest), ("pinned", row.pinned), ("unpublished", row.unpublished), late, doubted]


def _view(job: JobListing, *, narrow: bool) -> RenderableType:
    body: list[RenderableType] = [Text("no committed checkpoint", style="dim")]
    if job.checkpoints:
        table = plain_table(narrow=narrow)
        for name in ("step", "inc", "ranks", "size", "committed"):
            table.add_column(name, justify="right", no_wrap=True)
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
                Text(", ".join(words), "green"),
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
