"""The command line: one file per verb, loaded when it is called, so that each starts as fast as what it needs.

Every verb returns its exit code; errors come up here, and only here are they turned into words and a code.
"""

import difflib
import importlib
import io
import os
import re
import sys
from collections.abc import Sequence

import click

from ckptd import __version__
from ckptd.shared.base.errors import CkptdError, ConfigError, ConnectError, UsageError, WaitTimeoutError

FINE, NOT_FINE, USAGE, NO_DAEMON, ELSEWHERE, INTERRUPTED = 0, 1, 2, 3, 4, 130

# Verb -> module. One called "list" would hide the builtin here: a submodule becomes a name of its package.
_VERBS = {
    "run": "run",
    "status": "status",
    "metrics": "metrics",
    "list": "listing",
    "history": "history",
    "report": "report",
    "advise": "advise",
    "verify": "verify",
    "scrub": "scrub",
    "export": "export",
    "rebuild": "rebuild",
    "commit": "commit",
    "publish": "publish",
    "prune": "prune",
    "pin": "pin",
    "drain": "drain",
    "stop": "stop",
    "forget": "forget",
    "keygen": "keygen",
    "config": "settings",
    "doctor": "doctor",
    "demo": "demo",
}
_EXIT_CODES = """\b
Exit codes:
  0  fine
  1  what was looked at is not fine: damaged, failed, unfit
  2  usage: an unknown flag or setting, a path with nothing in it
  3  no daemon, or it was not done in time
  4  asked of another node, where to wait for it: drain --wait

\b
Example:
  ckptd doctor --store /scratch/$USER/ckpt
  ckptd run --store /scratch/$USER/ckpt
  ckptd status --watch
"""
_URL_RE = re.compile(r"(s3|gs|gcs|az|abfss?|hdfs|https?|file)://")


class _Verbs(click.Group):
    """Loads a verb's module when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Verbs in the order that a newcomer meets them."""
        del ctx
        return list(_VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The verb, None if there is none of that name."""
        del ctx
        if cmd_name not in _VERBS:
            return None
        command: click.Command = importlib.import_module(f"ckptd.cli.{_VERBS[cmd_name]}").command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click does; a verb that is not there names the one that was meant."""
        near = difflib.get_close_matches(args[0], _VERBS, 1)
        if args[0] not in _VERBS and near:
            raise UsageError(f"no such command: {args[0]}", hint=f"did you mean ckptd {near[0]}? All: ckptd --help")
        return super().resolve_command(ctx, args)


@click.group(
    name="ckptd", cls=_Verbs, epilog=_EXIT_CODES, invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)  # fmt: skip
@click.version_option(__version__, message="ckptd %(version)s")
@click.pass_context
def cli(ctx: click.Context) -> int:
    """Asynchronous checkpoints: staged in shared memory, drained to the parallel file system by a daemon."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())
        return USAGE
    return FINE


def main() -> None:
    """The console script."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # what a terminal cannot show is a question mark, never a traceback
    sys.exit(invoke(sys.argv[1:]))


def invoke(args: Sequence[str]) -> int:
    """Exit code of one command line. Errors go to stderr."""
    try:
        _refuse_urls(args)
        return cli.main(list(args), prog_name="ckptd", standalone_mode=False) or FINE
    except click.ClickException as error:
        _tell(error.format_message(), f"see {_command_path(error)} --help")
        return USAGE
    except CkptdError as error:
        _tell(error.message, error.hint)
        return exit_code(error)
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED


def _refuse_urls(args: Sequence[str]) -> None:
    """What looks like a bucket would be taken for a directory of that name below this one; a collector has a URL."""
    paths = [word for before, word in zip(["", *args], args, strict=False) if before != "--otlp"]
    for url in filter(_URL_RE.match, paths):
        raise UsageError(
            f"{url} is no directory", hint="ckptd reads and writes directories: give one, or a mount of it"
        )


def exit_code(error: CkptdError) -> int:
    """What a script sees of an error."""
    match error:
        case UsageError() | ConfigError():
            return USAGE
        case ConnectError() | WaitTimeoutError():
            return NO_DAEMON
        case _:
            return NOT_FINE


def _command_path(error: click.ClickException) -> str:
    context = getattr(error, "ctx", None)
    return context.command_path if context is not None else "ckptd"


def _tell(message: str, hint: str) -> None:
    if "JOURNAL_STREAM" in os.environ:
        from ckptd.shared.base.log_line import line as log_line  # noqa: PLC0415
        from ckptd.system.logs import is_journal  # noqa: PLC0415 - of a unit's process only

        if is_journal(sys.stderr):
            click.echo(f"<3>{log_line('error', message=message, hint=hint)}", err=True)
            return
    click.echo(f"{click.style('error:', 'red', bold=True)} {message}", err=True)
    for line in hint.splitlines():
        click.echo(f"{click.style('hint:', 'cyan')} {line}", err=True)
