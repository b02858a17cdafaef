"""``ckptd status``: what the daemon holds and does, once or live."""

import contextlib
import os
import time
from collections.abc import Iterator

import click
from rich.console import Group, RenderableType
from rich.live import Live

from ckptd.ask import Daemon
from ckptd.cli import common
from ckptd.protocol.errors import CkptdError, ConnectError
from ckptd.status_view import StatusView, error_text

_WHERE_DAEMONS_COME_FROM = """\
a training starts one with connect(); it leaves when its last job is closed and durable
what lies on a store: ckptd list PATH"""


@click.command(epilog=common.example("ckptd status --watch", "ckptd status --json | jq '.jobs[].checkpoints[0]'"))
@common.arena_option
@common.json_option
@common.timeout_option
@click.option("--nodes", is_flag=True, help="All nodes of each job, and what they keep for each other.")
@click.option("--watch", "-w", is_flag=True, help="Live, until Ctrl-C. With --json: one line per look.")
@click.option(
    "--interval", "interval_s", type=click.FloatRange(0.1), default=1.0, show_default=True, metavar="SECONDS",
    help="Time between two looks of --watch.",
)  # fmt: skip
def command(  # noqa: PLR0913, PLR0917 - options
    arena: str | None, as_json: bool, timeout_s: float, nodes: bool, watch: bool, interval_s: float
) -> None:
    """Show checkpoints and their milestones, the running drain, memory and last errors."""
    path = common.arena_of(arena)
    with _newcomers_told(path), Daemon(path, timeout_s) as daemon:
        if not watch:
            _show_once(daemon, as_json=as_json, nodes=nodes)
            return
        with contextlib.suppress(KeyboardInterrupt):
            if as_json or not common.console().is_terminal:
                _stream(daemon, interval_s, as_json=as_json, nodes=nodes)
            else:
                _watch(daemon, interval_s, nodes=nodes)


@contextlib.contextmanager
def _newcomers_told(arena: str) -> Iterator[None]:
    """Adds to the error of a daemon that is not there where daemons come from, and where they go."""
    try:
        yield
    except ConnectError as error:
        if os.path.isdir(arena):
            raise
        raise ConnectError(error.message, hint=f"{error.hint}\n{_WHERE_DAEMONS_COME_FROM}") from error


def _show_once(daemon: Daemon, *, as_json: bool, nodes: bool, indent: int = 2) -> None:
    status = daemon.status()
    if as_json:
        common.print_json(status, indent=indent)
    else:
        common.show(StatusView(status, nodes=nodes))


def _stream(daemon: Daemon, interval_s: float, *, as_json: bool, nodes: bool) -> None:
    while True:
        _show_once(daemon, as_json=as_json, nodes=nodes, indent=0)
        time.sleep(interval_s)


def _watch(daemon: Daemon, interval_s: float, *, nodes: bool) -> None:
    """One picture drawn over the last. A daemon that restarts is waited for: that is when one watches."""
    view: RenderableType = StatusView(daemon.status(), nodes=nodes)
    with Live(view, console=common.console(), auto_refresh=False) as live:
        while True:
            live.update(view, refresh=True)
            time.sleep(interval_s)
            try:
                view = StatusView(daemon.status(), nodes=nodes)
            except CkptdError as error:
                view = Group(error_text(str(error)), f"looking again every {interval_s:g} s; Ctrl-C ends")
