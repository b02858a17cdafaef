"""Files of a checkpoint put into a trainer's directory: second names, all at once where the directory is theirs alone.

The files get hard links, or symbolic ones where the file system has no such thing: no byte is written twice. Below the
directory's parent no link is followed. Each step may be repeated, and done by two processes at once.
"""

import contextlib
import errno
import functools
import os
from collections.abc import Callable, Collection, Iterator

import msgspec

from ckptd.shared.base.decoding import MALFORMED
from ckptd.shared.base.errors import DamagedError
from ckptd.shared.files.regular import NO_LINKS
from ckptd.shared.format.origin import MARKER, Origin
from ckptd.system import failpoints
from ckptd.system.files import FileLayer, is_temp, temp_name

_MAX_MARKER_NBYTES = 1 << 30
_TRIES = 4
_OCCUPIED = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)  # the last: by a link to a directory, say
_origin_decoder = msgspec.json.Decoder(Origin)


class TrainerDirectory:
    """One directory that a rank has named, and the checkpoint's files that go there.

    store: the layer of the checkpoint's store. sources: the trainer's names, and where the files are. known: which of
    them may lie beside files of somebody else. on_symlink: called before a first symbolic link is made.
    """

    def __init__(
        self, store: FileLayer, path: str, sources: dict[str, str], known: set[str], on_symlink: Callable[[], None]
    ) -> None:
        self._store = store
        self._path = path
        self._sources = sources
        self._known = {name: source for name, source in sources.items() if name in known}
        self._on_symlink = functools.cache(on_symlink)
        self._draft = ""
        self._above = store.below(os.path.dirname(path))
        make_directories(store, os.path.dirname(path))
        # A link of this user's that has the very name which was said leads to the directory that was meant.
        self._fs = store.below(path) if self._is_link() else self._above

    def _is_link(self) -> bool:
        with contextlib.suppress(OSError):
            self._above.readlink(self._path)
            return True
        return False

    def put_into(self) -> None:
        """The known files, one after the other, beside whatever lies there. Raises OSError."""
        make_directories(self._store, self._path)
        fs = self._store.below(self._path)
        for folder in self._put(fs, self._path, self._known):
            sweep(fs, folder, {os.path.basename(name) for name in self._known})

    def appear(self, origin: Origin, draft: str = "") -> None:
        """The directory, with all files at once; only the known ones beside files of somebody else. Raises OSError.

        draft: a directory beside it, whose files go along; then it replaces whatever lies there. Else it raises
        DamagedError when others would have had to lie there: the known ones do by then.
        """
        self._draft = draft
        raw = msgspec.json.encode(msgspec.structs.replace(origin, files=sorted({*self._sources, *self._drafted()})))
        again_when_swept(lambda: self._appear(raw), lambda: self._is_there(raw))
        # Now, and not before: what a living publisher loses to this, it does not need any more.
        sweep(self._above, os.path.dirname(self._path), {os.path.basename(self._path)})

    def _is_there(self, raw: bytes) -> bool:
        """Whether a publisher of the same was first, and nobody has taken a file away since."""
        try:
            if self._fs.read_file(os.path.join(self._path, MARKER), len(raw)) != raw:
                return False
            return self._sources.keys() <= set(_below(self._fs, self._path))
        except OSError:
            return False

    def _appear(self, raw: bytes) -> None:
        temp = temp_name(self._path)
        try:
            self._fill(temp, raw)
        except OSError:  # of a quota, say: second names of large files would keep their bytes
            with contextlib.suppress(OSError):
                self._above.rmtree(temp)
            raise
        failpoints.reach("publish.before-rename")
        try:
            self._above.rename(temp, self._path)
        except OSError as error:
            if error.errno not in _OCCUPIED:
                self._above.rmtree(temp)
                raise
            self._replace(temp, raw)
        self._above.fsync_dir(os.path.dirname(self._path))

    def _fill(self, temp: str, raw: bytes) -> None:
        self._above.mkdir(temp)
        self._put(self._above, temp, self._sources)
        for name in self._drafted():
            self._take_along(os.path.join(self._draft, name), os.path.join(temp, name))
        _mark(self._above, temp, raw)

    def _replace(self, temp: str, raw: bytes) -> None:
        """What is there already: a directory of ours makes place, beside somebody's files only ours are replaced."""
        if self._is_there(raw):
            self._above.rmtree(temp)
            return
        if self._draft or self.is_ours():
            old = temp_name(self._path)
            self._above.rename(self._path, old)
            self._above.rename(temp, self._path)
            self._above.rmtree(old)
            return
        self._above.rmtree(temp)
        self.put_into()
        if MARKER in self._fs.listdir(self._path):
            _mark(self._fs, self._path, raw)
        left = sorted(self._sources.keys() - self._known.keys())
        if left:
            text = f"{len(left)} files that no rank of this node saved are not put beside somebody's files: {left[0]!r}"
            raise DamagedError(f"{self._path}: {text}", hint="move those away")

    def is_ours(self) -> bool:
        """Whether it is no link, and all that lies there was published: nobody put anything of their own beside it."""
        if self._is_link():
            return False
        try:
            raw = self._fs.read_file(os.path.join(self._path, MARKER), _MAX_MARKER_NBYTES)
            return set(_below(self._fs, self._path)) <= {MARKER, *_origin_decoder.decode(raw).files}
        except (OSError, *MALFORMED):
            return False

    def _put(self, fs: FileLayer, directory: str, sources: dict[str, str]) -> set[str]:
        """Each file under its name in the directory, replacing what has it. All directories that have files now."""
        folders = {directory}
        for name, source in sources.items():
            path = os.path.join(directory, name)
            folders |= make_directories(fs, os.path.dirname(path), below=directory)
            again_when_swept(functools.partial(self._put_one, fs, source, path))
        for folder in sorted(folders, key=len, reverse=True):
            fs.fsync_dir(folder)
        return folders

    def _drafted(self) -> list[str]:
        return [name for name in self._above.listdir(self._draft) if name != MARKER] if self._draft else []

    def _take_along(self, source: str, path: str) -> None:
        """A small file of the draft's. Where there are no hard links it is copied: the draft goes."""
        try:
            self._above.link(source, path)
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            self._above.rename(self._above.write_temp(path, self._above.read_file(source, _MAX_MARKER_NBYTES)), path)

    def _put_one(self, fs: FileLayer, source: str, path: str) -> None:
        temp = temp_name(path)
        self._second_name(fs, source, temp)
        fs.rename(temp, path)
        with contextlib.suppress(FileNotFoundError):  # of two names of one file rename(2) keeps both
            fs.unlink(temp)

    def _second_name(self, fs: FileLayer, source: str, path: str) -> None:
        try:
            fs.link_from(self._store, source, path)
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            self._on_symlink()
            self._store.size(source)  # a file, and no link to somewhere else
            fs.symlink(source, path)


def make_directories(fs: FileLayer, path: str, below: str = "") -> set[str]:
    """Makes what is missing of the path; all directories of it that lie below. Without below: what this user named."""
    return _made(fs if below else fs.below(None), path, below or "/")


def _made(fs: FileLayer, path: str, below: str) -> set[str]:
    if len(path) <= len(below):
        return set()
    found = _made(fs, os.path.dirname(path), below)
    if fs.mkdir(path):
        fs.fsync_dir(os.path.dirname(path))
    return found | {path}


def _mark(fs: FileLayer, directory: str, raw: bytes) -> None:
    fs.rename(fs.write_temp(os.path.join(directory, MARKER), raw), os.path.join(directory, MARKER))
    fs.fsync_dir(directory)


def again_when_swept(attempt: Callable[[], None], is_done: Callable[[], bool] = lambda: False) -> None:
    """The attempt, again when another publisher took its temporary files or its place, until is_done. Raises OSError.

    Each publisher sweeps once, at its end: as many of them as tries would have to end meanwhile.
    """
    for left in reversed(range(_TRIES)):
        try:
            return attempt()
        except OSError as error:
            if is_done():
                return None
            if not left or error.errno not in (errno.ENOENT, *_OCCUPIED):
                raise
    return None


def sweep(fs: FileLayer, directory: str, names: Collection[str]) -> None:
    """What killed publishers of these names left in the directory is removed.

    A living one that this meets ends with nothing, and never with half: its files are taken away before any of them
    is removed.
    """
    for left in filter(is_temp, fs.listdir(directory)):
        name = next((name for name in names if is_temp(left, name)), None)
        if name is None:
            continue
        aside = temp_name(os.path.join(directory, name))
        with contextlib.suppress(OSError):  # another sweeps too; or it stays for the next one
            fs.rename(os.path.join(directory, left), aside)
            fs.rmtree(aside)


def _below(fs: FileLayer, directory: str) -> Iterator[str]:
    """Paths of what is no directory, relative to it. Raises NotADirectoryError for a file."""
    for name in fs.listdir(directory):
        try:
            found = list(_below(fs, os.path.join(directory, name)))
        except NotADirectoryError:
            yield name
        else:
            yield from (os.path.join(name, below) for below in found)
