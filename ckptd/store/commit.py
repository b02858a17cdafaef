"""The sequences that change a job's directory on the store, each in the order that makes a crash at any step harmless.

Each is safe to repeat and harmless when two processes, on one node or two, run it at once. All block for as long as the
file system does and raise OSError or CkptdError.
"""

import contextlib
import functools
import os
import secrets
from collections.abc import Callable, Mapping
from types import MappingProxyType

import msgspec

from ckptd.shared.base.errors import CkptdError, DamagedError
from ckptd.shared.base.ids import Incarnation, JobKey, SaveId, parse_dirname
from ckptd.shared.format.committed import TRASH_PREFIX, file_findings, identify, parity_findings, raise_first
from ckptd.shared.format.integrity import Purpose
from ckptd.shared.format.manifest import (
    COMMITTED,
    LATEST,
    MANIFEST,
    MAX_RECORD_NBYTES,
    PARITY_DIR,
    STOCK_FILES,
    VOTES_DIR,
    Committed,
    Manifest,
    StockFile,
    StockName,
    Vote,
    decode_manifest,
    encode_committed,
    encode_record,
    make_committed,
    make_manifest,
)
from ckptd.shared.protocol.publication import Intents
from ckptd.store.files import FileLayer, is_temp
from ckptd.store.identity import check_store
from ckptd.store.incarnations import Committer, check_counted, forget_superseded, mark_superseded, taken_over_by
from ckptd.store.links import is_linked_to
from ckptd.store.pins import pinned
from ckptd.store.publish import mark_unpublished, publish
from ckptd.store.scan import Place, committed_at, job_dir, read_vote, scan, vote_names
from ckptd.store.stock_files import stock_files
from ckptd.system import failpoints


class CommitOutcome(msgspec.Struct, frozen=True, tag="committed"):
    """The commit's record.

    note: what went wrong with a convenience (`latest`, tidying), if anything. taken_over: the incarnation of another
    session that took the job over before this commit was on the disk, so that it may not be told durable; 0: none.
    """

    committed: Committed
    note: str = ""
    taken_over: Incarnation = 0
    published: bool = True  # a trainer's files, or there is nothing to be published
    left_out: str = ""  # why plain dcp.load finds no `.metadata`, though it was asked for


# -- votes and commit --


def write_vote(fs: FileLayer, key: JobKey, vote: Vote) -> None:
    """The node's word, durable, that its files are: call it when they and their directory are synced."""
    place = Place(key, vote.save)
    path = os.path.join(place.votes, vote.node)
    fs.mkdir(place.votes)
    temp = fs.write_temp(path, encode_record(vote, fs.integrity), before_sync=_reaching("commit.vote-unsynced"))
    fs.rename(temp, path)
    fs.fsync_dir(place.votes)
    fs.fsync_dir(place.partial)


def _reaching(point: str) -> Callable[[], None]:
    return functools.partial(failpoints.reach, point)


def commit(  # noqa: PLR0913, PLR0917 - whose checkpoint, by whom, and what follows
    fs: FileLayer,
    key: JobKey,
    save: SaveId,
    writer: str,
    by: Committer | None = None,
    intents: Intents = MappingProxyType({}),
) -> CommitOutcome:
    """The checkpoint under its final name, durable, made from the votes on the disk alone.

    by: the session that commits. Whether another one has taken the job over is looked up once the rename is on the
    disk, so that a start that does not see this checkpoint is seen here. None: the user's own commit, not fenced.

    Returns at once when it is committed already, by whomever. Raises DamagedError, naming the file, when a vote is
    damaged or missing, a file is absent or has another size, or another save has the final name. writer: program and
    version. intents: where this user wants a trainer's files, of this save and of newer ones.
    """
    place = Place(key, save)
    if by is not None:
        check_store(fs, key.store, by.store_id)
        check_counted(fs, key, save)
    committed, left_out = committed_at(fs, place), ""
    if committed is None:
        try:
            committed, left_out = _write_and_rename(fs, place, writer)
        except (OSError, DamagedError):
            # Another committer may have renamed the directory under us. Then all we wanted is at the target.
            committed = committed_at(fs, place)
            if committed is None:
                raise
    failpoints.reach("commit.after-rename")
    fs.fsync_dir(place.job_dir)
    # Whoever made the job's directory may have died before it synced the directory above.
    fs.fsync_dir(key.store)
    failpoints.reach("commit.after-parent-sync")
    taken_over = taken_over_by(fs, key, save, by) if by is not None else 0
    if taken_over:
        note = mark_superseded(fs, key, save.dirname, taken_over)
        return CommitOutcome(committed, note, taken_over, published=False)
    if by is not None:
        forget_superseded(fs, key, save.dirname)  # of a committer that knew less of the sessions that are over
    note = _set_latest(fs, place)
    failpoints.reach("commit.after-latest")
    unpublished = publish(fs, key, save, intents)
    notes = [note, unpublished, _tidy(fs, place.final)]  # each whatever became of the others
    return CommitOutcome(committed, "; ".join(filter(None, notes)), published=not unpublished, left_out=left_out)


def _write_and_rename(fs: FileLayer, place: Place, writer: str) -> tuple[Committed, str]:
    """The commit's record, and why there is no `.metadata`, if it was asked for."""
    votes = [read_vote(fs, place, node) for node in vote_names(fs, place)]
    manifest = make_manifest(votes, save=place.save, writer=writer, integrity=fs.integrity)
    _check_files(fs, place, manifest)
    failpoints.reach("commit.before-manifest")
    files, left_out = stock_files([vote for vote, _ in votes], place.save)
    manifest = msgspec.structs.replace(manifest, stock=_publish_stock(fs, place, files))
    manifest, raw = _publish_manifest(fs, os.path.join(place.partial, MANIFEST), manifest)
    failpoints.reach("commit.before-committed")
    committed = make_committed(manifest, raw, fs.integrity)
    if any(file.name == STOCK_FILES for file in manifest.stock):
        mark_unpublished(fs, place.partial)
    path = os.path.join(place.partial, COMMITTED)
    temp = fs.write_temp(path, encode_committed(committed), before_sync=_reaching("commit.committed-unsynced"))
    fs.rename(temp, path)
    fs.fsync_dir(place.votes)
    fs.fsync_dir(place.partial)
    failpoints.reach("commit.before-rename")
    fs.rename(place.partial, place.final)
    return committed, left_out


def _check_files(fs: FileLayer, place: Place, manifest: Manifest) -> None:
    """Raises DamagedError unless all that was voted for is there, by what every reader will look at."""
    raise_first(file_findings(place.partial, fs, manifest.files))
    raise_first(parity_findings(place.partial, fs, manifest.parity))


def _publish_stock(fs: FileLayer, place: Place, files: Mapping[StockName, bytes]) -> list[StockFile]:
    """What lies there for stock readers from now on, synced but for the names.

    Before the manifest, which pins their digests. As of the manifest, the first one stays: two committers of different
    versions may write different bytes. But with a key, bytes that this commit would not write are replaced: what
    anybody may have put there must not be proved by it.
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


def _publish_manifest(fs: FileLayer, path: str, manifest: Manifest) -> tuple[Manifest, bytes]:
    """The manifest that is at path now, and its bytes.

    Two committers of different versions write different bytes, and so do two between whom one more vote came; the
    COMMITTED of one must not meet the manifest of the other. So the first manifest stays, unless it is damaged or a
    vote that it was made from is not there any more.
    """
    raw = encode_record(manifest, fs.integrity)
    temp = fs.write_temp(path, raw, before_sync=_reaching("commit.manifest-unsynced"))
    if fs.publish(temp, path):
        return manifest, raw
    there = fs.read_file(path, MAX_RECORD_NBYTES)
    with contextlib.suppress(DamagedError):
        found = decode_manifest(there, where=path, integrity=fs.integrity)
        theirs = msgspec.structs.replace(found, writer=manifest.writer, votes=manifest.votes, parity=manifest.parity)
        if theirs == manifest and set(found.votes) <= set(manifest.votes) and set(found.parity) <= set(manifest.parity):
            return found, there
    fs.rename(fs.write_temp(path, raw, before_sync=_reaching("commit.manifest-unsynced")), path)
    return manifest, raw


def _set_latest(fs: FileLayer, place: Place) -> str:
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
        return identify(os.path.join(path, target), fs).save if parse_dirname(target) else None
    except (OSError, CkptdError):
        return None


def _tidy(fs: FileLayer, path: str) -> str:
    """Empty, or why hidden files of crashed writers stayed. Only under the final name, where nobody writes."""
    try:
        folders = [name for name in (VOTES_DIR, PARITY_DIR) if name in fs.listdir(path)]
        for directory in (path, *(os.path.join(path, name) for name in folders)):
            for name in filter(is_temp, fs.listdir(directory)):
                fs.unlink(os.path.join(directory, name))
    except FileNotFoundError:
        return ""  # the other committer tidies too
    except OSError as error:
        return f"{path} was not tidied: {error}"
    return ""


# -- removal --


def remove_checkpoint(fs: FileLayer, key: JobKey, save: SaveId, intents: Intents = MappingProxyType({})) -> bool:
    """Whether the committed checkpoint is gone: not if it is pinned, or a trainer's directory has links to its files.

    Raises CkptdError for the newest, and for one whose files cannot be published: it stays. Raises DamagedError for
    what is no valid checkpoint, and when another run's has its name.
    """
    if save.dirname in pinned(fs, key):
        return False
    if committed_at(fs, Place(key, save)) is None:
        return True
    note = publish(fs, key, save, intents)  # what could not be at its commit
    if note:
        raise CkptdError(f"{note}: it stays until it is", hint="see what is in the way there")
    if is_linked_to(fs, key, save.dirname):
        return False
    entries = scan(fs, key).committed
    if save not in (entry.committed.save for entry in entries):
        if committed_at(fs, Place(key, save)) is None:
            return True
        raise DamagedError(
            f"{Place(key, save).final}: not a valid checkpoint", hint=f"see: ckptd verify {job_dir(key)}"
        )
    newest = entries[0].committed.save
    if save == newest:
        raise CkptdError(
            f"{Place(key, save).final}: is the newest committed checkpoint of job {key.job!r} and is not removed",
            hint="commit a newer one first",
        )
    # The newer one's rename must be on the disk before this one's: another node may have made it a moment ago.
    fs.fsync_dir(job_dir(key))
    note = _set_latest(fs, Place(key, newest))
    if note and _latest_name(fs, key) == save.dirname:
        raise CkptdError(f"{Place(key, save).final} stays: {note}", hint="free space on the store, or raise the quota")
    failpoints.reach("remove.before-rename")
    trash = _to_trash(fs, Place(key, save).final)
    if trash is not None and save.dirname in pinned(fs, key):  # somebody was told so since we looked
        fs.rename(trash, Place(key, save).final)
        return False
    forget_superseded(fs, key, save.dirname)
    _empty(fs, trash)
    return True


def _latest_name(fs: FileLayer, key: JobKey) -> str:
    try:
        return fs.readlink(os.path.join(job_dir(key), LATEST))
    except OSError:
        return ""


def remove_partial(fs: FileLayer, key: JobKey, save: SaveId) -> None:
    """The unfinished checkpoint removed, also under a late writer, who gets ENOENT. Never a committed one."""
    _empty(fs, _to_trash(fs, Place(key, save).partial))


def _to_trash(fs: FileLayer, path: str) -> str | None:
    """Where it lies now; None when there was nothing."""
    head, name = os.path.split(path)
    trash = os.path.join(head, f"{TRASH_PREFIX}{name.lstrip('.')}-{secrets.token_hex(6)}")
    try:
        fs.rename(path, trash)
    except FileNotFoundError:
        return None
    failpoints.reach("remove.after-rename")
    return trash


def _empty(fs: FileLayer, trash: str | None) -> None:
    """COMMITTED goes first, and is gone for good before anything else goes: what is half removed is no checkpoint."""
    if trash is None:
        return
    fs.fsync_dir(os.path.dirname(trash))  # else a crash could bring the old name back over half of the files
    if _is_link(fs, trash):
        fs.unlink(trash)  # and nothing of what it leads to
        return
    try:
        fs.unlink(os.path.join(trash, COMMITTED))
    except (FileNotFoundError, NotADirectoryError):
        pass  # of an unfinished one; or another process empties it too, and may not have synced that
    except IsADirectoryError:
        fs.rmtree(os.path.join(trash, COMMITTED))  # nobody takes that for one
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        fs.fsync_dir(trash)
    failpoints.reach("remove.after-committed")
    fs.rmtree(trash)


def _is_link(fs: FileLayer, path: str) -> bool:
    try:
        fs.readlink(path)
    except OSError:
        return False
    return True


def sweep_trash(fs: FileLayer, key: JobKey, *, links: bool = True) -> int:
    """Leftovers that earlier removals left in the job's directory removed; how many.

    links: and those of a crashed process, where nobody may be making one now.
    What cannot be removed (over NFS, a file that somebody reads) keeps nothing else, and is tried again the next time.
    """
    try:
        names = fs.listdir(job_dir(key))
    except FileNotFoundError:
        return 0
    swept = 0
    for name in names:
        with contextlib.suppress(OSError):
            if name.startswith(TRASH_PREFIX):
                _empty(fs, os.path.join(job_dir(key), name))  # the rename to the trash may still be unsynced
            elif links and is_temp(name, LATEST):
                fs.rmtree(os.path.join(job_dir(key), name))
            else:
                continue
            swept += 1
    return swept
