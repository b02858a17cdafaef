"""``ckptd report``: a page about a job, from its journal: one file for a browser. Needs no daemon, no network."""

import contextlib
import os

import click
import msgspec

from ckptd.cli import common, journals
from ckptd.cli.advise import mtbf_of
from ckptd.cli.history import summary_of
from ckptd.cli.page.document import page
from ckptd.history.advice import advise
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
@click.option("-o", "--output", required=True, metavar="FILE", help="The page; what is there is replaced.")
@click.option("--mtbf", metavar="DURATION", help="Mean time between failures, for the advice.  [as the journal has it]")
@common.json_option
def command(target: str, store: str | None, output: str, mtbf: str | None, as_json: bool) -> int:
    """Write a page about JOB: its runs, stalls, drains, losses, goodput, and how often to save.

    Exit code 1 if parts of the journal are damaged. It is drawn by matplotlib: pip install 'ckptd[report]'.
    """
    mtbf_s = mtbf_of(mtbf)
    history = journals.read(target, store)
    summary = summary_of(history, history.runs)
    text = page(history, summary, advise(history.runs, history.spans, mtbf_s))
    data = text.encode("utf-8", errors="replace")
    with common.store_errors():
        _write(output, data)
    if as_json:
        runs, path = len(history.runs), os.path.abspath(output)
        common.print_json(Output(path=path, nbytes=len(data), runs=runs, damaged=history.damaged))
    else:
        click.echo(f"{output}: {human.counted(len(history.runs), 'run')}, {human.size(len(data))}")
        if history.damaged:
            click.echo(f"{human.counted(history.damaged, 'damaged part')} of the journal passed over", err=True)
    return int(history.damaged > 0)


def _write(path: str, data: bytes) -> None:
    """Whole, or what was there before."""
    part = f"{path}.part"
    try:
        with open(part, "wb") as file:
            file.write(data)
        os.replace(part, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(part)
        raise
