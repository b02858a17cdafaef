"""Unfinished checkpoints committed from their votes, as any daemon of the job would: ``ckptd commit``. Blocks."""

import os

import msgspec

from ckptd.shared.base.errors import CkptdError
from ckptd.shared.base.ids import JobKey, SaveId
from ckptd.shared.format.integrity import XXH3, Integrity
from ckptd.store.commit import commit
from ckptd.store.files import FileLayer
from ckptd.store.scan import PartialEntry, Place, scan


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one unfinished directory. path: where it lies now."""

    step: int
    incarnation: int
    path: str
    committed: bool
    superseded: bool = False  # a newer one is committed: the next daemon removes it
    why: str = ""  # it is not committed; or a note


def finish(key: JobKey, writer: str, only: SaveId | None = None, integrity: Integrity = XXH3) -> list[Finished]:
    """Commits what the votes suffice for and no newer checkpoint has overtaken, oldest first. only: of all, this one.

    Harmless beside a daemon that does the same. Raises nothing: what went wrong stands in the answers.
    """
    fs = FileLayer(key.store, integrity)
    found = scan(fs, key)
    newest = max((entry.committed.save for entry in found.committed), default=None)
    partials = [entry for entry in reversed(found.partials) if only in (None, entry.save)]
    return [_finish(fs, key, entry, writer, newest) for entry in partials]


def _finish(fs: FileLayer, key: JobKey, entry: PartialEntry, writer: str, newest: SaveId | None) -> Finished:
    save, place = entry.save, Place(key, entry.save)

    def said(*, why: str = "", committed: bool = False, superseded: bool = False) -> Finished:
        path = place.final if committed else place.partial
        return Finished(
            step=save.step, incarnation=save.incarnation, path=path, committed=committed, superseded=superseded,
            why=why.removeprefix(f"{path}: "),
        )  # fmt: skip

    if newest is not None and save <= newest:
        return said(why=f"{newest} is committed and newer; the next daemon of the job removes this", superseded=True)
    if not entry.finishable:
        return said(why=entry.missing)
    try:
        note = commit(fs, key, save, writer).note
    except (CkptdError, OSError) as error:
        if not os.path.isdir(place.partial):
            return said(why=f"it went away meanwhile, by another committer or by a removal: {error}")
        return said(why=str(error))
    return said(why=note, committed=True)
