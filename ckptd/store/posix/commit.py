"""The sequences that change a job's directory on the store, each in the order that makes a crash at any step harmless.

Each is safe to repeat and harmless when two processes, on one node or two, run it at once. All block for as long as the
file system does and raise OSError or CkptdError.
"""

import functools
import os
from collections.abc import Callable, Mapping
from types import MappingProxyType

import msgspec

from ckptd.shared.base.errors import CkptdError, DamagedError
from ckptd.shared.base.ids import JobKey, SaveId, parse_dirname
from ckptd.shared.format.committed import RECORDS, identify, open_sound
from ckptd.shared.format.committed_record import Committed, encode_committed, make_committed
from ckptd.shared.format.integrity import Purpose
from ckptd.shared.format.manifest import (
    COMMITTED,
    LATEST,
    MAX_RECORD_NBYTES,
    STOCK_FILES,
    STOCK_METADATA,
    STOCK_OBJECTS,
    IndexFile,
    StockFile,
    StockName,
    Vote,
    encode_record,
    make_manifest,
    vote_file,
)
from ckptd.shared.format.root_names import is_index, is_manifest
from ckptd.shared.format.set_places import SETS_DIR
from ckptd.shared.format.together import Alive, silent, together
from ckptd.shared.protocol.publication import Intents
from ckptd.store.facts import CommitOutcome, Committer
from ckptd.store.numbers import check_counted, forget_superseded, mark_superseded, taken_over_by
from ckptd.store.posix.publish import mark_unpublished, publish
from ckptd.store.posix.records import PosixRecords
from ckptd.store.posix.scan import Place, committed_at, files_at
from ckptd.store.record_index import index_of
from ckptd.store.stock_files import stock_files
from ckptd.store.votes import check_files, read_votes
from ckptd.system import failpoints
from ckptd.system.files import FileLayer, is_temp


def write_vote(fs: FileLayer, key: JobKey, vote: Vote) -> None:
    """The node's word, durable, and the name of its parity: call it when its files are synced.

    A vote that says something else has another name, so none that a commit may have read is ever replaced.
    """
    put_vote(fs, Place(key, vote.save), vote)


def put_vote(fs: FileLayer, place: Place, vote: Vote) -> None:
    """As write_vote, in the hidden directory of the place."""
    name, data = vote_file(vote, fs.integrity)
    path, synced = os.path.join(place.partial, name), _reaching("commit.vote-unsynced")
    try:
        temp = fs.write_temp(path, data, before_sync=synced)
    except FileNotFoundError:  # its set is a new one; or the save was removed: then this is not there either
        fs.mkdir(os.path.dirname(place.set_dir(vote.folder)))
        fs.mkdir(place.set_dir(vote.folder))
        temp = fs.write_temp(path, data, before_sync=synced)
    fs.rename(temp, path)
    for folder in {vote.folder, vote.parity.folder if vote.parity else vote.folder}:
        fs.fsync_dir(place.set_dir(folder))


def _reaching(point: str) -> Callable[[], None]:
    return functools.partial(failpoints.reach, point)


def commit(  # noqa: PLR0913, PLR0917 - whose checkpoint, by whom, and what follows
    fs: FileLayer,
    key: JobKey,
    save: SaveId,
    writer: str,
    by: Committer | None = None,
    intents: Intents = MappingProxyType({}),
    *,
    alive: Alive = silent,
    hidden: str = "",
) -> CommitOutcome:
    """The checkpoint under its final name, durable, made from the votes on the disk alone.

    by: the session that commits. Whether another one has taken the job over is looked up once the rename is on the
    disk, so that a start that does not see this checkpoint is seen here. None: the user's own commit, not fenced.

    Returns at once when it is committed already, by whomever. Raises DamagedError, naming the file, when a vote is
    damaged or missing, a file is absent or has another size, or another save has the final name. writer: program and
    version. intents: where this user wants a trainer's files, of this save and of newer ones. alive: as in Store.
    hidden: the directory with the votes, where it is not that of a save that nodes drain.
    """
    place, records = Place(key, save, hidden), PosixRecords(fs, key)
    if by is not None:
        check_counted(records, save)
    committed = committed_at(fs, place)
    if committed is None:
        try:
            made = write_records(fs, place, writer, alive)
            failpoints.reach("commit.before-rename")
            fs.rename(place.partial, place.final)
            committed = committed_at(fs, place) or made  # of two committers one has selected its manifest
        except (OSError, DamagedError):
            # Another committer may have renamed the directory under us. Then all we wanted is at the target.
            committed = committed_at(fs, place)
            if committed is None:
                raise
    failpoints.reach("commit.after-rename")
    fs.fsync_dir(place.job_dir)
    # The process that made the job's directory may have died before it synced the directory above.
    fs.fsync_dir(key.store)
    failpoints.reach("commit.after-parent-sync")
    taken_over = taken_over_by(records, save, by) if by is not None else 0
    if taken_over:
        note = mark_superseded(records, save.dirname, taken_over)
        return CommitOutcome(committed, note, taken_over, published=False)
    if by is not None:
        forget_superseded(records, save.dirname)  # of a committer that knew less of the sessions that are over
    note = set_latest(fs, place)
    failpoints.reach("commit.after-latest")
    unpublished = publish(fs, key, save, intents)
    notes = [note, unpublished, _tidy(fs, place)]  # each whatever became of the others
    return CommitOutcome(committed, "; ".join(filter(None, notes)), published=not unpublished)


def write_records(fs: FileLayer, place: Place, writer: str, alive: Alive = silent) -> Committed:
    """All that an unfinished checkpoint needs but its name, from its votes, on the medium. Raises as commit does."""
    unfinished = files_at(fs, place.partial)
    votes = read_votes(unfinished, place.key.job, place.save, alive)
    manifest = make_manifest(votes, save=place.save, writer=writer, integrity=fs.integrity)
    voted = [found.vote for found in votes]
    check_files(unfinished, voted, alive)
    failpoints.reach("commit.before-manifest")
    files, left_out = stock_files(voted, place.save, alive)
    manifest = msgspec.structs.replace(
        manifest, stock=_publish_stock(fs, place, files), left_out=left_out, index=_write_index(fs, place, voted, alive)
    )
    raw = encode_record(manifest, fs.integrity)
    committed = make_committed(manifest, raw, fs.integrity)
    path = os.path.join(place.partial, committed.manifest)
    fs.rename(fs.write_temp(path, raw, before_sync=_reaching("commit.manifest-unsynced")), path)
    if any(file.name == STOCK_FILES for file in manifest.stock):
        mark_unpublished(fs, place.partial)
    # All names, of the images too, before COMMITTED selects them: another committer may rename it right away.
    fs.fsync_dir(os.path.join(place.partial, SETS_DIR))
    fs.fsync_dir(place.partial)
    failpoints.reach("commit.before-committed")
    path = os.path.join(place.partial, COMMITTED)
    temp = fs.write_temp(path, encode_committed(committed), before_sync=_reaching("commit.committed-unsynced"))
    fs.rename(temp, path)
    fs.fsync_dir(place.partial)
    return committed


def _write_index(fs: FileLayer, place: Place, votes: list[Vote], alive: Alive) -> IndexFile | None:
    """What readers of parts of few images need of the records, synced but for its name, which has its digest."""
    data = index_of(votes, alive)
    if data is None:
        return None
    index = IndexFile(len(data), fs.integrity.digest(data, Purpose.INDEX))
    path = os.path.join(place.partial, index.name)
    fs.rename(fs.write_temp(path, data, before_sync=_reaching("commit.index-unsynced")), path)
    failpoints.reach("commit.index-named")
    return index


def _publish_stock(fs: FileLayer, place: Place, files: Mapping[StockName, bytes]) -> list[StockFile]:
    """What lies there for stock readers from now on, synced but for the names.

    Before the manifest, which pins their digests. The first one stays, whichever manifest COMMITTED selects: two
    committers of different versions may write different bytes. But with a key, bytes that this commit would not write
    are replaced: what anybody may have put there must not be proved by it.
    """
    found = []
    for name, data in files.items():
        path = os.path.join(place.partial, name)
        ours = fs.publish(fs.write_temp(path, data), path)
        there = data if ours or fs.integrity.keyed else fs.read_file(path, MAX_RECORD_NBYTES)
        if fs.integrity.keyed and not ours:
            fs.rename(fs.write_temp(path, data), path)
        found.append(StockFile(name, len(there), fs.integrity.digest(there, Purpose.STOCK)))
    return found


def set_latest(fs: FileLayer, place: Place) -> str:
    """Empty, or why `latest` could not be set. Never moves it to an older checkpoint."""
    path = os.path.join(place.job_dir, LATEST)
    try:
        current = _latest_save(fs, place.job_dir)
        if current is None or current < place.save:
            fs.replace_symlink(place.save.dirname, path)
    except OSError as error:
        return f"{path} was not set: {error}"
    return ""


def _latest_save(fs: FileLayer, path: str) -> SaveId | None:
    try:
        target = fs.readlink(os.path.join(path, LATEST))
        return identify(files_at(fs, os.path.join(path, target))).save if parse_dirname(target) else None
    except (OSError, CkptdError):
        return None


def _tidy(fs: FileLayer, place: Place) -> str:
    """Empty, or why files of crashed writers, or of another committer, stayed. Only under the final name.

    Nobody writes there.
    """
    path = place.final

    def tidy(directory: str) -> None:
        names = fs.listdir(directory)
        for name in [*filter(is_temp, names), *(_not_selected(fs, place, names) if directory == path else ())]:
            fs.unlink(os.path.join(directory, name))

    try:
        sets = os.path.join(path, SETS_DIR)
        together(tidy, [path, *(os.path.join(sets, name) for name in fs.listdir(sets))])
    except FileNotFoundError:
        return ""  # the other committer tidies too
    except (OSError, DamagedError) as error:
        return f"{path} was not tidied: {error}"
    return ""


def _not_selected(fs: FileLayer, place: Place, names: list[str]) -> list[str]:
    """What two committers with different votes have left: manifests but for that of COMMITTED, and what these pin."""
    manifests, indexes = list(filter(is_manifest, names)), list(filter(is_index, names))
    if max(len(manifests), len(indexes)) < 2:  # noqa: PLR2004 - as a rule there is one
        return []
    manifest = open_sound(files_at(fs, place.final), RECORDS, save=place.save)
    selected = identify(files_at(fs, place.final), save=place.save).manifest
    pinned = {selected, manifest.index and manifest.index.name, *(file.name for file in manifest.stock)}
    return [
        name for name in names if name in {*manifests, *indexes, STOCK_METADATA, STOCK_OBJECTS, STOCK_FILES} - pinned
    ]
