"""``ckptd demo``: a training that is killed and comes back, in the client's package."""

import importlib.util
import os
import sys

import click

from ckptd.cli.common import example
from ckptd.shared.base.errors import CkptdError

_MODULE = "ckptd_client.demo"


@click.command(
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []},
    epilog=example("ckptd demo --short"),
)
@click.option("--help", "-h", "wants_help", is_flag=True, help="Show this, then the demo's own options.")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def command(ctx: click.Context, wants_help: bool, args: tuple[str, ...]) -> None:
    """Train a small model, kill it, restore it, and compare with the run that was left alone."""
    if wants_help:
        click.echo(ctx.get_help())
        args = ("--help", *args)
    missing = [name for name in ("torch", "ckptd_client") if importlib.util.find_spec(name) is None]
    if wants_help and missing:
        return
    if missing:
        raise CkptdError(f"the demo needs {missing[0]}, which is not installed", hint="pip install 'ckptd[torch]'")
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", _MODULE, *args])  # noqa: S606  # no shell is wanted
