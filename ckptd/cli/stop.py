"""``ckptd stop``: end the daemon of an arena, as SIGTERM does. What is staged stays in memory for the next one."""

import contextlib
import os
import time

import click
import msgspec

from ckptd.arena.ask import Daemon, NoDaemonError, ask_status
from ckptd.cli import common
from ckptd.cli.drain import newest_staged
from ckptd.shared.base.errors import ConnectError, WaitTimeoutError
from ckptd.shared.files import locks
from ckptd.shared.format import arena_paths
from ckptd.shared.protocol.messages import Milestone
from ckptd.shared.protocol.status import JobStatus, Status
from ckptd.system import human

SCHEMA = 1
_LOOK_AGAIN_S = 0.02
_ANSWER_S = 5.0
_FIRST_LOOK_S = 5.0
_SEND_S = 1.0
_SHOWN = 3


class Remains(msgspec.Struct, kw_only=True):
    """The newest checkpoint of a job that is staged on all ranks.

    durable: None where the daemon does not know it; store_problem: then what the store answered, empty: nothing.
    """

    job: str
    store: str
    step: int
    durable: bool | None
    store_problem: str
    in_memory: bool


class Output(msgspec.Struct, frozen=True, kw_only=True):
    """What --json prints."""

    schema: int = SCHEMA
    arena: str
    pid: int
    stopped: bool
    used_nbytes: int
    jobs: list[Remains]


@click.command(epilog=common.example("ckptd stop", "ckptd stop --wait --timeout 2m"))
@common.arena_option
@click.option("--wait", is_flag=True, help="Return when it has ended (0), or the time is over (3).")
@click.option(
    "--timeout", metavar="DURATION", default="2m", show_default=True, help="How long it takes at most, with --wait."
)
@common.json_option
def command(arena: str | None, wait: bool, timeout: str, as_json: bool) -> int:
    """End the daemon: it finishes the drain that runs, for up to stop_drain_s, and leaves what is staged in memory.

    One that a client started also drains the newest checkpoint of each job in that time. One that has just begun gets
    up to 5 s, and half of --timeout at most, for its first look at the store.
    """
    where, timeout_s, start_s = common.arena_of(arena), common.seconds_of(timeout), time.monotonic()
    before = _before(where, start_s + min(_FIRST_LOOK_S, timeout_s / 2), start_s + timeout_s)
    status = _stop(where, before, timeout_s, start_s + timeout_s) if wait else _ask(where)
    remains = _remains(status)
    if as_json:
        found = Output(arena=where, pid=status.pid, stopped=wait, used_nbytes=status.used_nbytes, jobs=remains)
        common.print_json(found)
        return 0
    click.echo(f"the daemon (pid {status.pid}) of {where} {'has ended' if wait else 'is ending'}")
    run = f"ckptd run --arena {where}"
    for one in remains:
        click.echo(_sentence(one))
    for job in status.jobs:
        if any(rank.alive for rank in job.ranks):
            click.echo(f"{job.job} still runs: a daemon that its clients started they start again; else: {run}")
    if status.used_nbytes:
        used = human.size(status.used_nbytes)
        names = " or ".join(job.job for job in status.jobs[:_SHOWN]) or "JOB"
        click.echo(f"{used} stay in {where} for the next daemon: {run}; that frees them: ckptd forget {names}")
    return 0


def _before(where: str, until_s: float, deadline_s: float) -> Status:
    """The status once the daemon has looked at the stores of its jobs; without that at until_s.

    Raises ConnectError, by deadline_s where there is time for one question until then.
    """
    try:
        status = ask_status(where, _time_to_answer(deadline_s))
    except NoDaemonError:
        text = f"no daemon runs in {where}: there is nothing to stop"
        raise NoDaemonError(text, hint="one with another arena: ckptd stop --arena DIR") from None
    with contextlib.suppress(ConnectError):  # it ends meanwhile
        while any(_waits_for_store(job) for job in status.jobs) and time.monotonic() < until_s:
            time.sleep(_LOOK_AGAIN_S)
            status = ask_status(where, _time_to_answer(until_s))
    return status


def _time_to_answer(deadline_s: float) -> float:
    return min(_ANSWER_S, max(deadline_s - time.monotonic(), _SEND_S))


def _waits_for_store(job: JobStatus) -> bool:
    return not job.store_seen and not job.store_problem and newest_staged(job) is not None


def _ask(where: str) -> Status:
    with Daemon(where, _ANSWER_S) as daemon:
        return daemon.stop(wait=False)


def _stop(where: str, before: Status, timeout_s: float, deadline_s: float) -> Status:
    """The daemon's last status, once it has released the arena. Raises WaitTimeoutError at deadline_s."""
    status = before
    try:
        with Daemon(where, max(deadline_s - time.monotonic(), _SEND_S)) as daemon:
            status = daemon.stop(wait=True)
    except ConnectError:
        pass  # it said nothing more: whether it is gone is seen below
    while _is_held(where):
        if time.monotonic() >= deadline_s:
            hint = "it finishes its drain, for up to stop_drain_s: ckptd status"
            raise WaitTimeoutError(f"the daemon (pid {before.pid}) is still stopping after {timeout_s:g} s", hint=hint)
        time.sleep(_LOOK_AGAIN_S)
    return status


def _is_held(where: str) -> bool:
    try:
        return locks.holder(os.path.join(where, arena_paths.LOCK)) is not None
    except FileNotFoundError:
        return False  # it took an empty arena with it


def _remains(status: Status) -> list[Remains]:
    found = [(job, newest_staged(job)) for job in status.jobs]
    return [
        Remains(
            job=job.job,
            store=job.store,
            step=newest.step,
            durable=newest.milestone == Milestone.DURABLE if job.store_seen else None,
            store_problem=job.store_problem,
            in_memory="arena" in newest.tiers,
        )
        for job, newest in found
        if newest is not None
    ]


def _sentence(one: Remains) -> str:
    where = "stays in memory" if one.in_memory else "is no longer in memory"
    if one.durable is None:
        why = human.printable(one.store_problem) or f"{one.store} has not answered"
        return f"{one.job}: step {one.step} {where}; whether it is durable is not known: {why}"
    return f"{one.job}: step {one.step} {where} and is {'durable' if one.durable else 'not durable'}"
