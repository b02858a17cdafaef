"""A trainer's files of a committed checkpoint, under the names by which the trainer looks for them.

The files get second names (hard links), or links to them where the file system has no such thing: no byte is written
twice. What is to be published stands in `files.json`, that it still is in `UNPUBLISHED`, which goes last: a daemon that
dies in between does it at its next start. Each step may be repeated, and done by two daemons at once.
"""

import contextlib
import errno
import os
from collections.abc import Iterable

import msgspec

from ckptd import failpoints
from ckptd.filelayer import NO_LINKS, FileLayer, is_temp, temp_name
from ckptd.protocol.decoding import MALFORMED
from ckptd.protocol.errors import DamagedError
from ckptd.protocol.ids import JobKey, parse_dirname
from ckptd.protocol.layout import Layout, Publication, is_trainer_file
from ckptd.protocol.manifest import STOCK_FILES, UNPUBLISHED
from ckptd.store_scan import job_dir

MARKER = ".ckptd"  # in a directory that we published: where its bytes come from, and that we may replace it
_MAX_INDEX_NBYTES = 1 << 30
_OCCUPIED = (errno.ENOTEMPTY, errno.EEXIST)


class TrainerFiles(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Content of `files.json`: the trainer's names of the checkpoint's files, and where it looks for them."""

    save_id: str
    files: dict[str, str]  # the trainer's name, and the file's in the checkpoint's directory
    publication: Publication | None = None


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """Content of the marker."""

    store: str
    job: str
    checkpoint: str  # its directory's name
    save_id: str


_decoder = msgspec.json.Decoder(TrainerFiles)


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
        index = _read_index(fs, path)
        if index.publication is not None:
            origin = Origin(store=key.store, job=key.job, checkpoint=dirname, save_id=index.save_id)
            _publish(fs, path, index, index.publication, msgspec.json.encode(origin))
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


def _publish(fs: FileLayer, path: str, index: TrainerFiles, to: Publication, origin: bytes) -> None:
    sources = {name: os.path.join(path, file) for name, file in index.files.items()}
    _make_directories(fs, os.path.dirname(to.directory))
    if to.whole:
        _sweep(fs, to.directory)
        try:
            _appear(fs, to.directory, sources, origin)
        except OSError:
            if not _is_there(fs, to.directory, origin):  # another committer was first, and swept ours
                raise
    else:
        _make_directories(fs, to.directory)
        _put_into(fs, to.directory, sources)
    failpoints.reach("publish.before-pointer")
    if to.pointer:
        _make_directories(fs, os.path.dirname(to.pointer))
        fs.rename(fs.write_temp(to.pointer, to.text.encode()), to.pointer)
        fs.fsync_dir(os.path.dirname(to.pointer))


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
    fs.rename(fs.write_temp(os.path.join(temp, MARKER), origin), os.path.join(temp, MARKER))
    fs.fsync_dir(temp)
    failpoints.reach("publish.before-rename")
    try:
        fs.rename(temp, directory)
    except OSError as error:
        if error.errno not in _OCCUPIED:
            fs.rmtree(temp)
            raise
        _replace(fs, temp, directory, sources)
    fs.fsync_dir(os.path.dirname(directory))


def _replace(fs: FileLayer, temp: str, directory: str, sources: dict[str, str]) -> None:
    """A directory that is there already: one of ours makes place; in somebody else's only our files are replaced."""
    if MARKER not in fs.listdir(directory):
        fs.rmtree(temp)
        _put_into(fs, directory, sources)
        return
    old = temp_name(directory)
    fs.rename(directory, old)
    fs.rename(temp, directory)
    fs.rmtree(old)


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
