"""``ckptd status``: the state of the daemon, once or continuously."""

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass

import click
from rich.console import Group, RenderableType
from rich.text import Text

from ckptd.arena.ask import Daemon
from ckptd.cli import common
from ckptd.cli.last_state import lines
from ckptd.cli.view.parts import error_text
from ckptd.cli.view.screen import watch
from ckptd.cli.view.status import StatusView
from ckptd.cli.view.unsafe import judged
from ckptd.shared.base.errors import CkptdError, ConnectError

_WHERE_DAEMONS_COME_FROM = """\
a training starts one with connect(); it leaves when its last job is closed and durable
what lies on a store: ckptd list PATH"""


@dataclass(frozen=True)
class _Wanted:
    """What to ask for, and how much of it to show."""

    nodes: bool
    everything: bool
    interval_s: float

    def look(self, daemon: Daemon) -> StatusView:
        """Prints one status. Raises CkptdError."""
        return StatusView(daemon.status(nodes=self.nodes), nodes=self.nodes, everything=self.everything)

    def look_again(self, daemon: Daemon) -> RenderableType:
        """A daemon that restarts is waited for: that is when one watches."""
        try:
            return self.look(daemon)
        except CkptdError as error:
            hint = f"\nhint: {error.hint}" if error.hint else ""
            again = Text(f"looking again every {self.interval_s:g} s; Ctrl-C ends", "dim")
            return Group(error_text(f"{error.message}{hint}"), again)


@click.command(epilog=common.example("ckptd status --watch --nodes", "ckptd status --json | jq '.jobs[].drain'"))
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
    arena: str | None, as_json: bool, timeout_s: float, nodes: bool, everything: bool, live: bool, interval_s: float
) -> None:
    """Show checkpoints and their milestones, the running drain, memory and last errors."""
    path = common.arena_of(arena)
    console = common.console()
    wanted = _Wanted(nodes or everything, everything or not console.is_terminal, interval_s)
    with _rest_told(path), Daemon(path, timeout_s) as daemon:
        if not live:
            _print(daemon, wanted, as_json=as_json)
        elif as_json or not console.is_terminal or console.is_dumb_terminal:
            _stream(daemon, wanted, as_json=as_json)
        else:
            wanted.look(daemon)  # a daemon that is not there at all is an error, not something to wait for
            last = watch(console, lambda: wanted.look_again(daemon), interval_s)
            if last is not None:
                common.show(last)


@contextlib.contextmanager
def _rest_told(arena: str) -> Iterator[None]:
    """Adds to the error of a daemon that is not there what it left, or where daemons come from and where they go."""
    try:
        yield
    except ConnectError as error:
        if os.path.isdir(arena):
            raise ConnectError("\n".join([error.message, *lines(arena)]), hint=error.hint) from None
        raise ConnectError(error.message, hint=f"{error.hint}\n{_WHERE_DAEMONS_COME_FROM}") from None


def _print(daemon: Daemon, wanted: _Wanted, *, as_json: bool, indent: int = 2) -> None:
    if as_json:
        common.print_json(judged(daemon.status(nodes=wanted.nodes)), indent=indent)
    else:
        common.show(wanted.look(daemon))


def _stream(daemon: Daemon, wanted: _Wanted, *, as_json: bool) -> None:
    """One status per interval, one below the other. With JSON the exit code reports a lost daemon."""
    with contextlib.suppress(KeyboardInterrupt):
        _print(daemon, wanted, as_json=as_json, indent=0)
        while True:
            time.sleep(wanted.interval_s)
            if as_json:
                _print(daemon, wanted, as_json=True, indent=0)
            else:
                click.echo()
                common.show(wanted.look_again(daemon))
