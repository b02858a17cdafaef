"""A store in this process's memory: what a kind of store needs at least, and that the interface is no file system's.

It is made as an object store would be: objects by name, and a lock for what such a store does by a conditional put.
``registered`` puts it among the kinds of stores.
"""

import contextlib
import errno
import os
import threading
import time

import msgspec

from ckptd.shared.base.errors import CkptdError
from ckptd.shared.format.committed_record import encode_committed, make_committed
from ckptd.shared.format.integrity import Purpose
from ckptd.shared.format.manifest import COMMITTED, StockFile, encode_record, make_manifest, vote_file
from ckptd.shared.format.together import silent
from ckptd.shared.stores import kinds
from ckptd.store.facts import CommitOutcome
from ckptd.store.interface import NO_INTENTS, Store
from ckptd.store.numbers import check_counted, mark_superseded, taken_over_by
from ckptd.store.scan import committed_at, pinned
from ckptd.store.stock_files import stock_files
from ckptd.store.votes import check_files, read_votes

SCHEME = "memory"
_LOCK = threading.RLock()
_OBJECTS: dict[str, tuple[bytes, float]] = {}  # by location: content, and when it was put
_IDS: dict[str, str] = {}  # of stores, by URL


@contextlib.contextmanager
def registered():
    """While it is entered, URLs with this scheme are of stores, all of them new."""
    kinds.KINDS[SCHEME] = kinds.Kind("tests.memory_store:MemoryFiles", "tests.memory_store:MemoryStore")
    try:
        yield
    finally:
        del kinds.KINDS[SCHEME]
        _OBJECTS.clear()
        _IDS.clear()


def _put(location, data):
    _OBJECTS[location] = bytes(data), time.time()


def _missing(location):
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), location)


class MemoryFile:
    def __init__(self, data):
        self._data = data

    @property
    def nbytes(self):
        return len(self._data)

    def read(self, into, offset, nbytes):
        found = self._data[offset : offset + nbytes]
        into[: len(found)] = found
        return len(found)

    def close(self):
        pass


class MemoryFiles:
    """The reading side: what a training needs of the store."""

    def __init__(self, location, integrity):
        self.location, self.integrity = location, integrity

    def where(self, name):
        return f"{self.location}/{name}"

    def names(self, folder=""):
        prefix = f"{self.where(folder) if folder else self.location}/"
        found = {name.removeprefix(prefix).partition("/")[0] for name in _OBJECTS if name.startswith(prefix)}
        if not found:
            raise _missing(prefix)
        return sorted(found)

    def below(self, name):
        return MemoryFiles(self.where(name), self.integrity)

    def size(self, name):
        return len(self._object(name)[0])

    def modified(self, name):
        return self._object(name)[1]

    def read(self, name, max_nbytes):
        data = self._object(name)[0]
        if len(data) > max_nbytes:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), self.where(name))
        return data

    def open(self, name, *, cached=False):
        return MemoryFile(self._object(name)[0])

    def is_replaced(self, name, path):
        return False

    def job(self):
        above, _, job = self.location.rpartition("/")[0].rpartition("/")
        return job if above in _IDS else None

    def _object(self, name):
        try:
            return _OBJECTS[self.where(name)]
        except KeyError:
            raise _missing(self.where(name)) from None


class MemoryRecords:
    def __init__(self, url, files):
        self._url, self.files = url, files

    def put(self, name, data, *, new=False):
        if self._url not in _IDS:
            raise _missing(self._url)
        with _LOCK:
            if new and self.files.where(name) in _OBJECTS:
                return False
            _put(self.files.where(name), data)
            return True

    def drop(self, name):
        return _OBJECTS.pop(self.files.where(name), None) is not None


class MemoryStore(Store):
    def store_id(self, job=""):
        return _IDS.get(self.url)

    def make(self, store_id):
        return _IDS.setdefault(self.url, store_id or os.urandom(16).hex()), []

    def records(self, job):
        return MemoryRecords(self.url, MemoryFiles(f"{self.url}/{job}", self.integrity))

    def put_files(self, job, save, folder, files, flow):
        if self.url not in _IDS:
            raise _missing(self.url)
        if committed_at(self.files(job), save) is not None:
            return False
        for open_image in files:
            with open_image() as image:
                data = bytes(image.source[: image.nbytes])
                image.check_source()
                _put(f"{self.where(job, save, unfinished=True)}/{image.name}", data)
                flow.wrote(image.name, image.nbytes)
        return True

    def put_vote(self, job, vote):
        place, raw = vote_file(vote, self.integrity)
        _put(f"{self.where(job, vote.save, unfinished=True)}/{place}", raw)

    def commit(self, job, save, writer, by=None, intents=NO_INTENTS, *, alive=silent):
        records = self.records(job)
        if by is not None:
            self.check(by.store_id, job)
            check_counted(records, save)
        with _LOCK:
            committed = committed_at(records.files, save) or self._commit(job, save, writer, alive)
        taken_over = taken_over_by(records, save, by) if by is not None else 0
        note = mark_superseded(records, save.dirname, taken_over) if taken_over else ""
        return CommitOutcome(committed, note, taken_over)

    def _commit(self, job, save, writer, alive):
        unfinished = self.files(job).below(save.partial_dirname)
        votes = read_votes(unfinished, job, save, alive)
        manifest = make_manifest(votes, save=save, writer=writer, integrity=self.integrity)
        voted = [found.vote for found in votes]
        check_files(unfinished, voted, alive)
        stock, left_out = stock_files(voted, save, alive)
        for name, data in stock.items():
            manifest.stock.append(StockFile(name, len(data), self.integrity.digest(data, Purpose.STOCK)))
            _put(unfinished.where(name), data)
        manifest = msgspec.structs.replace(manifest, left_out=left_out)
        raw = encode_record(manifest, self.integrity)
        committed = make_committed(manifest, raw, self.integrity)
        _put(unfinished.where(committed.manifest), raw)
        for name in [name for name in _OBJECTS if name.startswith(f"{unfinished.location}/")]:
            _OBJECTS[self.where(job, save) + name.removeprefix(unfinished.location)] = _OBJECTS.pop(name)
        _put(f"{self.where(job, save)}/{COMMITTED}", encode_committed(committed))
        return committed

    def remove(self, job, save, intents=NO_INTENTS):
        files = self.files(job)
        with _LOCK:
            if save.dirname in pinned(files):
                return False
            if committed_at(files, save) is None:
                return True
            if self.scan(job).committed[0].committed.save == save:
                raise CkptdError(
                    f"{self.where(job, save)}: is the newest of job {job!r}", hint="commit a newer one first"
                )
            self._drop(self.where(job, save))
            return True

    def discard(self, job, save):
        self._drop(self.where(job, save, unfinished=True))

    @staticmethod
    def _drop(location):
        for name in [name for name in _OBJECTS if name.startswith(f"{location}/")]:
            del _OBJECTS[name]

    def space(self):
        return 1 << 40, 1 << 41
