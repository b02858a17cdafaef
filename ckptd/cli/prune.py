"""``ckptd prune``: retention, without a daemon."""

import click
import msgspec

from ckptd.cli import common
from ckptd.core.coordinator.retention import superfluous
from ckptd.shared.base.errors import CkptdError
from ckptd.shared.base.ids import SaveId
from ckptd.shared.format.integrity import Integrity
from ckptd.shared.stores.kinds import absolute
from ckptd.store.interface import Store
from ckptd.store.opening import jobs_at, open_store
from ckptd.store.scan import pinned
from ckptd.system import human
from ckptd.system.config import load_config

SCHEMA = 1


class Pruned(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint that retention does not keep. why: it is still there."""

    step: int
    path: str
    nbytes: int
    removed: bool
    why: str = ""


@click.command(epilog=common.example("ckptd prune --dry-run /scratch/$USER/ckpt", "ckptd prune --keep-last 2 PATH"))
@click.argument("path")
@click.option("--keep-last", metavar="N", help="Of each job keep the newest N.  [CKPTD_KEEP_LAST; 3]")
@click.option("--keep-every", metavar="STEPS", help="And those of steps that are multiples.  [CKPTD_KEEP_EVERY; none]")
@click.option("--dry-run", is_flag=True, help="Say what would be removed, and remove nothing.")
@common.json_option
@common.integrity_options
def command(  # noqa: PLR0913, PLR0917 - a flag each
    path: str, keep_last: str | None, keep_every: str | None, dry_run: bool, as_json: bool, integrity: Integrity
) -> int:
    """Remove what retention does not keep in PATH, a store or one job's directory in it.

    A job's newest checkpoint stays in any case, and so does what was pinned (ckptd pin). What an interrupted removal
    left is removed too. A daemon of the job runs on beside it, and sees what is gone at its next load, or with a commit
    within a minute; not while ranks load an older checkpoint: nothing holds it for them.

    Exit code 1 if something could not be looked at or removed.
    """
    settings, _ = load_config({"keep_last": keep_last, "keep_every": keep_every})
    found: list[Pruned] = []
    problems: list[str] = []
    with common.store_errors():
        for key in jobs_at(absolute(path)):
            store = open_store(key.store, integrity)
            pruned, left = _prune(store, key.job, settings.keep_last, settings.keep_every, dry_run=dry_run)
            found += pruned
            problems += left
    ok = all(one.removed or dry_run for one in found) and not problems
    if as_json:
        common.print_json({"schema": SCHEMA, "ok": ok, "checkpoints": found, "problems": problems})
    else:
        _tell(found, problems, dry_run=dry_run)
    return int(not ok)


def _prune(store: Store, job: str, keep_last: int, keep_every: int, *, dry_run: bool) -> tuple[list[Pruned], list[str]]:
    """What of one job retention does not keep, and problems."""
    there = store.scan(job)
    try:
        kept = pinned(store.files(job))
    except OSError as error:
        raise CkptdError(str(error), hint="without the pins nothing is removed") from None
    sizes = {entry.committed.save: entry.committed.nbytes for entry in there.committed}
    stay = {save for save in sizes if save.dirname in kept}
    gone = superfluous(sizes, keep_last=keep_last, keep_every=keep_every, pinned=stay)
    found: list[Pruned] = []
    for save in gone:
        why = "" if dry_run else _removed(store, job, save)
        done = not dry_run and not why
        found.append(Pruned(step=save.step, path=store.where(job, save), nbytes=sizes[save], removed=done, why=why))
    if dry_run:
        return found, there.problems
    left = [f"{location} could not be removed" for location in store.sweep(job, all_of_it=False)]
    return found, [*there.problems, *left]


def _removed(store: Store, job: str, save: SaveId) -> str:
    """Empty, or why it is still there."""
    try:
        return "" if store.remove(job, save) else "a trainer's directory has links to it, or it was pinned"
    except (CkptdError, OSError) as error:
        return str(error)


def _tell(found: list[Pruned], problems: list[str], *, dry_run: bool) -> None:
    for one in found:
        word, color = ("removed:", "green") if one.removed else ("would be removed:", "cyan")
        if one.why:
            word, color = "not removed:", "yellow"
        why = f": {human.printable(one.why)}" if one.why else ""
        click.echo(f"{click.style(word, color)} {human.printable(one.path)} ({human.size(one.nbytes)}){why}")
    for problem in problems:
        click.echo(f"{click.style('problem:', 'red')} {human.printable(problem)}")
    if not found:
        click.echo("nothing to remove")
    elif dry_run:
        click.echo(f"{human.size(sum(one.nbytes for one in found))} in all; nothing was removed")
