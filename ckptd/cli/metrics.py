"""``ckptd metrics``: what Prometheus is to know. A process beside the daemon, which itself speaks to its user alone."""

import signal

import click
from prometheus_client import generate_latest

from ckptd.cli import common
from ckptd.cli.metrics_server import registry_of, serve


@click.command(
    epilog=common.example("ckptd metrics", "ckptd metrics --port 9440", "curl http://127.0.0.1:9440/metrics")
)
@common.arena_option
@common.timeout_option
@click.option("--port", type=click.IntRange(1, 65535), metavar="N", help="Serve them there until SIGTERM or Ctrl-C.")
@click.option(
    "--address",
    default="127.0.0.1",
    show_default=True,
    metavar="HOST",
    help="Where that port is. Who reaches it reads.",
)
def command(arena: str | None, timeout_s: float, port: int | None, address: str) -> int:
    """Print this node's metrics once, for a textfile collector, or serve them over HTTP.

    Each scrape asks the daemon. Without an answer ckptd_up is 0: no error, so that an alert can fire.
    """
    registry = registry_of(common.arena_of(arena), timeout_s)
    if port is None:
        click.echo(generate_latest(registry), nl=False)
        return 0
    signal.pthread_sigmask(signal.SIG_BLOCK, _ENDS)  # before the server's threads begin, which inherit it
    serve(registry, address, port)
    click.echo(f"serving http://{address}:{port}/metrics", err=True)
    signal.sigwait(_ENDS)
    return 0


_ENDS = {signal.SIGTERM, signal.SIGINT}
