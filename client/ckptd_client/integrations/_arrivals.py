"""Directories of a trainer's own that appear, whole, when the checkpoints that they stand for are durable.

Until then one is prepared beside its place, under a hidden name, with what the trainer adds to the checkpoint and the
word of which it will be. What the place held stays until it is replaced at once; what a trainer did not live to see
is finished by the next.
"""

import logging
import os
import queue
import re
import shutil
import threading
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

from ckptd.protocol.errors import CkptdError
from ckptd.protocol.ids import JobKey
from ckptd.protocol.manifest import COMMITTED
from ckptd.protocol.origin import MARKER, Origin
from ckptd_client.handle import SaveHandle
from ckptd_client.integrations._directory import (
    link_images,
    link_listing,
    origin_of,
    promise,
    put,
    sync,
)

log = logging.getLogger("ckptd_client")
_HIDDEN_RE = re.compile(r"\.(.+)\.ckptd-[0-9a-z-]+")


class Coming(NamedTuple):
    """A directory that was announced and has not appeared."""

    save_id: str  # of what it stands for; empty: the announcement was cut short
    hidden: str
    place: str


def comings(folder: str) -> list[Coming]:
    """What was announced in the folder, the oldest save first."""
    found = []
    for name in os.listdir(folder) if os.path.isdir(folder) else ():
        match = _HIDDEN_RE.fullmatch(name)
        if match is not None:
            hidden = os.path.join(folder, name)
            found.append(Coming(_save_of(hidden), hidden, os.path.join(folder, match[1])))
    return sorted(found)


def appear(hidden: str, place: str) -> None:
    """Of a durable checkpoint. Raises OSError."""
    origin = origin_of(hidden)
    assert origin is not None  # noqa: S101 - announce wrote it
    link_images(hidden, origin)
    link_listing(hidden, origin)
    before = _set_aside(place)
    os.rename(hidden, place)
    sync(os.path.dirname(place))
    _discard(before)


def disappear(place: str) -> None:
    """Removes what lies there, and what was to appear there. ckptd's own checkpoint is none of it. Raises OSError."""
    for coming in comings(os.path.dirname(place)):
        if coming.place == place:
            _discard(coming.hidden)
    if os.path.isdir(place) and not os.path.islink(place) and os.path.lexists(os.path.join(place, MARKER)):
        os.unlink(os.path.join(place, MARKER))  # so that nobody brings back what is found half removed
    _discard(_set_aside(place))


class Arrivals:
    """Sees to it, in a thread: what is asked for is done in its order, when the saves before it have ended.

    steps: of the checkpoints that ckptd has. job: theirs; what names a checkpoint of another is left alone. One rank
    has it, for all.
    """

    def __init__(self, steps: Callable[[], list[int]], job: JobKey) -> None:
        self._job = job
        self.lock = threading.Lock()
        """Who holds it sees no directory appear or go."""
        self._steps = steps
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()  # None: the end
        self._thread: threading.Thread | None = None
        self._expected: set[str] = set()  # hidden directories
        self._folders: set[str] = set()
        self._doomed: dict[str, None] = {}  # places, to be emptied
        self._failed = False  # the newest save that has ended

    def expect(self, place: str, origin: Origin, files: Mapping[str, bytes], handle: SaveHandle) -> None:
        """The place appears, with these files, when the save is durable; one that fails is told in the log.

        To be called before the save is staged on all ranks. Raises OSError.
        """
        hidden = _hidden(place, f"{origin.save_id}-{uuid.uuid4().hex}")
        self._expected.add(hidden)  # before it is there: the thread drops what an earlier life has left half made
        try:
            os.makedirs(hidden)
            for name, content in files.items():
                put(hidden, name, content)
            promise(hidden, origin)
            sync(os.path.dirname(place))
        except BaseException:
            self._expected.discard(hidden)
            raise
        self._folders.add(os.path.dirname(place))
        self._then(partial(self._await, hidden, place, handle))

    def remove(self, place: str) -> None:
        """The place is emptied, once a save that was asked for before is there: the last one never goes for nothing."""
        self._then(partial(self._doom, place))

    def settle(self) -> None:
        """Blocks until everything asked for is done, or known to be in vain."""
        done = threading.Event()
        self._then(done.set)
        done.wait()
        if self._doomed:
            log.warning("ckptd: kept, since a later checkpoint failed: %s", ", ".join(self._doomed))

    def close(self) -> None:
        """Ends the thread when everything asked for is done; nothing can be asked for afterwards."""
        self._tasks.put(None)

    def finish(self, folder: str) -> None:
        """Brings what an earlier life announced in the folder, where it is durable; drops what is lost. OSError."""
        self._folders.add(folder)
        with self.lock:
            self._finish(folder)

    # --- in the thread

    def _then(self, task: Callable[[], None]) -> None:
        self._tasks.put(task)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="ckptd-arrivals", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except Exception as error:  # noqa: BLE001 - whatever it is, training waits for what comes after it
                log.warning("ckptd: %s: %s", type(error).__name__, error)

    def _await(self, hidden: str, place: str, handle: SaveHandle) -> None:
        self._failed = True
        try:
            handle.wait("durable")
            with self.lock:
                appear(hidden, place)
        except (CkptdError, OSError) as error:
            log.warning("ckptd: %s does not appear: %s", place, error)
            return
        finally:
            self._expected.discard(hidden)
        self._failed = False
        self._doomed.pop(place, None)
        self._sweep()

    def _doom(self, place: str) -> None:
        self._doomed[place] = None
        if not self._failed:
            self._sweep()

    def _sweep(self) -> None:
        with self.lock:
            while self._doomed:
                disappear(self._doomed.popitem()[0])
            for folder in self._folders:
                self._finish(folder)

    def _finish(self, folder: str) -> None:
        left = [coming for coming in comings(folder) if coming.hidden not in self._expected]
        steps = self._steps() if left else []
        for save_id, hidden, place in left:
            origin = origin_of(hidden)
            if origin is None or _is_outdated(save_id, hidden, place):
                _discard(hidden)
            elif not origin.is_of(self._job):  # files of a store that nobody here has named get no name here
                log.warning("ckptd: %s does not appear: it is of job %r in %s", place, origin.job, origin.store)
            elif is_durable(origin):
                appear(hidden, place)
            elif origin.step not in steps:
                log.warning("ckptd: %s does not appear: its checkpoint was lost, or gave way to a newer one", place)
                _discard(hidden)


def is_durable(origin: Origin) -> bool:
    """Whether its checkpoint is committed."""
    return os.path.exists(os.path.join(origin.path, COMMITTED))


def _hidden(place: str, word: str) -> str:
    folder, name = os.path.split(place)
    return os.path.join(folder, f".{name}.ckptd-{word}")


def _save_of(directory: str) -> str:
    origin = origin_of(directory)
    return origin.save_id if origin is not None else ""


def _is_outdated(save_id: str, hidden: str, place: str) -> bool:
    """Whether something newer lies at the place."""
    if not os.path.exists(place):
        return False
    there = _save_of(place)
    return there >= save_id if there else os.stat(place).st_mtime > os.stat(hidden).st_mtime


def _set_aside(place: str) -> str | None:
    """Empties the place; what is left to be discarded."""
    if os.path.islink(place) or os.path.isfile(place):
        os.unlink(place)
    elif os.path.isdir(place):
        aside = _hidden(place, f"old-{uuid.uuid4().hex}")
        os.rename(place, aside)
        return aside
    return None


def _discard(directory: str | None) -> None:
    if directory is not None:
        shutil.rmtree(directory, ignore_errors=True)
