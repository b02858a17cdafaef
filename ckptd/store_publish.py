"""A trainer's files of a committed checkpoint, under the names by which the trainer looks for them.

Where to is the caller's to say, as an Intent: the daemon has it from a rank of its own node, `ckptd publish` from the
command line. The store says what there is (`files.json`: the trainer's names), and that it still is to be published
(`UNPUBLISHED`, which goes last); it never says where. Each step may be repeated, and done by two daemons at once.
Whoever comes late, an older checkpoint never takes the place of a newer one.
"""

import contextlib
import os
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from ckptd import failpoints
from ckptd.filelayer import FileLayer
from ckptd.protocol.committed import identify
from ckptd.protocol.decoding import MALFORMED
from ckptd.protocol.errors import DamagedError, UsageError
from ckptd.protocol.ids import JobKey, SaveId, StorePath, parse_dirname
from ckptd.protocol.layout import Layout, SavedFor, is_plain, is_trainer_file
from ckptd.protocol.manifest import LINKED, STOCK_FILES, UNPUBLISHED
from ckptd.protocol.origin import MARKER, Origin
from ckptd.protocol.publication import Intents, Publication
from ckptd.protocol.wording import cut
from ckptd.store_scan import job_dir
from ckptd.trainer_directory import TrainerDirectory, again_when_swept, make_directories, sweep

_MAX_INDEX_NBYTES = 1 << 30
_MAX_LINKED_NBYTES = 1 << 20
_MAX_LINKED = 64  # directories


class TrainerFiles(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Content of `files.json`: the trainer's names of the checkpoint's files. saved_for: to be compared, no more."""

    save_id: str
    files: dict[str, str]  # the trainer's name, and the file's in the checkpoint's directory
    saved_for: SavedFor | None = None


class Linked(msgspec.Struct, frozen=True):
    """Content of `LINKED`: directories that have symbolic links to the checkpoint's files. They are only read."""

    directories: list[StorePath]


_decoder = msgspec.json.Decoder(TrainerFiles)
_linked_decoder = msgspec.json.Decoder(Linked)


def index_of(layouts: Iterable[Layout], save_id: str) -> bytes | None:
    """`files.json` of a checkpoint, None when it has no trainer's files. Of two ranks' of one name the lower has it."""
    files: dict[str, str] = {}
    saved_for = None
    raw = False
    for layout in layouts:
        raw = raw or layout.raw
        saved_for = saved_for or layout.saved_for
        for name, extent in zip(layout.names, layout.extents()[1:], strict=False):
            files.setdefault(name, extent.name)
    if not raw:
        return None
    index = TrainerFiles(save_id=save_id, files=files, saved_for=saved_for)
    return msgspec.json.format(msgspec.json.encode(index)) + b"\n"


def mark_unpublished(fs: FileLayer, path: str) -> None:
    """To be called before the directory at path gets its final name, and synced by the caller."""
    with contextlib.suppress(DamagedError):
        if _read_index(fs, path).saved_for is None:
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


def publish(fs: FileLayer, key: JobKey, save: SaveId, intents: Intents) -> str:
    """The committed checkpoint's files where this user wants them. Empty, or why they are not there.

    intents: of this save and of newer ones. Nothing is to be done when the checkpoint is published, or not there.
    """
    path = os.path.join(job_dir(key), save.dirname)
    try:
        if not is_unpublished(fs, key, save.dirname):
            return ""
        if save not in intents:
            return _unknown(path)
        problem = _publish_in_turn(fs, key, save, intents)
        if problem:
            return f"{path} was not published: {problem}"
        failpoints.reach("publish.done")
        _mark_published(fs, path)
    except (OSError, DamagedError) as error:
        hint = f" ({error.hint})" if isinstance(error, DamagedError) and error.hint else ""
        return f"{path} was not published: {error}{hint}"
    return ""


def _unknown(path: str) -> str:
    return f"{path} was not published: nobody here knows any more where to; {how_to_publish(path)}"


def _waits(fs: FileLayer, key: JobKey, dirname: str) -> bool:
    try:
        return is_unpublished(fs, key, dirname)
    except OSError:  # what is wrong with it is the scan's to say
        return False


def how_to_publish(path: str) -> str:
    """What to type where a checkpoint's place is not known any more."""
    return f"type: ckptd publish {path} --to DIRECTORY"


def publish_left(fs: FileLayer, key: JobKey, intents: Intents) -> tuple[list[SaveId], list[str]]:
    """What an earlier daemon did not get to, oldest first: what is where it belongs now, and what went wrong.

    Checkpoints whose place nobody here knows are told of.
    """
    done, notes = [], []
    names = set(filter(parse_dirname, _names(fs, job_dir(key))))
    known = {save.dirname for save in intents}
    notes += [_unknown(os.path.join(job_dir(key), name)) for name in sorted(names - known) if _waits(fs, key, name)]
    for save in sorted(intents):
        if save.dirname in names:
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
    path, to = os.path.join(job_dir(key), save.dirname), intents[save]
    try:
        if is_unpublished(fs, key, save.dirname):
            return publish(fs, key, save, intents)
        if not to.whole:
            alone = msgspec.structs.replace(to, pointer="", text="")
            problem = _publish_in_turn(fs, key, save, {**intents, save: alone})
            return f"{path} was not published: {problem}" if problem else ""
    except (OSError, DamagedError) as error:
        return f"{path} was not published: {error}"
    return ""


def publish_to(fs: FileLayer, key: JobKey, dirname: str, to: Publication) -> list[str]:
    """Where somebody has typed it: a new directory, or one that was published. The trainer's names of the files.

    Raises UsageError when other files lie there, or there are none to be published, OSError, DamagedError.
    """
    path = os.path.join(job_dir(key), dirname)
    identify(path, fs, job=key.job)
    try:
        index = _read_index(fs, path)
    except FileNotFoundError as error:
        raise UsageError(f"{path} has no files of a trainer", hint=f"ckptd export {path} OUT") from error
    there = TrainerDirectory(fs, to.directory, {}, set(), lambda: None)
    if _is_there(fs, to.directory) and not there.is_ours():
        raise UsageError(f"{to.directory} is there already, with files of somebody's", hint="name a new directory")
    _publish(fs, key, dirname, index, to)
    _mark_published(fs, path)
    return sorted(index.files)


def _is_there(fs: FileLayer, path: str) -> bool:
    try:
        return os.path.basename(path) in fs.below(None).listdir(os.path.dirname(path))
    except FileNotFoundError:
        return False


def _mark_published(fs: FileLayer, path: str) -> None:
    with contextlib.suppress(FileNotFoundError):  # another committer did the same
        fs.unlink(os.path.join(path, UNPUBLISHED))
    fs.fsync_dir(path)


def is_linked_to(fs: FileLayer, key: JobKey, dirname: str) -> bool:
    """Whether a trainer finds the checkpoint's files by symbolic links, which without it would lead nowhere.

    Believes the checkpoint's own word of where they are: who forges it keeps that one checkpoint from being removed.
    """
    path = os.path.join(job_dir(key), dirname)
    try:
        found = _linked(fs, path)
        index = _read_index(fs, path)
    except (OSError, DamagedError):  # of states; or a hard link, as all others are then
        return False
    for directory in found:
        for name, source in _sources(path, index).items():
            with contextlib.suppress(OSError):  # the trainer has removed it
                if fs.below(None).readlink(os.path.join(directory, name)) == source:
                    return True
    return False


def _linked(fs: FileLayer, path: str) -> list[str]:
    where = os.path.join(path, LINKED)
    try:
        return _linked_decoder.decode(fs.read_file(where, _MAX_LINKED_NBYTES)).directories[:_MAX_LINKED]
    except FileNotFoundError:
        return []
    except MALFORMED as error:
        raise DamagedError(f"{where}: {cut(error)}") from error


def _remember_links(fs: FileLayer, path: str, directory: str) -> None:
    """Before the first one is made: a checkpoint that is removed takes what they lead to with it."""
    known = []
    with contextlib.suppress(DamagedError):
        known = _linked(fs, path)
    if directory not in known:
        raw = msgspec.json.encode(Linked([*known, directory][-_MAX_LINKED:]))
        fs.rename(fs.write_temp(os.path.join(path, LINKED), raw), os.path.join(path, LINKED))
        fs.fsync_dir(path)


def _names(fs: FileLayer, path: str) -> list[str]:
    try:
        return fs.listdir(path)
    except FileNotFoundError:
        return []


def _read_index(fs: FileLayer, path: str) -> TrainerFiles:
    where = os.path.join(path, STOCK_FILES)
    try:
        index = _decoder.decode(fs.read_file(where, _MAX_INDEX_NBYTES))
    except MALFORMED as error:
        raise DamagedError(f"{where}: {cut(error)}") from error
    if not is_plain(index.saved_for):
        raise DamagedError(f"{where}: a directory that is no plain path")
    for name, file in index.files.items():
        if not is_trainer_file(name) or name == MARKER or not is_trainer_file(file) or "/" in file:
            raise DamagedError(f"{where}: a file's name leads elsewhere")
    return index


class _Other(NamedTuple):
    """Another checkpoint of the job."""

    dirname: str
    said: TrainerFiles
    published: bool


def _publish_in_turn(fs: FileLayer, key: JobKey, save: SaveId, intents: Intents) -> str:
    """But for what a newer checkpoint has published; what one may have published meanwhile is put back.

    What the store says of newer ones can keep something from being written, and nothing else: what is put back is
    known from an intent. Empty, or what somebody must put back by hand.
    """
    index, to = _read_index(fs, os.path.join(job_dir(key), save.dirname)), intents[save]
    for other in _newer(fs, key, save):
        if other.published:
            index, to = _without(index, to, other)
    _publish(fs, key, save.dirname, index, to)
    for other in _newer(fs, key, save):
        if _without(index, to, other) == (index, to):
            continue
        known = next((save for save in intents if save.text == other.said.save_id), None)
        if known is None or known.dirname != other.dirname:
            path = os.path.join(job_dir(key), other.dirname)
            return f"newer files, of {path}, may have given way; {how_to_publish(path)}"
        _publish(fs, key, other.dirname, other.said, intents[known])
    return ""


def _newer(fs: FileLayer, key: JobKey, save: SaveId) -> list[_Other]:
    """The committed checkpoints after this save that have trainer's files, oldest first."""
    found = []
    for name in filter(parse_dirname, _names(fs, job_dir(key))):
        path = os.path.join(job_dir(key), name)
        with contextlib.suppress(OSError, DamagedError):  # of states, or being removed
            index = _read_index(fs, path)
            if index.save_id > save.text:  # of fixed width
                found.append(_Other(name, index, not is_unpublished(fs, key, name)))
    return sorted(found, key=lambda other: other.said.save_id)


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


def _publish(fs: FileLayer, key: JobKey, dirname: str, index: TrainerFiles, to: Publication) -> None:
    path = os.path.join(job_dir(key), dirname)
    if index.files:
        sources = _sources(path, index)
        there = TrainerDirectory(
            fs, to.directory, sources, set(to.names), lambda: _remember_links(fs, path, to.directory)
        )
        if to.whole:
            origin = Origin(
                store=key.store, job=key.job, checkpoint=dirname, save_id=index.save_id, files=sorted(sources)
            )
            there.appear(origin)
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


def _sources(path: str, index: TrainerFiles) -> dict[str, str]:
    return {name: os.path.join(path, file) for name, file in index.files.items()}
