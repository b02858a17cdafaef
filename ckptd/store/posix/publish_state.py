"""The files of a state's checkpoint in a trainer's directory, where torch.distributed.checkpoint reads them.

A rank has prepared a draft, a directory with a marker that names the save, and reports to its daemon for which place
that is. The draft states no more than that there is something to be done: without one, or with another save's, nothing
is. So a process that removes a draft has its place left alone, and two daemons may do the same, one after the other or
at once.
"""

import contextlib
import os

import msgspec

from ckptd.shared.base.decoding import MALFORMED
from ckptd.shared.base.errors import CkptdError, UsageError
from ckptd.shared.base.ids import JobKey, SaveId
from ckptd.shared.format.committed import file_findings, open_records, raise_first
from ckptd.shared.format.manifest import STOCK_METADATA, STOCK_OBJECTS
from ckptd.shared.format.origin import MARKER, Origin
from ckptd.shared.protocol.publication import Draft, Publication
from ckptd.store.posix.links import remember_links
from ckptd.store.posix.scan import Place, committed_at, files_at, save_at
from ckptd.store.posix.trainer_directory import TrainerDirectory, sweep
from ckptd.system import failpoints
from ckptd.system.files import FileLayer, temp_name

_MAX_MARKER_NBYTES = 64 << 20
_origin_decoder = msgspec.json.Decoder(Origin)


def publish_state(fs: FileLayer, key: JobKey, save: SaveId, to: Publication) -> str:
    """The committed checkpoint at each place that has a draft. Empty, or what is not there, and why."""
    notes = []
    for draft in to.drafts:
        try:
            _publish(fs, key, save, draft)
        except (OSError, CkptdError) as error:
            hint = f" ({error.hint})" if isinstance(error, CkptdError) and error.hint else ""
            text = f"{draft.place} is not published: {getattr(error, 'message', error)}{hint}"
            notes.append(f"{text}; to give that place up: {_how_to_give_up(draft)}")
    return "; ".join(notes)


def _how_to_give_up(draft: Draft) -> str:
    """What to type: until then the daemon tries again, and retention keeps the checkpoint."""
    return f"rm {draft.path}/{MARKER}" if draft.path == draft.place else f"rm -r {draft.path}"


def _publish(fs: FileLayer, key: JobKey, save: SaveId, draft: Draft) -> None:
    above = fs.below(os.path.dirname(draft.place))
    if not _is_drafted(above, key, save, draft) or save_at(fs, key, save.dirname) not in {None, save}:
        return
    if committed_at(fs, Place(key, save)) is None:  # raises for one that cannot be read
        return
    if draft.path == draft.place:
        _fill(fs, key, save, draft.place)
        return
    if not _is_outrun(above, save, draft):
        try:
            _appear(fs, key, save, draft)
        except OSError:
            if _is_drafted(above, key, save, draft):
                raise
            sweep(above, os.path.dirname(draft.place), {os.path.basename(draft.place)})  # it is done, or not wanted
            return
    failpoints.reach("publish.done")
    aside = temp_name(draft.place)
    with contextlib.suppress(FileNotFoundError):
        above.rename(draft.path, aside)  # at once: a draft with some of its files would be published as it is
        above.rmtree(aside)


def _appear(fs: FileLayer, key: JobKey, save: SaveId, draft: Draft) -> None:
    """At once, in place of whatever lies there: as the trainer's own saver would have had it."""
    there = _directory(fs, key, save, draft.place, _sources(fs, key, save))
    there.appear(Origin.of(key, save), draft.path)


def _fill(fs: FileLayer, key: JobKey, save: SaveId, place: str) -> None:
    """The directory gets the files beside its own; `.metadata`, without which no reader opens it, last."""
    if STOCK_METADATA in fs.below(place).listdir(place):
        return  # it was filled; or something else was saved there
    sources = _sources(fs, key, save)
    listing = {STOCK_METADATA: sources.pop(STOCK_METADATA)}
    _directory(fs, key, save, place, sources).put_into()
    failpoints.reach("publish.before-pointer")
    _directory(fs, key, save, place, listing).put_into()


def _directory(fs: FileLayer, key: JobKey, save: SaveId, place: str, sources: dict[str, str]) -> TrainerDirectory:
    path = Place(key, save).final
    return TrainerDirectory(fs, place, sources, set(sources), lambda: remember_links(fs, path, place))


def _sources(fs: FileLayer, key: JobKey, save: SaveId) -> dict[str, str]:
    """The names of the checkpoint's files that DCP reads, and where they are; sizes held against the records."""
    path = Place(key, save).final
    files = files_at(fs, path)
    records = open_records(files, job=key.job, save=save)
    raise_first(file_findings(files, records))
    names = [extent.name for record in records for extent in record.extents()]
    names += [stock.name for stock in records.manifest.stock if stock.name in {STOCK_OBJECTS, STOCK_METADATA}]
    if STOCK_METADATA not in names:
        text = f"{path} has no {STOCK_METADATA}, without which torch.distributed.checkpoint does not read it"
        raise UsageError(text, hint=f"ckptd export {path} OUT")
    return {name: os.path.join(path, name) for name in names}


def _origin(fs: FileLayer, directory: str) -> Origin | None:
    try:
        origin = _read_origin(fs, directory)
    except (OSError, *MALFORMED):
        return None
    return origin if origin.is_sound else None


def _read_origin(fs: FileLayer, directory: str) -> Origin:
    return _origin_decoder.decode(fs.read_file(os.path.join(directory, MARKER), _MAX_MARKER_NBYTES))


def _is_drafted(above: FileLayer, key: JobKey, save: SaveId, draft: Draft) -> bool:
    """Whether there is a draft of this save. Raises OSError for one that cannot be read: it may be there."""
    try:
        origin = _read_origin(above, draft.path)
    except (FileNotFoundError, NotADirectoryError, *MALFORMED):
        return False
    return origin.is_sound and origin.is_of(key) and origin.save == save


def _is_outrun(above: FileLayer, save: SaveId, draft: Draft) -> bool:
    """Whether something newer lies at the place. What is not known to be older or newer goes by the clock."""
    there = _origin(above, draft.place)
    if there is not None and (there.save <= save or there.save > save):
        return there.save > save
    with contextlib.suppress(OSError):
        return above.mtime(draft.place) > above.mtime(draft.path)
    return False
