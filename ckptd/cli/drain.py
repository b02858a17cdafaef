"""``ckptd drain``: make the newest staged checkpoint durable now, as before maintenance or at a preemption notice."""

import contextlib
import time
from collections.abc import Iterator

import click
import msgspec
from rich.status import Status as Spinner

from ckptd.arena.ask import Daemon
from ckptd.cli import ELSEWHERE, NO_DAEMON, common
from ckptd.shared.base.errors import CkptdError, UsageError
from ckptd.shared.base.ids import JobKey
from ckptd.shared.protocol.messages import End, Milestone
from ckptd.shared.protocol.status import CheckpointStatus, JobStatus, Status
from ckptd.system import human

SCHEMA = 1
_LOOK_AGAIN_S = 0.25
_LOST = frozenset({End.FAILED.value, End.ABANDONED.value, End.SKIPPED.value})
_OPEN = frozenset({"asked", "draining"})
_EXIT_CODES = {"failed": 1, "elsewhere": ELSEWHERE, "timeout": NO_DAEMON}


class Outcome(msgspec.Struct, kw_only=True):
    """What became of one job. result: nothing, asked, draining, durable, elsewhere, failed or timeout.

    elsewhere: another node coordinates the job, has been asked, and alone knows what comes of it.
    """

    job: str
    store: str
    step: int | None = None
    incarnation: int | None = None
    counter: int | None = None
    result: str = "nothing"
    reason: str = ""
    preempt_step: int | None = None  # at which ranks that ask save; it is what --wait waits for then

    def becomes(self, result: str, reason: str = "", *, of: CheckpointStatus | None = None) -> None:
        """The outcome changed; of: it is that of another checkpoint than before."""
        self.result, self.reason = result, reason
        if of is not None:
            self.step, self.incarnation, self.counter = of.step, of.incarnation, of.counter


class Output(msgspec.Struct, frozen=True, kw_only=True):
    """What --json prints."""

    schema: int = SCHEMA
    jobs: list[Outcome]


@click.command(epilog=common.example("ckptd drain --wait --timeout 10m", "ckptd drain --job llama-7b"))
@common.arena_option
@click.option("--job", metavar="NAME", help="This job only; without it, every job of the daemon.")
@click.option(
    "--wait",
    is_flag=True,
    help="Return when it, or what ranks save that were asked to, is durable (0), failed (1), or the time is over (3); "
    "at once (4) where another node's daemon knows that.",
)
@click.option(
    "--preempt/--no-preempt",
    default=True,
    show_default=True,
    help="Ranks that ask client.preempted() save at one step, and leave if that is what they do then.",
)
@click.option("--timeout", metavar="DURATION", default="30m", show_default=True, help="How long --wait waits.")
@common.json_option
def command(  # noqa: PLR0913, PLR0917 - parameters that click passes
    arena: str | None, job: str | None, wait: bool, preempt: bool, timeout: str, as_json: bool
) -> int:
    """Make the newest staged checkpoint of each job durable now."""
    deadline_s = time.monotonic() + common.seconds_of(timeout)
    with Daemon(common.arena_of(arena)) as daemon:
        status = daemon.status()
        outcomes = [_ask(daemon, one, status.node, preempt=preempt) for one in _chosen(status, job)]
        if wait:
            _wait(daemon, outcomes, deadline_s, quiet=as_json, preempt=preempt)
    if as_json:
        common.print_json(Output(jobs=outcomes))
    else:
        for outcome in outcomes:
            click.echo(_sentence(outcome))
        if not outcomes:
            click.echo("no job here: nothing to drain")
    results = {outcome.result for outcome in outcomes} - (set() if wait else {"elsewhere"})
    codes = {_EXIT_CODES.get(result, 0) for result in results}
    return max(codes - {ELSEWHERE} - {0}, default=max(codes, default=0))  # what failed here says more


def _chosen(status: Status, name: str | None) -> list[JobStatus]:
    chosen = [job for job in status.jobs if name in {None, job.job}]
    if name is not None and not chosen:
        known = ", ".join(sorted({job.job for job in status.jobs})) or "none"
        raise UsageError(f"this daemon has no job {name}", hint=f"its jobs: {known}")
    return chosen


def _ask(daemon: Daemon, job: JobStatus, node: str, *, preempt: bool) -> Outcome:
    newest = newest_staged(job)
    outcome = Outcome(job=job.job, store=job.store)
    open_one = newest is not None and newest.milestone != Milestone.DURABLE
    try:
        if preempt or open_one or job.coordinator not in {"", node}:
            daemon.drain(JobKey(job.store, job.job), preempt=preempt)
    except CkptdError as error:
        outcome.becomes("failed", error.message, of=newest)
        return outcome
    if job.coordinator not in {"", node}:
        outcome.becomes("elsewhere", f"node {job.coordinator}")
    elif newest is None:
        outcome.becomes("nothing", "no checkpoint is staged on all ranks")
    else:
        outcome.becomes("asked" if open_one else "durable", "" if open_one else "it was already", of=newest)
    return outcome


def newest_staged(job: JobStatus) -> CheckpointStatus | None:
    """The checkpoint that a drain asked for now takes, None if nothing is staged on all ranks."""
    return next((one for one in job.checkpoints if one.milestone is not None), None)


def _wait(daemon: Daemon, outcomes: list[Outcome], deadline_s: float, *, quiet: bool, preempt: bool) -> None:
    """Looks again until nothing is open. Outcomes change in place."""
    with _spinner(quiet) as spinner:
        awaited = True  # ranks that received the order may save although nothing was to be drained
        while awaited or any(outcome.result in _OPEN for outcome in outcomes):
            status, awaited = daemon.status(), False
            jobs = {(job.store, job.job): job for job in status.jobs}
            for outcome in outcomes:
                job = jobs.get((outcome.store, outcome.job))
                comes = preempt and _awaits_ranks(outcome, job)
                if not comes and outcome.result in _OPEN:
                    _judge(outcome, job)
                if (comes or outcome.result in _OPEN) and time.monotonic() >= deadline_s:
                    outcome.becomes("timeout", outcome.reason)
                awaited |= comes and outcome.result != "timeout"
            if spinner is not None:
                spinner.update(_progress(status))
            time.sleep(_LOOK_AGAIN_S)


def _awaits_ranks(outcome: Outcome, job: JobStatus | None) -> bool:
    """Whether ranks were ordered to save at one step and may still do so: then that checkpoint counts."""
    if outcome.result in _EXIT_CODES:
        return False
    if job is None:
        step = outcome.preempt_step
        if step is not None and step >= 0:  # memory of a job that was closed is given back once it is durable
            outcome.becomes("durable", f"the job has ended; what it saved at step {step} is durable")
        return False
    step = outcome.preempt_step = job.preempt_step
    if step is None:
        return False
    saved = [one for one in job.checkpoints if one.incarnation == job.incarnation and one.step >= max(step, 0)]
    safe = next((one for one in saved if one.milestone == Milestone.DURABLE), None)
    if step >= 0 and safe is not None:
        outcome.becomes("durable", of=safe)
        return False
    lost = next((one for one in saved if one.end in _LOST), None) if step >= 0 else None
    if lost is not None:
        outcome.becomes("failed", lost.reason or str(lost.end), of=lost)
        return False
    if not any(one.end is None for one in saved) and not any(rank.alive for rank in job.ranks):
        return False
    outcome.reason = f"all ranks save at step {step}" if step >= 0 else outcome.reason
    return True


@contextlib.contextmanager
def _spinner(quiet: bool) -> Iterator[Spinner | None]:
    console = common.console(stderr=True)
    if quiet or not console.is_terminal:
        yield None
        return
    with console.status("waiting") as spinner:
        yield spinner


def _judge(outcome: Outcome, job: JobStatus | None) -> None:
    """The state of the save. A newer one that becomes durable serves as well: the job would restore that one."""
    if job is None:
        outcome.becomes("failed", "the daemon no longer has the job")
        return
    target = (outcome.incarnation or 0, outcome.counter or 0)
    for one in job.checkpoints:
        save = (one.incarnation, one.counter)
        if save >= target and one.milestone == Milestone.DURABLE:
            outcome.becomes("durable", of=one)
            return
        if save == target and one.end in _LOST:
            outcome.becomes("failed", one.reason or str(one.end))
    if outcome.result in _OPEN and job.drain is not None:
        outcome.becomes("draining", job.drain.last_error)


def _progress(status: Status) -> str:
    running = [job.drain for job in status.jobs if job.drain is not None]
    done, total = sum(one.nbytes_done for one in running), sum(one.nbytes for one in running)
    speed = sum(one.bytes_per_s for one in running)
    if not running:
        return "waiting for the drain to begin"
    return f"draining: {human.size(done)} of {human.size(total)}, {human.rate(speed)}"


def _sentence(outcome: Outcome) -> str:
    if outcome.result == "elsewhere":
        return (
            f"{outcome.job}: {human.printable(outcome.reason)} was asked to drain: its daemon coordinates the job, and "
            "alone knows when it is durable. To wait for that, type there: ckptd drain --wait"
        )
    words = {
        "nothing": "nothing to drain",
        "asked": f"step {outcome.step} will be drained; watch it with ckptd status --watch",
        "draining": f"step {outcome.step} is being drained",
        "durable": f"step {outcome.step} is durable",
        "failed": f"step {outcome.step} cannot become durable",
        "timeout": f"step {outcome.step} is not durable yet, the drain goes on",
    }
    reason = f" ({human.printable(outcome.reason)})" if outcome.reason else ""
    return f"{outcome.job}: {words[outcome.result]}{reason}"
