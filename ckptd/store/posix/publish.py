"""A trainer's files of a committed checkpoint, under the names by which the trainer looks for them.

Where to is the caller's to say, as an Intent: the daemon has it from a rank of its own node, `ckptd publish` from the
command line. The store says what there is (`files.json`: the trainer's names), and that it still is to be published
(`UNPUBLISHED`, which goes last); it never says where. Each step may be repeated, and done by two daemons at once.
Whichever daemon comes late, an older checkpoint never takes the place of a newer one.

A directory's name does not distinguish two runs of one incarnation number. So what is published is a Proved, and there
is one way to get one: to open the very save, its records, its index and its files' sizes held against each other.
"""

import contextlib
import os
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import NamedTuple

import msgspec

from ckptd.shared.base.errors import CkptdError, DamagedError, UsageError
from ckptd.shared.base.ids import JobKey, SaveId, parse_dirname, parse_save
from ckptd.shared.format.committed import (
    Finding,
    file_findings,
    open_records,
    raise_first,
    read_stock_of,
)
from ckptd.shared.format.manifest import STOCK_FILES, UNPUBLISHED
from ckptd.shared.format.origin import Origin
from ckptd.shared.protocol.publication import Intents, Publication
from ckptd.store.posix.links import remember_links
from ckptd.store.posix.publish_state import publish_state
from ckptd.store.posix.scan import Place, committed_at, files_at, job_dir, save_at
from ckptd.store.posix.trainer_directory import TrainerDirectory, again_when_swept, make_directories, sweep
from ckptd.store.trainer_files import TrainerFiles, decode_index, how_to_publish, read_index, sources_of
from ckptd.system import failpoints
from ckptd.system.files import FileLayer


def mark_unpublished(fs: FileLayer, path: str) -> None:
    """To be called before the directory at path gets its final name, and synced by the caller."""
    with contextlib.suppress(DamagedError):
        if read_index(files_at(fs, path)).saved_for is None:
            return
    with contextlib.suppress(FileExistsError):
        fs.create_exclusive(os.path.join(path, UNPUBLISHED))


def is_unpublished(fs: FileLayer, key: JobKey, dirname: str) -> bool:
    """Whether it says so itself. Raises OSError."""
    try:
        fs.size(os.path.join(job_dir(key), dirname, UNPUBLISHED))
    except FileNotFoundError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class Proved:
    """A committed checkpoint with its trainer's files, as its records prove them: what may be published.

    The bytes of the files were not read: their digests are for loads through ckptd.
    """

    key: JobKey
    save: SaveId
    index: TrainerFiles

    @property
    def path(self) -> str:
        """Its directory."""
        return Place(self.key, self.save).final


def prove(
    fs: FileLayer, key: JobKey, dirname: str, *, save: SaveId | None = None, names: Collection[str] | None = None
) -> Proved:
    """Opens it. save: which it must be; None where somebody has typed the path. names: the files that are wanted.

    COMMITTED and manifest prove each other and the save, the manifest proves the index, and what it says of the size
    of each file that is wanted is so. Raises UsageError when it has no trainer's files, OSError, DamagedError.
    """
    path = os.path.join(job_dir(key), dirname)
    files = files_at(fs, path)
    records = open_records(files, job=key.job, save=save)
    manifest = records.manifest
    stock = next((file for file in manifest.stock if file.name == STOCK_FILES), None)
    if stock is None:
        raise UsageError(f"{path} has no files of a trainer", hint=f"ckptd export {path} OUT")
    raw = read_stock_of(files, stock, manifest, records)
    if isinstance(raw, Finding):
        raise raw.error from raw.cause
    index = decode_index(raw, os.path.join(path, STOCK_FILES))
    named = {file for name, file in index.files.items() if names is None or name in names}
    wanted = [record for record in records if any(extent.name in named for extent in record.extents())]
    raise_first(file_findings(files, wanted))
    return Proved(key, manifest.save, index)


def _prove_for(fs: FileLayer, key: JobKey, save: SaveId, to: Publication) -> Proved:
    return prove(fs, key, save.dirname, save=save, names=None if to.whole else to.names)


def publish(fs: FileLayer, key: JobKey, save: SaveId, intents: Intents) -> str:
    """The committed checkpoint's files where this user wants them. Empty, or why they are not there.

    intents: of this save and of newer ones. Nothing is to be done when the checkpoint is published, or not there.
    """
    path = Place(key, save).final
    if save in intents and intents[save].drafts:
        return publish_state(fs, key, save, intents[save])
    try:
        if not is_unpublished(fs, key, save.dirname):
            return ""
        if save not in intents:
            return _unknown(path)
        problem = _publish_in_turn(fs, _prove_for(fs, key, save, intents[save]), intents)
        if problem:
            return f"{path} was not published: {problem}"
        failpoints.reach("publish.done")
        _mark_published(fs, path)
    except (OSError, CkptdError) as error:
        return _failed(path, error)
    return ""


def _failed(path: str, error: OSError | CkptdError) -> str:
    hint = f" ({error.hint})" if isinstance(error, CkptdError) and error.hint else ""
    return f"{path} was not published: {error}{hint}"


def _unknown(path: str, why: str = "") -> str:
    return f"{path} was not published: nobody here knows any more where to{why}; {how_to_publish(path)}"


def _waiting(fs: FileLayer, key: JobKey, names: list[str]) -> tuple[set[str], list[str]]:
    """Those of the names that are of unpublished checkpoints, and what cannot be read."""
    waiting, problems = set(), []
    for name in names:
        try:
            if is_unpublished(fs, key, name):
                waiting.add(name)
        except NotADirectoryError:
            continue  # it is no checkpoint
        except OSError as error:
            problems.append(f"{job_dir(key)}/{name}: whether it is published cannot be read: {error}")
    return waiting, problems


def publish_left(fs: FileLayer, key: JobKey, intents: Intents) -> tuple[list[SaveId], list[str]]:
    """What an earlier daemon did not get to, oldest first: what is where it belongs now, and what went wrong.

    Checkpoints without a known place are reported.
    """
    done = []
    named = {save.dirname for save in intents}
    names = sorted(filter(parse_dirname, _names(fs, job_dir(key))))
    waiting, notes = _waiting(fs, key, names)
    there = {name: save_at(fs, key, name) for name in names if name in waiting or name in named}
    for name, found in there.items():
        known = name in named if found is None else found in intents
        if name in waiting and not known:
            why = ": what is known here is for another run that had its number" if name in named else ""
            notes.append(_unknown(os.path.join(job_dir(key), name), why))
    for save in sorted(intents, key=lambda save: save.listed):
        # Another run's checkpoint of its name: this one is not there any more, and nothing is to be done.
        if save.dirname in there and there[save.dirname] in {None, save}:
            note = publish(fs, key, save, intents)
            if note:
                notes.append(note)
            else:
                done.append(save)
    return done, notes


def publish_own_part(fs: FileLayer, key: JobKey, save: SaveId, intents: Intents) -> str:
    """Of a checkpoint that another node committed: what that left, or else the files of this node's ranks.

    Each node puts its own beside somebody's files. Empty, or why they are not there.
    """
    path, to = Place(key, save).final, intents[save]
    try:
        if to.drafts or is_unpublished(fs, key, save.dirname):
            return publish(fs, key, save, intents)
        if to.whole:
            committed_at(fs, Place(key, save))  # raises when what is published there is another's
        else:
            alone = msgspec.structs.replace(to, pointer="", text="")
            problem = _publish_in_turn(fs, _prove_for(fs, key, save, alone), {**intents, save: alone})
            return f"{path} was not published: {problem}" if problem else ""
    except (OSError, CkptdError) as error:
        return _failed(path, error)
    return ""


def publish_to(fs: FileLayer, key: JobKey, dirname: str, to: Publication) -> list[str]:
    """Where somebody has typed it: a new directory, or one that was published. The trainer's names of the files.

    Raises UsageError when other files lie there, or there are none to be published, OSError, DamagedError.
    """
    found = prove(fs, key, dirname)
    there = TrainerDirectory(fs, to.directory, {}, set(), lambda: None)
    if _is_there(fs, to.directory) and not there.is_ours():
        raise UsageError(f"{to.directory} is there already, with files of somebody's", hint="name a new directory")
    _publish(fs, found, to)
    _mark_published(fs, found.path)
    return sorted(found.index.files)


def _is_there(fs: FileLayer, path: str) -> bool:
    try:
        return os.path.basename(path) in fs.below(None).listdir(os.path.dirname(path))
    except FileNotFoundError:
        return False


def _mark_published(fs: FileLayer, path: str) -> None:
    with contextlib.suppress(FileNotFoundError):  # another committer did the same
        fs.unlink(os.path.join(path, UNPUBLISHED))
    fs.fsync_dir(path)


def _names(fs: FileLayer, path: str) -> list[str]:
    try:
        return fs.listdir(path)
    except FileNotFoundError:
        return []


class _Other(NamedTuple):
    """Another checkpoint of the job, by its own word."""

    save: SaveId
    said: TrainerFiles
    published: bool


def _publish_in_turn(fs: FileLayer, found: Proved, intents: Intents) -> str:
    """But for what a newer checkpoint has published; what one may have published meanwhile is put back.

    What the store says of others can keep something from being written, and nothing else: what is put back is known
    from an intent, and proved. Empty, or what somebody must put back or decide by hand.
    """
    index, to = found.index, intents[found.save]
    others = _not_older(fs, found)
    for other in others:
        if other.published and found.save < other.save:
            index, to = _without(index, to, other)
    rival = next((other for other in others if _is_rival(found, index, to, other)), None)
    if rival is not None:
        return _undecided(found, rival)
    _publish(fs, replace(found, index=index), to)
    for other in _not_older(fs, found):
        if _without(index, to, other) == (index, to):
            continue
        path = Place(found.key, other.save).final
        if _is_rival(found, index, to, other):
            return f"{_undecided(found, other)}; files of {path} may have given way"
        if other.save not in intents:
            return f"newer files, of {path}, may have given way; {how_to_publish(path)}"
        _publish(fs, _prove_for(fs, found.key, other.save, intents[other.save]), intents[other.save])
    return ""


def _is_rival(found: Proved, index: TrainerFiles, to: Publication, other: _Other) -> bool:
    """Whether both want one place, and nobody can say which of them is newer: two runs had one number.

    Counters of two runs say nothing of that, and their ids are random. The one that happens to be there may be the
    newer, so it is not replaced; neither is put there while both are committed: it would depend on which comes first. A
    person says which it is to be.
    """
    return not found.save < other.save and _without(index, to, other) != (index, to)


def _undecided(found: Proved, other: _Other) -> str:
    path = Place(found.key, other.save).final
    return (
        f"{path} wants the same place and is of another run of incarnation {other.save.incarnation}: which of both is "
        f"newer cannot be known; for this one {how_to_publish(found.path)}"
    )


def _not_older(fs: FileLayer, found: Proved) -> list[_Other]:
    """The job's other checkpoints that have trainer's files, but for those that are older, by their own word.

    Newer ones, and those of another run that had the incarnation number.
    """
    others = []
    for name in filter(parse_dirname, _names(fs, job_dir(found.key))):
        with contextlib.suppress(OSError, DamagedError):  # of states, or being removed
            index = read_index(files_at(fs, os.path.join(job_dir(found.key), name)))
            save = parse_save(index.save_id)
            if save is not None and save.dirname == name and not save <= found.save:
                others.append(_Other(save, index, not is_unpublished(fs, found.key, name)))
    return sorted(others, key=lambda other: other.save.listed)


def _without(index: TrainerFiles, to: Publication, other: _Other) -> tuple[TrainerFiles, Publication]:
    """What is left to be published when the other checkpoint's files are in their places."""
    theirs = other.said.saved_for
    if theirs is None:
        return index, to
    files = index.files
    if to.directory == theirs.directory:
        alone = to.whole or theirs.whole
        files = {} if alone else {name: file for name, file in files.items() if name not in other.said.files}
    if to.pointer == theirs.pointer:
        to = msgspec.structs.replace(to, pointer="", text="")
    return msgspec.structs.replace(index, files=files), to


def _publish(fs: FileLayer, found: Proved, to: Publication) -> None:
    if found.index.files:
        sources = sources_of(found.path, found.index)
        there = TrainerDirectory(
            fs, to.directory, sources, set(to.names), lambda: remember_links(fs, found.path, to.directory)
        )
        if to.whole:
            there.appear(Origin.of(found.key, found.save))
        else:
            there.put_into()
    failpoints.reach("publish.before-pointer")
    if to.pointer:
        head = os.path.dirname(to.pointer)
        make_directories(fs, head)
        above = fs.below(head)
        again_when_swept(lambda: above.rename(above.write_temp(to.pointer, to.text.encode()), to.pointer))
        above.fsync_dir(head)
        sweep(above, head, {os.path.basename(to.pointer)})
