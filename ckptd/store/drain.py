"""Slots to files of a save: maps each slot while it is written and makes sure that it stays the save's to the end."""

import contextlib
import mmap
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from types import TracebackType
from typing import Self

from ckptd.shared.base.errors import CkptdError
from ckptd.shared.base.ids import JobKey, SaveId
from ckptd.shared.files.mapping import POPULATE_READ, Mapping
from ckptd.shared.format.integrity import XXH3, Integrity
from ckptd.shared.format.layout import extents
from ckptd.shared.format.slot import SEALS_NBYTES, Seal, SlotState, align_up, decode_seals
from ckptd.store.image import WRITERS, Flow, Image, Report
from ckptd.store.interface import Store
from ckptd.store.messages import Drain, Drained, DrainFile
from ckptd.system import failpoints


class SlotChangedError(CkptdError):
    """The slot does not hold the save that was to be drained, or no longer."""

    code = "slot-changed"


class MappedSlot:
    """A slot of a save, mapped read-only, as a context. Takes no lock: the daemon keeps the slot for the drain."""

    def __init__(self, job: JobKey, save: SaveId, file: DrainFile, integrity: Integrity = XXH3) -> None:
        self._job, self._save = job, save
        self._file = file
        self._integrity = integrity
        self._fd = os.open(file.slot_path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            self.check()
            # Whole pages, because the last direct write is rounded up to one.
            self._map = Mapping(self._fd, align_up(file.start + file.nbytes), writable=False)
        except BaseException:
            os.close(self._fd)
            raise
        self.image = self._map.view[file.start :]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.image.release()
        self._map.close()
        os.close(self._fd)

    @contextlib.contextmanager
    def window(self, start: int, stop: int) -> Iterator[None]:
        """Some of the file's bytes, whole pages, that are mapped at once before and unmapped after."""
        start, stop = self._file.start + start, self._file.start + stop
        with contextlib.suppress(OSError):  # Linux before 5.14: each page is mapped as it is written
            self._map.advise(POPULATE_READ, start, stop - start)
        yield
        self._map.advise(mmap.MADV_DONTNEED, start, stop - start)

    def check(self) -> None:
        """Raises SlotChangedError unless the slot's seal is in force and is this save's."""
        nbytes = os.fstat(self._fd).st_size
        seal = Seal()
        file = self._file
        if nbytes >= align_up(file.start + file.nbytes) + SEALS_NBYTES:
            pages = os.pread(self._fd, SEALS_NBYTES, nbytes - SEALS_NBYTES)
            seal = decode_seals(pages, self._integrity, where=file.slot_path)[2]
        sealed = seal.state in {SlotState.SEALED, SlotState.DIGESTED}
        files = extents(seal.rank, seal.image_nbytes, seal.parts, raw=seal.raw)
        theirs = (seal.job, seal.save, (file.name, file.start, file.nbytes) in files)
        if not sealed or theirs != (self._job, self._save, True):
            held = f"{seal.save} with {seal.image_nbytes} bytes" if sealed else "nothing sealed"
            wanted = f"{self._save} of job {self._job.job!r} with {file.nbytes} bytes of {file.name}"
            raise SlotChangedError(f"{self._file.slot_path}: holds {held}, not {wanted}")


def drain(store: Store, order: Drain, report: Report) -> Drained:
    """All files of the order put to the store.

    report: called from other threads. Raises OSError of store or slot, or SlotChangedError.
    """
    start_s = time.monotonic()
    flow = Flow(bytes_per_s=order.bytes_per_s, writers=WRITERS if len(order.files) == 1 else 2, report=report)
    left = Counter(file.slot_path for file in order.files)
    lock = threading.Lock()

    @contextlib.contextmanager
    def image(file: DrainFile) -> Iterator[Image]:
        with MappedSlot(JobKey(store.url, order.job), order.save, file, store.integrity) as slot:
            yield Image(file.name, file.nbytes, slot.image, slot.check, slot.window)
        with lock:  # each image's last file finds nothing left
            left[file.slot_path] -= 1
            if left[file.slot_path]:
                failpoints.reach("drain.between-parts")

    if not store.put_files(order.job, order.save, order.folder, [partial(image, file) for file in order.files], flow):
        return Drained(0, 0.0, committed=True)
    return Drained(sum(file.nbytes for file in order.files), time.monotonic() - start_s)
