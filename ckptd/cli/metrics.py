"""``ckptd metrics``: what Prometheus is to know. A process beside the daemon, which itself speaks to its user alone."""

import signal

import click
from prometheus_client import generate_latest

from ckptd.cli import common
from ckptd.cli.metrics_server import registry_of, serve
from ckptd.cli.otlp import push


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
@click.option("--otlp", metavar="URL", help="Push them to an OpenTelemetry collector there, too: ckptd[otel].")
@click.option(
    "--interval", "interval_s", type=click.FloatRange(1.0), default=15.0, show_default=True, metavar="SECONDS",
    help="Between two pushes.",
)  # fmt: skip
def command(  # noqa: PLR0913, PLR0917 - options
    arena: str | None, timeout_s: float, port: int | None, address: str, otlp: str | None, interval_s: float
) -> int:
    """Print this node's metrics once, for a textfile collector, or serve them over HTTP, or push them.

    Each scrape asks the daemon. Without an answer ckptd_up is 0, and ckptd_ranks_unserved counts ranks that need one.
    """
    registry = registry_of(common.arena_of(arena), timeout_s)
    if port is None and otlp is None:
        click.echo(generate_latest(registry), nl=False)
        return 0
    signal.pthread_sigmask(signal.SIG_BLOCK, _ENDS)  # before other threads begin, which inherit it
    if port is not None:
        serve(registry, address, port)
        click.echo(f"serving http://{address}:{port}/metrics", err=True)
    if otlp is not None:
        push(registry, otlp, interval_s)
        click.echo(f"pushing to {otlp} every {interval_s:g} s", err=True)
    signal.sigwait(_ENDS)
    return 0


_ENDS = {signal.SIGTERM, signal.SIGINT}
