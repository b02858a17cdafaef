"""``ckptd status``: the state of the daemon, once or continuously."""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeVar

import click
import msgspec
from msgspec import structs
from rich.console import Console, Group, RenderableType
from rich.text import Text

from ckptd.arena.ask import Daemon, NoDaemonError
from ckptd.cli import common
from ckptd.cli.last_state import Output, asked, left
from ckptd.cli.view.last import view
from ckptd.cli.view.parts import error_text
from ckptd.cli.view.screen import watch
from ckptd.cli.view.status import StatusView
from ckptd.cli.view.unsafe import judged
from ckptd.shared.base.errors import CkptdError, ConnectError
from ckptd.shared.protocol.status import JobStatus, Status
from ckptd.shared.stores.kinds import absolute

_WHERE_DAEMONS_COME_FROM = """\
a training starts one with connect(); it leaves when its last job is closed and durable
what is known of a job: ckptd status JOB|PATH
what lies on a store: ckptd list PATH"""

_T = TypeVar("_T")


@dataclass(frozen=True)
class _Wanted:
    """What to ask for, and how much of it to show."""

    nodes: bool
    everything: bool
    job: "_Named | None" = None

    def status(self, daemon: Daemon) -> Status:
        """With the job that was named alone. Raises CkptdError."""
        found = daemon.status(nodes=self.nodes)
        return found if self.job is None else structs.replace(found, jobs=self.job.among(found))

    def look(self, daemon: Daemon) -> StatusView:
        """One status. Raises CkptdError."""
        return StatusView(self.status(daemon), nodes=self.nodes, everything=self.everything)


@dataclass(frozen=True)
class _Named:
    """A job as the user names it."""

    target: str
    store: str | None

    def among(self, status: Status) -> list[JobStatus]:
        """The jobs of the daemon that are meant: none, one, or those of one name in several stores."""
        place = absolute(self.store) if self.store is not None else None
        path = absolute(self.target) if self.store is None else ""
        return [
            job
            for job in status.jobs
            if (job.job == self.target and place in {None, job.store}) or f"{job.store}/{job.job}" == path
        ]


class _Look(Protocol):
    """At what is to be shown, as often as asked."""

    def facts(self) -> msgspec.Struct:
        """For --json. Raises CkptdError."""

    def view(self) -> RenderableType:
        """For people. Raises CkptdError."""


@dataclass(frozen=True)
class _AtDaemon:
    """At a daemon that is connected."""

    daemon: Daemon
    wanted: _Wanted

    def facts(self) -> Status:
        return judged(self.wanted.status(self.daemon))

    def view(self) -> RenderableType:
        return self.wanted.look(self.daemon)


@dataclass(frozen=True)
class _AtJob:
    """At a job that no daemon of this node served: one may by now."""

    arena: str
    timeout_s: float
    named: _Named
    wanted: _Wanted

    def facts(self) -> msgspec.Struct:
        return self._looked(lambda daemon: _AtDaemon(daemon, self.wanted).facts(), lambda last: last)

    def view(self) -> RenderableType:
        return self._looked(self.wanted.look, view)

    def _looked(self, served: Callable[[Daemon], _T], left: Callable[[Output], _T]) -> _T:
        if _is_served(self.arena, self.timeout_s, self.named):
            with Daemon(self.arena, self.timeout_s) as daemon:
                return served(daemon)
        return left(asked(self.arena, self.named.target, self.named.store, self.timeout_s))


@click.command(epilog=common.example("ckptd status --watch --nodes", "ckptd status --json | jq '.jobs[].drain'"))
@click.argument("target", metavar="[JOB|PATH]", required=False)
@click.option("--store", metavar="DIR", help="Where JOB is.  [CKPTD_STORE; the setting]")
@common.arena_option
@common.json_option
@common.timeout_option
@click.option("--nodes", "-n", is_flag=True, help="Ask the daemons of all nodes of each job, and show them all.")
@click.option("--all", "everything", is_flag=True, help="With --nodes: a row for every node. So it is in a pipe.")
@click.option("--watch", "-w", "live", is_flag=True, help="Live, until Ctrl-C. With --json: one line per look.")
@click.option(
    "--interval", "interval_s", type=click.FloatRange(0.1), default=1.0, show_default=True, metavar="SECONDS",
    help="Time between two looks of --watch.",
)  # fmt: skip
def command(  # noqa: PLR0913, PLR0917 - options
    target: str | None, store: str | None, arena: str | None, as_json: bool, timeout_s: float, nodes: bool,
    everything: bool, live: bool, interval_s: float,
) -> None:  # fmt: skip
    """Show checkpoints and their milestones, the running drain, memory and last errors.

    With JOB, or the PATH of its directory: of this job alone. If no daemon of this node serves it, its last state: from
    its journal on the store, and from this node's memory.
    """
    path = common.arena_of(arena)
    console = common.console()
    named = _Named(target, store) if target is not None else None
    wanted = _Wanted(nodes or everything, everything or not console.is_terminal, named)
    if named is not None and not _is_served(path, timeout_s, named):
        _show(_AtJob(path, timeout_s, named, wanted), console, interval_s if live else None, as_json=as_json)
        return
    with _rest_told(path, timeout_s), Daemon(path, timeout_s) as daemon:
        _show(_AtDaemon(daemon, wanted), console, interval_s if live else None, as_json=as_json)


def _show(look: _Look, console: Console, interval_s: float | None, *, as_json: bool) -> None:
    """Once, or again and again."""
    if interval_s is None:
        _print(look, as_json=as_json)
    elif as_json or not console.is_terminal or console.is_dumb_terminal:
        _stream(look, interval_s, as_json=as_json)
    else:
        look.view()  # what is not there at all is an error, not something to wait for
        last_seen = watch(console, lambda: _again(look, interval_s), interval_s)
        if last_seen is not None:
            common.show(last_seen)


def _again(look: _Look, interval_s: float) -> RenderableType:
    """A daemon that restarts is waited for: that is when one watches."""
    try:
        return look.view()
    except CkptdError as error:
        hint = f"\nhint: {error.hint}" if error.hint else ""
        again = Text(f"looking again every {interval_s:g} s; Ctrl-C ends", "dim")
        return Group(error_text(f"{error.message}{hint}"), again)


def _is_served(arena: str, timeout_s: float, named: _Named) -> bool:
    """Whether this node's daemon has the job. Raises CkptdError if there is one that does not answer."""
    try:
        with Daemon(arena, timeout_s) as daemon:
            return bool(named.among(daemon.status()))
    except NoDaemonError:
        return False


@contextlib.contextmanager
def _rest_told(arena: str, timeout_s: float) -> Iterator[None]:
    """Adds to the error of a daemon that is not there what it left, or where daemons come from and where they go."""
    try:
        yield
    except ConnectError as error:
        if os.path.isdir(arena):
            facts, hints = left(arena, timeout_s)
            raise ConnectError("\n".join([error.message, *facts]), hint="\n".join([error.hint, *hints])) from None
        raise ConnectError(error.message, hint=f"{error.hint}\n{_WHERE_DAEMONS_COME_FROM}") from None


def _print(look: _Look, *, as_json: bool, indent: int = 2) -> None:
    if as_json:
        common.print_json(look.facts(), indent=indent)
    else:
        common.show(look.view())


def _stream(look: _Look, interval_s: float, *, as_json: bool) -> None:
    """One look per interval, one below the other. With JSON the exit code reports a lost daemon."""
    with contextlib.suppress(KeyboardInterrupt):
        _print(look, as_json=as_json, indent=0)
        while True:
            time.sleep(interval_s)
            if as_json:
                _print(look, as_json=True, indent=0)
            else:
                click.echo()
                common.show(_again(look, interval_s))
