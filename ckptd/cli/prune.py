"""``ckptd prune``: retention, without a daemon."""

import os

import click
import msgspec

from ckptd import human
from ckptd.cli import common
from ckptd.cli.listing import jobs_at
from ckptd.config import load_config
from ckptd.core.retention import superfluous
from ckptd.filelayer import FileLayer
from ckptd.pins import pinned
from ckptd.protocol.errors import CkptdError
from ckptd.protocol.ids import JobKey
from ckptd.store import remove_checkpoint, sweep_trash
from ckptd.store_scan import Place, scan

SCHEMA = 1


class Pruned(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint that retention does not keep. why: it is still there."""

    step: int
    path: str
    nbytes: int
    removed: bool
    why: str = ""


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What --json prints."""

    schema: int
    ok: bool
    checkpoints: list[Pruned]  # of each job the oldest first


@click.command(epilog=common.example("ckptd prune --dry-run /scratch/$USER/ckpt", "ckptd prune --keep-last 2 PATH"))
@click.argument("path")
@click.option("--keep-last", metavar="N", help="Of each job keep the newest N.  [CKPTD_KEEP_LAST; 3]")
@click.option("--keep-every", metavar="STEPS", help="And those of steps that are multiples.  [CKPTD_KEEP_EVERY; none]")
@click.option("--dry-run", is_flag=True, help="Say what would be removed, and remove nothing.")
@common.json_option
def command(path: str, keep_last: str | None, keep_every: str | None, dry_run: bool, as_json: bool) -> int:
    """Remove what retention does not keep in PATH, a store or one job's directory in it.

    A job's newest checkpoint stays in any case, and so does what was pinned (ckptd pin). Harmless beside a daemon. What
    an interrupted removal left is removed too.

    Exit code 1 if something could not be removed.
    """
    settings, _ = load_config({"keep_last": keep_last, "keep_every": keep_every})
    found = [
        one
        for key in jobs_at(os.path.abspath(path))
        for one in _prune(key, settings.keep_last, settings.keep_every, dry_run=dry_run)
    ]
    ok = all(one.removed or dry_run for one in found)
    if as_json:
        common.print_json(Result(schema=SCHEMA, ok=ok, checkpoints=found))
    else:
        _tell(found, dry_run=dry_run)
    return int(not ok)


def _prune(key: JobKey, keep_last: int, keep_every: int, *, dry_run: bool) -> list[Pruned]:
    fs = FileLayer()
    sizes = {entry.committed.save: entry.committed.nbytes for entry in scan(fs, key).committed}
    names = pinned(fs, key)
    stay = {save for save in sizes if save.dirname in names}
    gone = superfluous(sizes, keep_last=keep_last, keep_every=keep_every, pinned=stay)
    found: list[Pruned] = []
    for save in gone:
        why = ""
        if not dry_run:
            try:
                why = "" if remove_checkpoint(fs, key, save) else "it was pinned meanwhile"
            except (CkptdError, OSError) as error:
                why = str(error)
        done = not dry_run and not why
        found.append(Pruned(step=save.step, path=Place(key, save).final, nbytes=sizes[save], removed=done, why=why))
    if not dry_run:
        sweep_trash(fs, key)
    return found


def _tell(found: list[Pruned], *, dry_run: bool) -> None:
    for one in found:
        word, color = ("removed:", "green") if one.removed else ("would be removed:", "cyan")
        if one.why:
            word, color = "not removed:", "yellow"
        why = f": {human.printable(one.why)}" if one.why else ""
        click.echo(f"{click.style(word, color)} {human.printable(one.path)} ({human.size(one.nbytes)}){why}")
    if not found:
        click.echo("nothing to remove")
    elif dry_run:
        click.echo(f"{human.size(sum(one.nbytes for one in found))} in all; nothing was removed")
