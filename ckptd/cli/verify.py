"""``ckptd verify``: every digest of what lies at a path, damage named file by file and block by block."""

import time

import click
import msgspec

from ckptd.checkpoint.report import Problem, Report
from ckptd.checkpoint.verify import verify_path
from ckptd.cli import common
from ckptd.cli.counting import counting
from ckptd.shared.base.errors import UsageError
from ckptd.shared.format.integrity import Integrity
from ckptd.system import human

SCHEMA = 1
_HINT = "give a store, a job's directory in it, a checkpoint, or an arena"


class Output(msgspec.Struct, frozen=True, kw_only=True):
    """What --json prints."""

    schema: int = SCHEMA
    seconds: float
    path: str
    ok: bool
    checked: list[str]
    files: int
    nbytes: int
    problems: list[Problem]
    notes: list[str]


@click.command(epilog=common.example("ckptd verify /scratch/$USER/ckpt/llama-7b/step-000001000.i0003"))
@click.argument("path", type=click.Path())
@common.json_option
@common.integrity_options
def command(path: str, as_json: bool, integrity: Integrity) -> int:
    """Check every digest below PATH: a checkpoint, a job's directory, a store, or an arena.

    In an arena that a daemon serves, a slot that is written meanwhile may look damaged: look again.

    Without --key the digests find damage, and nobody who means to; with it, that too.

    Exit code 1 if anything is damaged: each problem is a line that names file and block. Changes nothing.
    """
    began_s = time.monotonic()
    with counting("verifying", quiet=as_json) as progress:
        report = verify_path(path, progress, integrity)
    seconds = time.monotonic() - began_s
    if not report.checked and all(problem.path == report.path for problem in report.problems):
        what = report.problems[0].what if report.problems else "; ".join(report.notes) or "no checkpoint is here"
        what = human.printable(what.removeprefix(f"{report.path}: "))
        raise UsageError(f"nothing to verify in {report.path}: {what}", hint=_HINT)
    if as_json:
        told = {name: getattr(report, name) for name in Output.__struct_fields__ if hasattr(report, name)}
        common.print_json(Output(seconds=seconds, **told))
    else:
        _tell(report, seconds)
    return int(bool(report.problems))


def _tell(report: Report, seconds: float) -> None:
    """One line each, never wrapped: they are for grep as well."""
    for problem in report.problems:
        click.echo(f"{click.style('damaged:', 'red')} {human.printable(str(problem))}")
    for note in report.notes:
        click.echo(f"{click.style('note:', dim=True)} {human.printable(note)}")
    speed = human.rate(report.nbytes / seconds) if seconds else "-"
    verdict = human.counted(len(report.problems), "problem") if report.problems else "every digest matches"
    click.echo(
        f"{len(report.checked)} checked, {human.counted(report.files, 'file')}, {human.size(report.nbytes)} "
        f"in {human.duration(seconds)} ({speed}): {verdict}"
    )
