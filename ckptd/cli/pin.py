"""``ckptd pin``: checkpoints that retention is to leave alone."""

import os

import click
import msgspec

from ckptd.checkpoint.whereabouts import where_checkpoints_are
from ckptd.cli import common
from ckptd.shared.base.errors import UsageError
from ckptd.shared.base.ids import JobKey, parse_dirname
from ckptd.shared.format.integrity import XXH3
from ckptd.shared.stores.kinds import real
from ckptd.store.opening import open_store

SCHEMA = 1


class Output(msgspec.Struct, frozen=True, kw_only=True):
    """What --json prints."""

    schema: int = SCHEMA
    path: str
    pinned: bool
    changed: bool


@click.command(
    epilog=common.example(
        "ckptd pin /scratch/$USER/ckpt/llama-7b/latest",
        "ckptd pin --remove /scratch/$USER/ckpt/llama-7b/step-000000100.i0001",
    )
)
@click.argument("path", type=click.Path())
@click.option("--remove", is_flag=True, help="Retention may have it again.")
@common.json_option
def command(path: str, remove: bool, as_json: bool) -> int:
    """Pin the checkpoint in PATH: neither the daemon nor ckptd prune removes it, whatever is to be kept."""
    where = real(path)
    key, dirname = named(where)
    with common.store_errors():
        store = open_store(key.store, XXH3)  # names alone are looked at
        changed = store.pin(key.job, dirname, pinned=not remove)
    if as_json:
        common.print_json(Output(path=where, pinned=not remove, changed=changed))
        return 0
    before = "" if changed else " already" if not remove else "; it was not pinned"
    click.echo(f"{where}: {'not pinned' if remove else 'pinned'}{before}")
    return 0


def named(path: str) -> tuple[JobKey, str]:
    """The job, and the checkpoint's directory in it."""
    head, name = os.path.split(path)
    if parse_dirname(name) is None:
        what = "is no checkpoint's directory" if os.path.lexists(path) else "does not exist"
        raise UsageError(f"{path} {what}", hint=where_checkpoints_are(path))
    return JobKey(*os.path.split(head)), name
