"""``ckptd publish``: a trainer's files of a checkpoint put where somebody says, when no daemon knows it any more."""

import os

import click
import msgspec

from ckptd.cli import common
from ckptd.cli.pin import named
from ckptd.shared.files.paths import resolved
from ckptd.shared.format.integrity import Integrity
from ckptd.shared.protocol.publication import Publication, check_publication
from ckptd.shared.stores.kinds import real
from ckptd.store.opening import open_store
from ckptd.system import human

SCHEMA = 1


class Output(msgspec.Struct, frozen=True, kw_only=True):
    """What --json prints."""

    schema: int = SCHEMA
    ok: bool
    path: str
    directory: str
    pointer: str
    files: list[str]


@click.command(
    epilog=common.example(
        "ckptd publish /scratch/$USER/ckpt/llama/latest --to runs/global_step500",
        "ckptd publish CHECKPOINT --to runs/global_step500 --pointer runs/latest",
    )
)
@click.argument("path", type=click.Path())
@click.option(
    "--to",
    "directory",
    required=True,
    type=click.Path(),
    metavar="DIRECTORY",
    help="What the files are to lie in: a new one.",
)
@click.option(
    "--pointer",
    type=click.Path(),
    metavar="FILE",
    help="A small file, such as DeepSpeed's latest, that is to name DIRECTORY.",
)
@common.json_option
@common.integrity_options
def command(path: str, directory: str, pointer: str | None, as_json: bool, integrity: Integrity) -> int:
    """Put a trainer's files of the checkpoint in PATH into DIRECTORY, under the trainer's names.

    A daemon does that after each commit if the trainer named the directory; a store names none
    of it. This is for what `ckptd list` calls unpublished after a daemon's memory was lost. No byte is copied where
    the file system has hard links. DIRECTORY must not be there, or be one that was published. The checkpoint's records
    and its list of files are checked first; the bytes of the files are not: ckptd verify reads those.

    Exit code 1 if it could not be done.
    """
    where = real(path)
    key, dirname = named(where)
    at, target = resolved(pointer) if pointer else "", resolved(directory)
    to = Publication(target, True, at, os.path.basename(target) if at else "")
    check_publication(to, key)
    with common.store_errors():
        files = open_store(key.store, integrity).publish_to(key.job, dirname, to)
    if as_json:
        common.print_json(Output(ok=True, path=where, directory=to.directory, pointer=to.pointer, files=files))
        return 0
    click.echo(f"{human.printable(to.directory)}: {len(files)} files of {human.printable(where)}")
    if to.pointer:
        click.echo(f"{human.printable(to.pointer)}: names it")
    return 0
