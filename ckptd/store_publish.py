"""A trainer's files of a committed checkpoint, under the names by which the trainer looks for them.

The files get second names (hard links), or links to them where the file system has no such thing: no byte is written
twice. What is to be published stands in `files.json`, that it still is in `UNPUBLISHED`, which goes last: a daemon that
dies in between does it at its next start. Each step may be repeated, and done by two daemons at once. Whoever comes
late, an older checkpoint never takes the place of a newer one.
"""

import contextlib
import errno
import os
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import msgspec

from ckptd import failpoints
from ckptd.filelayer import FileLayer, is_temp, temp_name
from ckptd.protocol.decoding import MALFORMED
from ckptd.protocol.errors import DamagedError
from ckptd.protocol.ids import JobKey, parse_dirname
from ckptd.protocol.layout import Layout, Publication, is_trainer_file
from ckptd.protocol.manifest import STOCK_FILES, UNPUBLISHED
from ckptd.protocol.origin import MARKER, Origin
from ckptd.regular_files import NO_LINKS
from ckptd.store_scan import job_dir

_MAX_INDEX_NBYTES = 1 << 30
_OCCUPIED = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)  # the last: by a link to a directory, say


class TrainerFiles(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Content of `files.json`: the trainer's names of the checkpoint's files, and where it looks for them."""

    save_id: str
    files: dict[str, str]  # the trainer's name, and the file's in the checkpoint's directory
    publication: Publication | None = None


_decoder = msgspec.json.Decoder(TrainerFiles)
_origin_decoder = msgspec.json.Decoder(Origin)


def index_of(layouts: Iterable[Layout], save_id: str) -> bytes | None:
    """`files.json` of a checkpoint, None when it has no trainer's files. Of two ranks' of one name the lower has it."""
    files: dict[str, str] = {}
    publication = None
    raw = False
    for layout in layouts:
        raw = raw or layout.raw
        publication = publication or layout.publication
        for name, extent in zip(layout.names, layout.extents()[1:], strict=False):
            files.setdefault(name, extent.name)
    if not raw:
        return None
    index = TrainerFiles(save_id=save_id, files=files, publication=publication)
    return msgspec.json.format(msgspec.json.encode(index)) + b"\n"


def mark_unpublished(fs: FileLayer, path: str) -> None:
    """To be called before the directory at path gets its final name, and synced by the caller."""
    with contextlib.suppress(FileExistsError):
        fs.create_exclusive(os.path.join(path, UNPUBLISHED))


def publish(fs: FileLayer, key: JobKey, dirname: str) -> str:
    """The committed checkpoint's files where the trainer looks for them. Empty, or why they are not there yet."""
    path = os.path.join(job_dir(key), dirname)
    try:
        fs.size(os.path.join(path, UNPUBLISHED))
        _publish_in_turn(fs, key, dirname, _read_index(fs, path))
        failpoints.reach("publish.done")
        with contextlib.suppress(FileNotFoundError):  # another committer did the same
            fs.unlink(os.path.join(path, UNPUBLISHED))
        fs.fsync_dir(path)
    except FileNotFoundError as error:
        return "" if error.filename == os.path.join(path, UNPUBLISHED) else f"{path} was not published: {error}"
    except (OSError, DamagedError) as error:
        return f"{path} was not published: {error}"
    return ""


def publish_left(fs: FileLayer, key: JobKey) -> list[str]:
    """What an earlier daemon did not get to, oldest first; what went wrong with each."""
    found = [(parsed[1], parsed[0], name) for name in _names(fs, job_dir(key)) if (parsed := parse_dirname(name))]
    return [note for _, _, name in sorted(found) if (note := publish(fs, key, name))]


def is_linked_to(fs: FileLayer, key: JobKey, dirname: str) -> bool:
    """Whether a trainer finds the checkpoint's files by symbolic links, which without it would lead nowhere."""
    try:
        index = _read_index(fs, os.path.join(job_dir(key), dirname))
        if index.publication is None:
            return False
        for name, source in _sources(key, dirname, index).items():
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # the trainer has removed it
                if fs.readlink(os.path.join(index.publication.directory, name)) == source:
                    return True
    except (OSError, DamagedError):  # of states; or a hard link, as all others are then
        return False
    return False


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
        raise DamagedError(f"{where}: {error}") from error
    if not all(is_trainer_file(name) and os.path.basename(file) == file for name, file in index.files.items()):
        raise DamagedError(f"{where}: a file's name leads elsewhere")
    return index


def _publish_in_turn(fs: FileLayer, key: JobKey, dirname: str, index: TrainerFiles) -> None:
    """But for what a newer checkpoint has published; what one may have published meanwhile is put back."""
    for other in _newer(fs, key, index.save_id).values():
        index = _without(index, other) if other.published else index
    _publish(fs, key, dirname, index)
    for name, other in _newer(fs, key, index.save_id).items():
        if _without(index, other) != index:
            _publish(fs, key, name, other.said)


class _Other(NamedTuple):
    """Another checkpoint of the job."""

    said: TrainerFiles
    published: bool


def _newer(fs: FileLayer, key: JobKey, save_id: str) -> dict[str, _Other]:
    """The committed checkpoints after this save that have trainer's files, by directory, oldest first."""
    found = {}
    for name in filter(parse_dirname, _names(fs, job_dir(key))):
        path = os.path.join(job_dir(key), name)
        with contextlib.suppress(OSError, DamagedError):  # of states, or being removed
            index = _read_index(fs, path)
            if index.save_id > save_id:  # of fixed width
                found[name] = _Other(index, UNPUBLISHED not in fs.listdir(path))
    return dict(sorted(found.items(), key=lambda item: item[1].said.save_id))


def _without(index: TrainerFiles, other: _Other) -> TrainerFiles:
    """What is left to be published when the other checkpoint's files are in their places."""
    to, theirs, files = index.publication, other.said.publication, index.files
    if to is None or theirs is None:
        return index
    if to.directory == theirs.directory:
        alone = to.whole or theirs.whole
        files = {} if alone else {name: file for name, file in files.items() if name not in other.said.files}
    if to.pointer == theirs.pointer:
        to = msgspec.structs.replace(to, pointer="", text="")
    return msgspec.structs.replace(index, files=files, publication=to)


def _publish(fs: FileLayer, key: JobKey, dirname: str, index: TrainerFiles) -> None:
    to = index.publication
    if to is None:
        return
    if index.files:
        _put(fs, key, dirname, index, to)
    failpoints.reach("publish.before-pointer")
    if to.pointer:
        _make_directories(fs, os.path.dirname(to.pointer))
        fs.rename(fs.write_temp(to.pointer, to.text.encode()), to.pointer)
        fs.fsync_dir(os.path.dirname(to.pointer))


def _put(fs: FileLayer, key: JobKey, dirname: str, index: TrainerFiles, to: Publication) -> None:
    sources = _sources(key, dirname, index)
    _make_directories(fs, os.path.dirname(to.directory))
    if to.whole:
        origin = msgspec.json.encode(
            Origin(store=key.store, job=key.job, checkpoint=dirname, save_id=index.save_id, files=sorted(sources))
        )
        _sweep(fs, to.directory)
        try:
            _appear(fs, to.directory, sources, origin)
        except OSError:
            if not _is_there(fs, to.directory, origin):  # another committer was first, and swept ours
                raise
    else:
        _make_directories(fs, to.directory)
        _put_into(fs, to.directory, sources)


def _sources(key: JobKey, dirname: str, index: TrainerFiles) -> dict[str, str]:
    return {name: os.path.join(job_dir(key), dirname, file) for name, file in index.files.items()}


def _sweep(fs: FileLayer, directory: str) -> None:
    """What a killed publisher left of this directory."""
    head, name = os.path.split(directory)
    for left in fs.listdir(head):
        if is_temp(left, name):
            fs.rmtree(os.path.join(head, left))


def _is_there(fs: FileLayer, directory: str, origin: bytes) -> bool:
    try:
        return fs.read_file(os.path.join(directory, MARKER), len(origin)) == origin
    except OSError:
        return False


def _appear(fs: FileLayer, directory: str, sources: dict[str, str], origin: bytes) -> None:
    """The directory, with all files at once."""
    temp = temp_name(directory)
    fs.mkdir(temp)
    _put_into(fs, temp, sources)
    _mark(fs, temp, origin)
    failpoints.reach("publish.before-rename")
    try:
        fs.rename(temp, directory)
    except OSError as error:
        if error.errno not in _OCCUPIED:
            fs.rmtree(temp)
            raise
        _replace(fs, temp, directory, sources, origin)
    fs.fsync_dir(os.path.dirname(directory))


def _mark(fs: FileLayer, directory: str, origin: bytes) -> None:
    fs.rename(fs.write_temp(os.path.join(directory, MARKER), origin), os.path.join(directory, MARKER))
    fs.fsync_dir(directory)


def _replace(fs: FileLayer, temp: str, directory: str, sources: dict[str, str], origin: bytes) -> None:
    """A directory that is there already: one of ours makes place; beside somebody's files only ours are replaced."""
    if not _is_ours(fs, directory):
        fs.rmtree(temp)
        _put_into(fs, directory, sources)
        if MARKER in fs.listdir(directory):
            _mark(fs, directory, origin)
        return
    old = temp_name(directory)
    fs.rename(directory, old)
    fs.rename(temp, directory)
    fs.rmtree(old)


def _is_ours(fs: FileLayer, directory: str) -> bool:
    """Whether it is no link, and all that lies there was published: nobody has put anything of their own beside it."""
    with contextlib.suppress(OSError):
        fs.readlink(directory)
        return False
    try:
        origin = _origin_decoder.decode(fs.read_file(os.path.join(directory, MARKER), _MAX_INDEX_NBYTES))
        return set(_below(fs, directory)) <= {MARKER, *origin.files}
    except (OSError, *MALFORMED):
        return False


def _below(fs: FileLayer, directory: str) -> Iterator[str]:
    """Paths of what is no directory, relative to it. Raises NotADirectoryError for a file, OSError for a lost link."""
    for name in fs.listdir(directory):
        try:
            found = list(_below(fs, os.path.join(directory, name)))
        except NotADirectoryError:
            yield name
        else:
            yield from (os.path.join(name, below) for below in found)


def _put_into(fs: FileLayer, directory: str, sources: dict[str, str]) -> None:
    """Each file under its name in the directory, replacing what has it."""
    folders = {directory}
    for name, source in sources.items():
        path = os.path.join(directory, name)
        folders |= _make_directories(fs, os.path.dirname(path), below=directory)
        temp = temp_name(path)
        _second_name(fs, source, temp)
        fs.rename(temp, path)
        with contextlib.suppress(FileNotFoundError):  # of two names of one file rename(2) keeps both
            fs.unlink(temp)
    for folder in sorted(folders, key=len, reverse=True):
        fs.fsync_dir(folder)


def _second_name(fs: FileLayer, source: str, path: str) -> None:
    try:
        fs.link(source, path)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        fs.symlink(source, path)


def _make_directories(fs: FileLayer, path: str, below: str = "/") -> set[str]:
    """Makes what is missing of the path; all directories of it that lie below."""
    found: set[str] = set()
    if len(path) <= len(below):
        return found
    found |= _make_directories(fs, os.path.dirname(path), below)
    if fs.mkdir(path):
        fs.fsync_dir(os.path.dirname(path))
    return found | {path}
