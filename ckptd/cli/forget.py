"""``ckptd forget``: give back the memory of a job that no longer runs."""

import contextlib
import os

import click
import msgspec

from ckptd.arena.ask import Daemon, NoDaemonError
from ckptd.cli import common
from ckptd.shared.base.errors import UsageError
from ckptd.shared.base.ids import JobKey
from ckptd.shared.format.arena_paths import JOBS
from ckptd.shared.protocol.status import Status
from ckptd.shared.stores.kinds import absolute
from ckptd.system import human

SCHEMA = 1


class Output(msgspec.Struct, frozen=True, kw_only=True):
    """What --json prints."""

    schema: int = SCHEMA
    job: str
    store: str
    slots: int
    nbytes: int


@click.command(epilog=common.example("ckptd forget llama-7b", "ckptd forget llama-7b --force"))
@click.argument("job")
@common.arena_option
@click.option("--store", type=click.Path(), metavar="DIR", help="Which, where jobs of that name have several stores.")
@click.option("--force", is_flag=True, help="Also when checkpoints that are not durable are lost.")
@common.timeout_option
@common.json_option
def command(  # noqa: PLR0913, PLR0917 - one for each flag
    job: str, arena: str | None, store: str | None, force: bool, timeout_s: float, as_json: bool
) -> int:
    """Give back the memory of JOB, which no longer runs. What lies on its store stays."""
    where = common.arena_of(arena)
    try:
        with Daemon(where, timeout_s) as daemon:
            chosen = _chosen(daemon.status(), job, store)
            freed = daemon.forget(chosen, force=force)
    except NoDaemonError:
        raise _without_daemon(where, job) from None
    if as_json:
        common.print_json(Output(job=chosen.job, store=chosen.store, slots=freed.slots, nbytes=freed.nbytes))
    else:
        click.echo(f"{chosen.job}: freed {human.size(freed.nbytes)} in {human.counted(freed.slots, 'slot')}")
    return 0


def _without_daemon(arena: str, job: str) -> NoDaemonError:
    """File names alone show the contents of the arena; only a daemon knows which may go."""
    names: set[str] = set()
    with contextlib.suppress(OSError):
        names = {name.rpartition("-")[0] for name in os.listdir(os.path.join(arena, JOBS))}
    if job in names:
        again = f"ckptd run --arena {arena} in another terminal, then again: ckptd forget {job} --arena {arena}"
        return NoDaemonError(f"job {job} lies in {arena}, and no daemon runs there to give its memory back", hint=again)
    there = f"it has {', '.join(sorted(names))}" if names else "no job's memory is there"
    hint = "a job's memory in another arena: ckptd forget JOB --arena DIR; what lies on a store stays: ckptd list STORE"
    return NoDaemonError(f"there is no job {job} in {arena}: {there}, and no daemon runs there", hint=hint)


def _chosen(status: Status, name: str, store: str | None) -> JobKey:
    """A job that the daemon has; or one of which it may know the store alone, where that is named."""
    where = None if store is None else absolute(store)
    found = [job for job in status.jobs if job.job == name and where in (None, job.store)]
    if not found and where is not None:
        return JobKey(where, name)
    if not found:
        known = ", ".join(sorted({job.job for job in status.jobs})) or "none"
        raise UsageError(f"this daemon has no job {name}", hint=f"its jobs: {known}")
    if len(found) > 1:
        raise UsageError(f"job {name} has several stores", hint="--store " + " or ".join(job.store for job in found))
    return JobKey(found[0].store, found[0].job)
