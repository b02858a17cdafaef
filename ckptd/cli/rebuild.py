"""``ckptd rebuild``: missing and damaged files of a checkpoint, made again from the parity that was drained with it."""

import click
import msgspec

from ckptd.checkpoint.repair.run import Outcome, rebuild
from ckptd.cli import common
from ckptd.cli.counting import counting
from ckptd.shared.format.integrity import Integrity
from ckptd.system import human

SCHEMA = 1


class Output(Outcome, frozen=True, kw_only=True):
    """What --json prints."""

    schema: int = SCHEMA
    ok: bool


@click.command(epilog=common.example("ckptd rebuild /scratch/$USER/ckpt/llama-7b/step-000001000.i0003"))
@click.argument("path", type=click.Path())
@common.json_option
@common.integrity_options
def command(path: str, as_json: bool, integrity: Integrity) -> int:
    """Mend the checkpoint in PATH: images, and parity, that are missing or damaged.

    They are made again from the other images and from the parity that the daemons wrote beside them (setting
    drain_parity). Every block is compared with the votes before a file gets its name; sound files are not touched.

    Exit code 1 if a file cannot be made again: a vote never can. Files for other readers are not looked at: that is
    ckptd verify.
    """
    with counting("looking for damage", quiet=as_json) as progress:
        outcome = rebuild(path, progress, integrity)
    if as_json:
        common.print_json(Output(ok=not outcome.lost, **msgspec.structs.asdict(outcome)))
    else:
        _tell(outcome)
    return int(bool(outcome.lost))


def _tell(outcome: Outcome) -> None:
    """One line each, never wrapped: they are for grep as well."""
    for path in outcome.rebuilt:
        click.echo(f"{click.style('rebuilt:', 'green')} {human.printable(path)}")
    for lost in outcome.lost:
        click.echo(f"{click.style('lost:', 'red')} {human.printable(f'{lost.path}: {lost.what}')}")
    for note in outcome.notes:
        click.echo(f"{click.style('note:', dim=True)} {human.printable(note)}")
    verdict = f"{human.counted(len(outcome.rebuilt), 'file')} rebuilt" if outcome.rebuilt else "nothing rebuilt"
    if not outcome.damaged:
        verdict = "nothing is damaged or missing"
    if outcome.lost:
        verdict += f", {len(outcome.lost)} cannot be"
    click.echo(f"{human.size(outcome.nbytes)} looked at, {human.duration(outcome.seconds)}: {verdict}")
