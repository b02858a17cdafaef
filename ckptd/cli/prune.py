"""``ckptd prune``: retention, without a daemon; and what older checkpoints lose of their state."""

from typing import NamedTuple

import click
import msgspec

from ckptd import __version__
from ckptd.checkpoint.ranking import Order, Said, best, check_key, order_of
from ckptd.checkpoint.reduce import Whole
from ckptd.cli import common
from ckptd.core.coordinator.retention import superfluous
from ckptd.shared.base.errors import CkptdError, UsageError
from ckptd.shared.base.ids import SaveId
from ckptd.shared.format.dropped import check_dropped
from ckptd.shared.format.integrity import Integrity
from ckptd.shared.stores.kinds import absolute
from ckptd.store.interface import Store
from ckptd.store.opening import jobs_at, open_store
from ckptd.store.scan import pinned
from ckptd.system import human
from ckptd.system.config import load_config

SCHEMA = 1
_STAYS = "a trainer's directory has links to it, or it was pinned"


class Pruned(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint that retention does not keep. why: it is still there."""

    step: int
    path: str
    nbytes: int
    removed: bool
    why: str = ""


class Reduced(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint that loses a part. nbytes: that its tensors have; dropped: done. why: it stays as it was."""

    step: int
    path: str
    keys: list[str]
    nbytes: int
    dropped: bool
    why: str = ""


class Output(msgspec.Struct, frozen=True, kw_only=True):
    """What --json prints."""

    schema: int = SCHEMA
    ok: bool
    checkpoints: list[Pruned]
    reduced: list[Reduced]
    problems: list[str]
    notes: list[str]


@click.command(
    epilog=common.example(
        "ckptd prune --dry-run /scratch/$USER/ckpt", "ckptd prune /scratch/ckpt --keep-best loss 3 --drop optimizer"
    )
)
@click.argument("path", type=click.Path())
@click.option("--keep-last", metavar="N", help="Of each job keep the newest N.  [CKPTD_KEEP_LAST; 3]")
@click.option("--keep-every", metavar="STEPS", help="And those of steps that are multiples.  [CKPTD_KEEP_EVERY; none]")
@click.option(
    "--keep-best", "keep_best", type=(str, click.IntRange(1)), multiple=True, metavar="KEY[:max] N",
    help="And the N with the smallest KEY in their metadata, or the largest. Repeatable.",
)  # fmt: skip
@click.option(
    "--drop",
    "keys",
    multiple=True,
    metavar="KEY",
    help="Of older ones that stay: remove what is below KEY of the state, such as optimizer. Repeatable.",
)
@click.option(
    "--keep-whole",
    "keep_whole",
    type=click.IntRange(1),
    metavar="N",
    help="With --drop: the newest N of each job stay whole.  [as --keep-last]",
)
@click.option("--dry-run", is_flag=True, help="Say what would be removed, and remove nothing.")
@common.json_option
@common.integrity_options
def command(  # noqa: PLR0913, PLR0917 - a flag each
    path: str, keep_last: str | None, keep_every: str | None, keep_best: tuple[tuple[str, int], ...],
    keys: tuple[str, ...], keep_whole: int | None, dry_run: bool, as_json: bool, integrity: Integrity,
) -> int:  # fmt: skip
    """Remove what retention does not keep in PATH, a store or one job's directory in it.

    A job's newest checkpoint stays in any case, and so does what was pinned (ckptd pin). What an interrupted removal
    left is removed too. A daemon of the job runs on beside it, and sees what is gone at its next load, or with a commit
    within a minute; not while ranks load an older checkpoint: nothing holds it for them.

    --drop writes a checkpoint again without a part of its state, and puts it in place of the other: readers have one
    of the two. It cannot be undone. Pinned ones stay whole.

    Exit code 1 if something could not be looked at or removed.
    """
    _check(keys, keep_whole)
    settings, _ = load_config({"keep_last": keep_last, "keep_every": keep_every})
    kept = _Kept(settings.keep_last, settings.keep_every, [(order_of(text), count) for text, count in keep_best])
    found: list[Pruned] = []
    reduced: list[Reduced] = []
    problems: list[str] = []
    with common.store_errors():
        jobs = [_Job(open_store(key.store, integrity), key.job) for key in jobs_at(absolute(path))]
        _check_keys(jobs, kept)
        gone = [(job, job.superfluous(kept)) for job in jobs]  # of all jobs, before anything is removed
        for job, saves in gone:
            found += [job.pruned(save, dry_run=dry_run) for save in saves]
            for save in job.older(saves, keep_whole or settings.keep_last) if keys else ():
                reduced += job.reduced(save, keys, dry_run=dry_run)
            problems += job.problems + ([] if dry_run else job.swept())
    notes = [note for job in jobs for note in job.notes]
    ok = all(one.removed or dry_run for one in found) and not any(one.why for one in reduced) and not problems
    if as_json:
        common.print_json(Output(ok=ok, checkpoints=found, reduced=reduced, problems=problems, notes=notes))
    else:
        _tell(found, reduced, problems, notes, dry_run=dry_run)
    return int(not ok)


def _check(keys: tuple[str, ...], keep_whole: int | None) -> None:
    """Raises UsageError."""
    if keep_whole is not None and not keys:
        raise UsageError("--keep-whole says what --drop leaves alone", hint="add --drop optimizer")
    check_dropped(dict.fromkeys(keys))


def _check_keys(jobs: list["_Job"], kept: "_Kept") -> None:
    """Raises UsageError for a key that no checkpoint has: a misspelt one keeps nothing."""
    said = [one for job in jobs for one in job.said]
    for order, _ in kept.best if said else ():
        check_key(order.key, said, f"of job {jobs[0].name}" if len(jobs) == 1 else "here")


class _Kept(NamedTuple):
    """What stays of a job."""

    last: int
    every: int
    best: list[tuple[Order, int]]


class _Job:
    """A job's checkpoints on its store."""

    def __init__(self, store: Store, job: str) -> None:
        self._store, self.name = store, job
        there = store.scan(job)
        self.problems, self.notes = there.problems, list[str]()
        self._of = {entry.committed.save: entry.committed for entry in there.committed}

    @property
    def said(self) -> list[Said]:
        """The metadata of each."""
        return [one.metadata for one in self._of.values()]

    def superfluous(self, kept: _Kept) -> list[SaveId]:
        """Those that nothing keeps."""
        pins = self._pins()
        stay = {save for save in self._of if save.dirname in pins}
        for order, count in kept.best if self._of else ():
            if not any(order.key in one for one in self.said):
                what = f"job {self.name} has no checkpoint with metadata {order.key!r}"
                self.notes.append(f"{what}: of it --keep-last and --keep-every alone decide")
            stay.update(best(sorted(self._of, reverse=True), lambda save: self._of[save].metadata, order, count))
        return superfluous(self._of, keep_last=kept.last, keep_every=kept.every, pinned=stay)

    def pruned(self, save: SaveId, *, dry_run: bool) -> Pruned:
        """Removes it, unless that is only tried."""
        why = "" if dry_run else self._removed(save)
        path, nbytes = self._store.where(self.name, save), self._of[save].nbytes
        return Pruned(step=save.step, path=path, nbytes=nbytes, removed=not dry_run and not why, why=why)

    def older(self, gone: list[SaveId], whole: int) -> list[SaveId]:
        """Of those that stay, newest first, what is not among the newest and not pinned."""
        pins = self._pins()
        stay = [save for save in sorted(self._of, key=lambda save: save.listed, reverse=True) if save not in gone]
        return [save for save in stay[whole:] if save.dirname not in pins]

    def reduced(self, save: SaveId, keys: tuple[str, ...], *, dry_run: bool) -> list[Reduced]:
        """Drops the keys from it, unless that is only tried; none where it has nothing below them."""
        wanted = [key for key in dict.fromkeys(keys) if key not in self._of[save].dropped]
        path, part, why = self._store.where(self.name, save), None, ""
        if not wanted:
            return []
        try:
            whole = Whole(self._store, self.name, save)
            part = whole.part(wanted)
            if not part.keys:
                return []
            if not dry_run:
                left = whole.drop(part.keys, f"ckptd {__version__}")
                self.problems += [left] if left else []
        except (CkptdError, OSError) as error:
            why = str(error)
        there, nbytes = (part.keys, part.nbytes) if part is not None else (wanted, 0)
        done = not dry_run and not why
        return [Reduced(step=save.step, path=path, keys=there, nbytes=nbytes, dropped=done, why=why)]

    def _pins(self) -> frozenset[str]:
        try:
            return frozenset(pinned(self._store.files(self.name)))
        except OSError as error:
            raise CkptdError(str(error), hint="without the pins nothing is removed") from None

    def swept(self) -> list[str]:
        """What is left of removals that were interrupted."""
        return [f"{left} could not be removed" for left in self._store.sweep(self.name, all_of_it=False)]

    def _removed(self, save: SaveId) -> str:
        """Empty, or why it is still there."""
        try:
            return "" if self._store.remove(self.name, save) else _STAYS
        except (CkptdError, OSError) as error:
            return str(error)


def _tell(found: list[Pruned], reduced: list[Reduced], problems: list[str], notes: list[str], *, dry_run: bool) -> None:
    for note in notes:
        click.echo(f"{click.style('note:', dim=True)} {human.printable(note)}")
    for one in found:
        word, color = ("removed:", "green") if one.removed else ("would be removed:", "cyan")
        if one.why:
            word, color = "not removed:", "yellow"
        _say(word, color, f"{one.path} ({human.size(one.nbytes)})", one.why)
    for less in reduced:
        word, color = ("dropped:", "green") if less.dropped else ("would be dropped:", "cyan")
        if less.why:
            word, color = "not dropped:", "yellow"
        _say(word, color, f"{', '.join(less.keys)} of {less.path} ({human.size(less.nbytes)})", less.why)
    for problem in problems:
        click.echo(f"{click.style('problem:', 'red')} {human.printable(problem)}")
    if not found and not reduced:
        click.echo("nothing to remove")
    elif dry_run:
        total = sum(one.nbytes for one in found) + sum(less.nbytes for less in reduced)
        click.echo(f"{human.size(total)} in all; nothing was removed")


def _say(word: str, color: str, what: str, why: str) -> None:
    reason = f": {human.printable(why)}" if why else ""
    click.echo(f"{click.style(word, color)} {human.printable(what)}{reason}")
