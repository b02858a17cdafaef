"""Unfinished checkpoints committed from their votes, as any daemon of the job would: ``ckptd commit``. Blocks."""

import os

import msgspec

from ckptd.shared.base.errors import CkptdError, UsageError
from ckptd.shared.base.ids import JobKey, SaveId
from ckptd.shared.format.committed import RECORDS, Opened, open_committed
from ckptd.shared.format.integrity import XXH3, Integrity
from ckptd.shared.stores.kinds import open_files
from ckptd.store.facts import PartialEntry
from ckptd.store.interface import Store
from ckptd.store.opening import open_store
from ckptd.store.votes import check_files, read_votes


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome for one unfinished directory. path: its present path."""

    step: int
    incarnation: int
    path: str
    committed: bool
    superseded: bool = False  # a newer one is committed: the next daemon removes it
    why: str = ""  # it is not committed; or a note


def finish(key: JobKey, writer: str, only: SaveId | None = None, integrity: Integrity = XXH3) -> list[Finished]:
    """Commits what the votes suffice for and no newer checkpoint has overtaken, oldest first. only: of all, this one.

    Harmless beside a daemon that does the same. Raises nothing: the answers carry the errors.
    """
    store = open_store(key.store, integrity)
    found = store.scan(key.job)
    newest = max((entry.committed.save for entry in found.committed), default=None)
    partials = [entry for entry in reversed(found.partials) if only in (None, entry.save)]
    return [_finish(store, key.job, entry, writer, newest) for entry in partials]


def _finish(store: Store, job: str, entry: PartialEntry, writer: str, newest: SaveId | None) -> Finished:
    save = entry.save

    def said(*, why: str = "", committed: bool = False, superseded: bool = False) -> Finished:
        path = store.where(job, save, unfinished=not committed)
        return Finished(
            step=save.step, incarnation=save.incarnation, path=path, committed=committed, superseded=superseded,
            why=why.removeprefix(f"{path}: "),
        )  # fmt: skip

    if newest is not None and save <= newest:
        return said(why=f"{newest} is committed and newer; the next daemon of the job removes this", superseded=True)
    if not entry.finishable:
        return said(why=entry.missing)
    try:
        note = store.commit(job, save, writer).note
    except (CkptdError, OSError) as error:
        if save not in (left.save for left in store.scan(job).partials):
            return said(why=f"it went away meanwhile, by another committer or by a removal: {error}")
        return said(why=str(error))
    return said(why=note, committed=True)


def finish_again(path: str, writer: str, integrity: Integrity = XXH3) -> Finished:
    """Commits a checkpoint that has its final name and whose COMMITTED, or manifest, is missing or damaged.

    From its votes, as the first time. Its files are looked at first: a directory that cannot be committed keeps its
    name, as an unfinished one a daemon may remove. Raises UsageError, DamagedError or OSError.
    """
    head, base = os.path.split(path)
    key = JobKey(*os.path.split(head))
    files = open_files(path, integrity)
    if not list(open_committed(Opened(files), RECORDS)):
        raise UsageError(f"{path} has its final name already, and is committed", hint=f"ckptd verify {path}")
    votes = [voted.vote for voted in read_votes(files, None, None)]
    saves = {(vote.job, vote.save) for vote in votes}
    save = next((save for _, save in saves), None)
    if save is None or saves != {(key.job, save)} or save.dirname != base:
        what = "its votes are missing" if save is None else f"its votes are not of {base} of job {key.job}"
        raise UsageError(f"{path} cannot be committed again: {what}", hint=f"ckptd verify {path}")
    check_files(files, votes)
    note = open_store(key.store, integrity).commit_again(key.job, save, writer).note
    return Finished(step=save.step, incarnation=save.incarnation, path=path, committed=True, why=note)
