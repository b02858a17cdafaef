"""``ckptd commit``: unfinished checkpoints that all nodes have voted for, committed without a daemon."""

import os

import click
import msgspec

from ckptd import __version__
from ckptd.checkpoint.finish import Finished, finish, finish_again
from ckptd.cli import common
from ckptd.shared.base.ids import JobKey, SaveId, parse_dirname, parse_partial_dirname
from ckptd.shared.format.integrity import Integrity
from ckptd.shared.stores.kinds import absolute, is_there
from ckptd.store.opening import jobs_at
from ckptd.system import human

SCHEMA = 1


class Output(msgspec.Struct, frozen=True, kw_only=True):
    """What --json prints."""

    schema: int = SCHEMA
    ok: bool
    saves: list[Finished]


@click.command(epilog=common.example("ckptd commit /scratch/$USER/ckpt/llama-7b"))
@click.argument("path", type=click.Path())
@common.json_option
@common.integrity_options
def command(path: str, as_json: bool, integrity: Integrity) -> int:
    """Commit what lies unfinished in PATH: a store, a job's directory in it, or one unfinished directory.

    Or a checkpoint that has lost its COMMITTED or its manifest: its directory as PATH.

    Done from the votes alone, as any daemon of the job would do it, and harmless beside one. A save that some node has
    not voted for is left as it is, and what it lacks is said.

    Exit code 1 if a save is not committed, unless a newer one is.
    """
    where, writer = absolute(path), f"ckptd {__version__}"
    if parse_dirname(os.path.basename(where)) is not None and is_there(where):
        with common.store_errors():
            saves = [finish_again(where, writer, integrity)]
    else:
        jobs, only = _where(where)
        saves = [save for key in jobs for save in finish(key, writer, only, integrity)]
    ok = all(save.committed or save.superseded for save in saves)
    if as_json:
        common.print_json(Output(ok=ok, saves=saves))
    else:
        _tell(saves)
    return int(not ok)


def _where(path: str) -> tuple[list[JobKey], SaveId | None]:
    """Jobs, and the one save that is meant if one is."""
    head, base = os.path.split(path)
    save = parse_partial_dirname(base)
    if save is not None and is_there(path):
        return [JobKey(*os.path.split(head))], save
    return jobs_at(path), None


def _tell(saves: list[Finished]) -> None:
    for save in saves:
        word, color = ("committed:", "green") if save.committed else ("not committed:", "yellow")
        why = f": {save.why}" if save.why else ""
        click.echo(f"{click.style(word, color)} step {save.step}: {human.printable(save.path + why)}")
    if not saves:
        click.echo("nothing lies unfinished")
