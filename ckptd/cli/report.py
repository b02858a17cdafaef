"""``ckptd report``: a page about a job, from its journal: one file for a browser. Needs no daemon, no network."""

import contextlib
import os
import stat

import click
import msgspec

from ckptd.cli import common, journals
from ckptd.cli.advise import mtbf_of
from ckptd.cli.history import summary_of
from ckptd.cli.page.document import page
from ckptd.history.advice import advise
from ckptd.shared.base.errors import UsageError
from ckptd.system import human

SCHEMA = 1


class Output(msgspec.Struct, frozen=True, kw_only=True):
    """What --json prints."""

    schema: int = SCHEMA
    path: str
    nbytes: int
    runs: int
    damaged: int


@click.command(epilog=common.example("ckptd report llama-7b -o report.html"))
@journals.target
@click.option("-o", "--output", required=True, metavar="FILE", help="The page; a file there is replaced. -: stdout.")
@click.option(
    "--mtbf",
    metavar="DURATION",
    help="Mean time between failures, without restarts, for the advice.  [as in the journal]",
)
@common.json_option
def command(target: str, store: str | None, output: str, mtbf: str | None, as_json: bool) -> int:
    """Write a page about JOB: its runs, stalls, drains, losses, goodput, and how often to save.

    Exit code 1 if parts of the journal are damaged. It is drawn by matplotlib: pip install 'ckptd[report]'.
    """
    mtbf_s = mtbf_of(mtbf)
    if as_json and output == "-":
        raise UsageError("--json and -o - both want stdout", hint="-o FILE")
    history = journals.read(target, store)
    summary = summary_of(history, history.runs)
    text = page(history, summary, advise(history.runs, history.spans, mtbf_s))
    data = text.encode("utf-8", errors="replace")
    if output == "-":
        click.echo(data, nl=False)
        return int(history.damaged > 0)
    _write(output, data)
    if as_json:
        runs, path = len(history.runs), os.path.abspath(output)
        common.print_json(Output(path=path, nbytes=len(data), runs=runs, damaged=history.damaged))
    else:
        click.echo(f"{output}: {human.counted(len(history.runs), 'run')}, {human.size(len(data))}")
        if history.damaged:
            click.echo(f"{human.counted(history.damaged, 'damaged part')} of the journal passed over", err=True)
    return int(history.damaged > 0)


def _write(output: str, data: bytes) -> None:
    """Whole, or what was there before. Raises UsageError; what is no file, such as a device, is never replaced."""
    path = os.path.realpath(output)
    if os.path.lexists(path) and not stat.S_ISREG(os.lstat(path).st_mode):
        hint = "-o report.html is a file, -o - is stdout"
        raise UsageError(f"-o {output}: it is there and is no regular file", hint=hint)
    part = f"{path}.part"
    try:
        with open(part, "wb") as file:
            file.write(data)
        os.replace(part, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(part)
        text, hint = f"-o {output}: {error.strerror}", "-o FILE, in a directory that you may write"
        raise UsageError(text, hint=hint) from None
