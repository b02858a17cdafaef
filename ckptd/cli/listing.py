"""``ckptd list``: what lies on the store. Needs no daemon and changes nothing."""

import os
from datetime import UTC, datetime

import click
import msgspec
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from ckptd.cli import common
from ckptd.cli.view.parts import error_text, plain_table
from ckptd.shared.base.errors import CkptdError, UsageError
from ckptd.shared.base.ids import JobKey, is_job_name, parse_dirname, parse_partial_dirname
from ckptd.shared.format.committed import INCARNATIONS_DIR
from ckptd.shared.format.integrity import XXH3, Integrity
from ckptd.shared.format.manifest import COMMITTED, LATEST, UNPUBLISHED
from ckptd.shared.format.replica_shares import Compared, doubt
from ckptd.store.facts import CommittedEntry, PartialEntry, Scan
from ckptd.store.posix.identity import store_id_at
from ckptd.store.posix.incarnations import superseded
from ckptd.store.posix.pins import pinned
from ckptd.store.posix.scan import Place, job_dir, scan
from ckptd.store.trainer_files import how_to_publish
from ckptd.system import human
from ckptd.system.files import FileLayer

SCHEMA = 1
_HINT = "give a store, or a job's directory in it"
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
    superseded: str  # not empty: who took the job over before this was committed
    replicas: str  # of what ranks hold alike "all" or a "window" was compared, or it is "apart"; empty: nothing is
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


class Listing(msgspec.Struct, frozen=True, kw_only=True):
    """What --json prints."""

    schema: int
    jobs: list[JobListing]


@click.command(epilog=common.example("ckptd list /scratch/$USER/ckpt", "ckptd list --json /scratch/$USER/ckpt/llama"))
@click.argument("path")
@common.json_option
@common.integrity_options
def command(path: str, as_json: bool, integrity: Integrity) -> int:
    """List the checkpoints in PATH, a store or one job's directory in it.

    Exit code 1 if something there is damaged. Digests are not read: that is ckptd verify.
    """
    jobs = [_listing(key, integrity) for key in jobs_at(os.path.abspath(path))]
    if as_json:
        common.print_json(Listing(schema=SCHEMA, jobs=jobs))
    else:
        narrow = common.console().width < _NARROW_COLUMNS
        for job in jobs:
            common.show(_view(job, narrow=narrow))
    return int(any(job.problems for job in jobs))


def jobs_at(path: str) -> list[JobKey]:
    """The job whose directory path is, or all jobs of the store that path is. Raises UsageError if it is neither."""
    try:
        if _is_job_dir(path):
            return [JobKey(*os.path.split(path))]
        names = sorted(filter(is_job_name, os.listdir(path)))
    except OSError as error:
        raise UsageError(f"cannot list {path}: {error.strerror}", hint=_HINT) from None
    jobs = [JobKey(path, name) for name in names if _is_job_dir(os.path.join(path, name))]
    if jobs:
        return jobs
    if os.path.exists(os.path.join(path, COMMITTED)):
        raise UsageError(f"{path} is one checkpoint", hint=f"ckptd verify {path}")
    raise UsageError(f"no checkpoint of any job in {path}", hint=_HINT)


def _is_job_dir(path: str) -> bool:
    """Whether ckptd has ever written a checkpoint of a job, or begun to, in path."""
    try:
        names = os.listdir(path)
    except NotADirectoryError:
        return False
    return any(name == INCARNATIONS_DIR or parse_dirname(name) or parse_partial_dirname(name) for name in names)


def _listing(key: JobKey, integrity: Integrity = XXH3) -> JobListing:
    fs = FileLayer(key.store, integrity)
    found: Scan = scan(fs, key)
    latest, kept = _latest(key), _pinned(fs, key, found.problems)
    late = superseded(fs, key)
    return JobListing(
        job=key.job,
        store=key.store,
        store_id=_store_id(fs, key, found.problems),
        checkpoints=[_row(key, entry, latest, kept, late) for entry in found.committed],
        partials=[_partial_row(key, entry) for entry in found.partials],
        problems=found.problems,
    )


def _latest(key: JobKey) -> str:
    try:
        return os.readlink(os.path.join(job_dir(key), LATEST)).rstrip("/")
    except OSError:
        return ""


def _store_id(fs: FileLayer, key: JobKey, problems: list[str]) -> str:
    try:
        return store_id_at(fs, key.store) or ""
    except (OSError, CkptdError) as error:
        problems.append(str(error))
        return ""


def _pinned(fs: FileLayer, key: JobKey, problems: list[str]) -> frozenset[str]:
    try:
        return pinned(fs, key)
    except OSError as error:
        problems.append(str(error))
        return frozenset()


def _row(key: JobKey, entry: CommittedEntry, latest: str, kept: frozenset[str], late: dict[str, int]) -> Row:
    path = os.path.join(job_dir(key), entry.dirname)
    committed = entry.committed
    when = _moment(os.stat(os.path.join(path, COMMITTED)).st_mtime)
    return Row(
        step=committed.step, incarnation=committed.incarnation, counter=committed.counter,
        world_size=committed.world_size, nbytes=committed.nbytes, path=path, latest=entry.dirname == latest,
        pinned=entry.dirname in kept, unpublished=os.path.lexists(os.path.join(path, UNPUBLISHED)),
        committed_at=when.isoformat(timespec="seconds"), run=committed.run,
        superseded=_takeover(late.get(entry.dirname, 0)), replicas=committed.replicas,
    )  # fmt: skip


def _takeover(incarnation: int) -> str:
    return f"incarnation {incarnation} took the job over" if incarnation else ""


def _moment(seconds: float) -> datetime:
    """The time of a file; the last there is for one beyond the calendar, which some file systems can keep."""
    try:
        return datetime.fromtimestamp(seconds, UTC)
    except (ValueError, OverflowError, OSError):
        return datetime.max.replace(tzinfo=UTC)


def _partial_row(key: JobKey, entry: PartialEntry) -> PartialRow:
    return PartialRow(
        step=entry.save.step, incarnation=entry.save.incarnation, counter=entry.save.counter, voted=entry.voted,
        finishable=entry.finishable, missing=entry.missing, path=Place(key, entry.save).partial,
    )  # fmt: skip


def _words(row: Row) -> list[tuple[str, bool]]:
    late = (f"superseded: {row.superseded}", bool(row.superseded))
    apart = row.replicas == Compared.APART
    doubted = ("replicas differed" if apart else "replicas not compared", bool(doubt(row.replicas)))
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
    for partial in job.partials:
        finished = f"all votes are in: the next daemon commits it, or: ckptd commit {partial.path}"
        state = finished if partial.finishable else partial.missing
        body.append(Text.assemble((f"unfinished step {partial.step}: ", "yellow"), human.printable(state)))
    body += map(error_text, job.problems)
    heading: RenderableType = Text(human.printable(os.path.join(job.store, job.job)), "bold", overflow="fold")
    if job.store_id:
        heading = Group(heading, Text(f"  store id {job.store_id}", style="dim"))
    return Group(heading, Padding(Group(*body), (0, 0, 0, 2)))
