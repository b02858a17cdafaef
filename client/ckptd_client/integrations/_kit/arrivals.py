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
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import NamedTuple, TypeVar

from ckptd.shared.base.errors import CkptdError, SaveFailedError
from ckptd.shared.base.ids import Run, SaveId
from ckptd.shared.format.origin import MARKER, Origin
from ckptd_client.client import Client, staging_of
from ckptd_client.handle import SaveHandle
from ckptd_client.integrations._kit.directory import link_images, link_listing, origin_of, promise, put, sync
from ckptd_client.integrations._kit.durable import Durable, durable, is_of

log = logging.getLogger("ckptd_client")
T = TypeVar("T")
_HIDDEN_RE = re.compile(r"\.(.+)\.ckptd-[0-9a-z-]+")


class Coming(NamedTuple):
    """A directory that was announced and has not appeared."""

    origin: Origin | None  # of what it stands for; None: the announcement was cut short
    hidden: str
    place: str

    @property
    def save(self) -> SaveId | None:
        """What it stands for."""
        return self.origin.save if self.origin is not None else None


def comings(folder: str) -> list[Coming]:
    """What was announced in the folder, the oldest save first."""
    found: list[Coming] = []
    for name in os.listdir(folder) if os.path.isdir(folder) else ():
        match = _HIDDEN_RE.fullmatch(name)
        if match is not None:
            hidden = os.path.join(folder, name)
            found.append(Coming(origin_of(hidden), hidden, os.path.join(folder, match[1])))
    cut_short = [coming for coming in found if coming.save is None]
    whole = oldest_first((coming.save, coming.hidden, coming) for coming in found if coming.save is not None)
    return [*cut_short, *whole]


def oldest_first(found: Iterable[tuple[SaveId, str, T]]) -> list[T]:
    """What is third of each; first is its save, second the directory that tells of it.

    Of two runs of one incarnation number nothing in their names says which was first: the one that wrote a directory
    last is the newer.
    """
    listed = list(found)
    written: dict[Run, float] = {}
    for save, directory, _ in listed:
        written[save.owner] = max(written.get(save.owner, 0.0), _written(directory))
    by_age = sorted(listed, key=lambda one: (one[0].incarnation, written[one[0].owner], one[0].listed))
    return [each for _, _, each in by_age]


def _written(directory: str) -> float:
    try:
        return os.stat(directory).st_mtime
    except FileNotFoundError:  # it has appeared meanwhile
        return time.time()


def appear(hidden: str, place: str, found: Durable) -> None:
    """What was announced, of its durable checkpoint. Raises OSError."""
    link_images(hidden, found)
    link_listing(hidden, found)
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

    What names a checkpoint of another job than the client's is left alone. One rank has it, for all.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self.lock = threading.Lock()
        """Who holds it sees no directory appear or go."""
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
        self._then(partial(self._await, hidden, place, origin, handle))

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
        """Brings what an earlier life announced in the folder, where it is durable; drops what is lost.

        What cannot be told is left, with a word in the log. Raises OSError for a folder that cannot be read, and what
        the daemon's answer raises.
        """
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

    def _await(self, hidden: str, place: str, origin: Origin, handle: SaveHandle) -> None:
        self._failed = True
        try:
            handle.wait("durable")
            with self.lock:
                found = durable(self._client, origin)
                if found is None:
                    raise SaveFailedError(f"{origin.path} is not there any more, or is another run's")
                appear(hidden, place, found)
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
        for coming in [coming for coming in comings(folder) if coming.hidden not in self._expected]:
            try:
                self._finish_one(coming)
            except (CkptdError, OSError) as error:  # the others are no worse for it
                log.warning("ckptd: %s does not appear: %s", coming.place, error)

    def _finish_one(self, coming: Coming) -> None:
        origin, hidden, place = coming
        if origin is None or _is_outdated(origin.save, hidden, place):
            _discard(hidden)
        elif not is_of(self._client, origin):  # files of a store that nobody here has named get no name here
            log.warning("ckptd: %s does not appear: it is of job %r in %s", place, origin.job, origin.store)
        elif (found := durable(self._client, origin)) is not None:
            appear(hidden, place, found)
        elif not staging_of(self._client).has(origin.save):
            log.warning("ckptd: %s does not appear: its checkpoint was lost, or gave way to a newer one", place)
            _discard(hidden)


def _hidden(place: str, word: str) -> str:
    folder, name = os.path.split(place)
    return os.path.join(folder, f".{name}.ckptd-{word}")


def _is_outdated(save: SaveId, hidden: str, place: str) -> bool:
    """Whether something newer lies at the place. What is not known to be older or newer goes by the clock."""
    if not os.path.exists(place):
        return False
    there = origin_of(place)
    if there is not None and (there.save <= save or there.save > save):
        return there.save >= save
    return os.stat(place).st_mtime > os.stat(hidden).st_mtime


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
