"""A disk that forgets what was not synced, and that the machine loses power on at the call of one's choice."""

import errno
import os
import random
import threading
from dataclasses import dataclass, field

from ckptd.system.files import FileLayer


class PowerCut(BaseException):
    """The machine is off. No code may catch it and go on."""


@dataclass
class File:
    live: bytearray = field(default_factory=bytearray)
    synced: bytes = b""


@dataclass
class Link:
    target: str


@dataclass
class Dir:
    live: dict[str, "Node"] = field(default_factory=dict)
    synced: dict[str, "Node"] = field(default_factory=dict)
    pending: list[dict[str, "Node | None"]] = field(default_factory=list)  # changes since the sync, each atomic

    def change(self, **names: "Node | None") -> None:
        self.pending.append(names)
        _apply(self.live, names)


Node = File | Link | Dir


def _apply(entries: dict[str, Node], names: dict[str, Node | None]) -> None:
    for name, node in names.items():
        if node is None:
            entries.pop(name, None)
        else:
            entries[name] = node


def _error(number: int, path: str) -> OSError:
    return OSError(number, os.strerror(number), path)


class ForgettingDisk(FileLayer):
    """In memory. Counts every call that changes or syncs something; cut_at is the count at which the power goes."""

    def __init__(self, cut_at: int = -1, *, deaf: str = "") -> None:
        self.root = Dir()
        self.cut_at = cut_at
        self.deaf = deaf  # the sync that this disk only pretends to do
        self.calls = 0
        self._open: dict[int, File] = {}
        self._lock = threading.Lock()

    def _tick(self) -> None:
        with self._lock:
            if self.calls == self.cut_at:
                raise PowerCut
            self.calls += 1

    # -- looking --

    def _find(self, path: str) -> Node:
        node: Node = self.root
        for name in path.strip("/").split("/"):
            if isinstance(node, Link):
                raise _error(errno.ELOOP, path)
            if not isinstance(node, Dir):
                raise _error(errno.ENOTDIR, path)
            if name not in node.live:
                raise _error(errno.ENOENT, path)
            node = node.live[name]
            if isinstance(node, Link):  # only ever a relative name in the same directory
                node = self._find(os.path.join(path[: path.index(name)], node.target))
        return node

    def _dir(self, path: str) -> Dir:
        node = self._find(path) if path.strip("/") else self.root
        if not isinstance(node, Dir):
            raise _error(errno.ENOTDIR, path)
        return node

    def _split(self, path: str) -> tuple[Dir, str]:
        head, name = os.path.split(path)
        return self._dir(head), name

    def _file(self, path: str) -> File:
        node = self._find(path)
        if not isinstance(node, File):
            raise _error(errno.EISDIR, path)
        return node

    def listdir(self, path: str) -> list[str]:
        return sorted(self._dir(path).live)

    def read_file(self, path: str, max_nbytes: int) -> bytes:
        return bytes(self._file(path).live)

    def size(self, path: str) -> int:
        return len(self._file(path).live)

    def readlink(self, path: str) -> str:
        parent, name = self._split(path)
        node = parent.live.get(name)
        if not isinstance(node, Link):
            raise _error(errno.EINVAL if node else errno.ENOENT, path)
        return node.target

    # -- changing --

    def mkdir(self, path: str) -> bool:
        self._tick()
        parent, name = self._split(path)
        if name in parent.live:
            return False
        parent.change(**{name: Dir()})
        return True

    def create_exclusive(self, path: str) -> None:
        self._tick()
        parent, name = self._split(path)
        if name in parent.live:
            raise _error(errno.EEXIST, path)
        parent.change(**{name: File()})

    def open_write(self, path: str, *, direct: bool) -> int:
        self._tick()
        parent, name = self._split(path)
        file = File()
        parent.change(**{name: file})
        fd = 1000 + len(self._open)
        self._open[fd] = file
        return fd

    def pwrite(self, fd: int, data: bytes | memoryview, offset: int) -> None:
        self._tick()
        live = self._open[fd].live
        live.extend(bytes(max(0, offset + len(data) - len(live))))
        live[offset : offset + len(data)] = data

    def truncate(self, fd: int, nbytes: int) -> None:
        self._tick()
        live = self._open[fd].live
        live[:] = live[:nbytes].ljust(nbytes, b"\0")

    def fsync(self, fd: int) -> None:
        self._tick()
        if self.deaf != "fsync":
            self._open[fd].synced = bytes(self._open[fd].live)

    def close(self, fd: int) -> None:
        pass

    def fsync_dir(self, path: str) -> None:
        self._tick()
        if self.deaf != "fsync_dir":
            directory = self._dir(path)
            directory.synced = dict(directory.live)
            directory.pending.clear()

    def rename(self, src: str, dst: str) -> None:
        self._tick()
        (parent, old), (there, new) = self._split(src), self._split(dst)
        if old not in parent.live:
            raise _error(errno.ENOENT, src)
        target = there.live.get(new)
        if isinstance(target, Dir) and target.live:
            raise _error(errno.ENOTEMPTY, dst)
        if parent is there:
            parent.change(**{new: parent.live[old], old: None})
            return
        there.change(**{new: parent.live[old]})  # of two directories each is forgotten on its own
        parent.change(**{old: None})

    def link(self, src: str, dst: str) -> None:
        self._tick()
        parent, name = self._split(dst)
        if name in parent.live:
            raise _error(errno.EEXIST, dst)
        parent.change(**{name: self._find(src)})

    def symlink(self, target: str, path: str) -> None:
        self._tick()
        parent, name = self._split(path)
        parent.change(**{name: Link(target)})

    def unlink(self, path: str) -> None:
        self._tick()
        parent, name = self._split(path)
        if name not in parent.live:
            raise _error(errno.ENOENT, path)
        if isinstance(parent.live[name], Dir):
            raise _error(errno.EISDIR, path)
        parent.change(**{name: None})

    def rmdir(self, path: str) -> None:
        self._tick()
        parent, name = self._split(path)
        if self._dir(path).live:
            raise _error(errno.ENOTEMPTY, path)
        parent.change(**{name: None})

    # -- after the power cut --

    def survivors(self, path: str, luck: random.Random | None) -> None:
        """What the disk holds when the power is back, as real files at path.

        luck None: nothing unsynced survived. Else each unsynced change of a name and each unsynced file did or did not,
        in any combination, and a file's unsynced bytes may be torn.
        """
        _materialise(self.root, path, luck, {})


def _materialise(directory: Dir, path: str, luck: random.Random | None, contents: dict[int, bytes]) -> None:
    entries = dict(directory.synced)
    if luck:
        for names in directory.pending:
            if luck.random() < 0.5:
                _apply(entries, names)
    os.makedirs(path, exist_ok=True)
    for name, node in entries.items():
        where = os.path.join(path, name)
        if isinstance(node, Dir):
            _materialise(node, where, luck, contents)
        elif isinstance(node, Link):
            os.symlink(node.target, where)
        else:
            # A file has one content, whatever names it has.
            data = contents.setdefault(id(node), _surviving(node, luck))
            with open(where, "wb") as file:
                file.write(data)


def _surviving(file: File, luck: random.Random | None) -> bytes:
    if luck is None or file.synced == file.live:
        return file.synced
    torn = bytes(file.live[: luck.randrange(len(file.live) + 1)])
    return luck.choice([file.synced, bytes(file.live), torn])
