"""Partial segments: files of the arena that look like slots of other nodes' ranks, with holes. Blocks; for threads.

Such a file has the size of the segment and a seal, the segment's tail, and those bytes of its image that ranks of this
node have asked for. Nobody finds it but by its name: it is no slot, and is gone with the daemon that made it.
"""

import itertools
import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field

from ckptd.arena.arena import Arena
from ckptd.shared.base.errors import PeerError
from ckptd.shared.base.ids import JobKey
from ckptd.shared.files.mapping import Mapping
from ckptd.shared.format import arena_paths
from ckptd.shared.format.byte_ranges import Ranges, merged, without
from ckptd.shared.format.slot import PAGE, SEALS_NBYTES, Seal, align_up, next_seal


@dataclass(slots=True)
class Partial:
    """One of them. Take ``lock`` to add bytes. ``there``: which bytes it has, ``pages``: which have memory."""

    name: str
    seal: Seal
    view: memoryview
    lock: threading.Lock = field(default_factory=threading.Lock)
    there: Ranges = field(default_factory=list)
    pages: Ranges = field(default_factory=list)

    def lacks(self, ranges: Iterable[tuple[int, int]]) -> Ranges:
        """What of these it has not."""
        return without(merged(ranges), self.there)


class PartialSegments:
    """Those of one save, for one load."""

    _serials = itertools.count(1)  # one for all of this daemon: no two files ever have the same

    def __init__(self, arena: Arena, job: JobKey) -> None:
        self._arena, self._job = arena, job
        self._lock = threading.Lock()
        self._found: dict[int, Partial] | None = {}  # by rank; None: given back

    def of(self, seal: Seal) -> Partial:
        """That of the segment, made when it is missing. Raises BudgetError, OSError; PeerError once given back."""
        with self._lock:
            if self._found is None:
                raise PeerError("the load is over")
            if seal.rank not in self._found:
                self._found[seal.rank] = self._make(seal)
            return self._found[seal.rank]

    def _make(self, seal: Seal) -> Partial:
        name = arena_paths.partial_name(seal.rank, next(self._serials))
        path, capacity = self._arena.slot_path(self._job, name), align_up(seal.content_nbytes) + SEALS_NBYTES
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, capacity)
            partial = Partial(name, seal, Mapping(fd, capacity).view)
        finally:
            os.close(fd)
        try:
            start = capacity - SEALS_NBYTES
            self.take_memory(partial, [(start, capacity)])
        except BaseException:
            self._arena.unlink(self._job, name)
            raise
        offset, page = next_seal(bytes(SEALS_NBYTES), seal, self._arena.integrity)
        partial.view[start + offset : start + offset + len(page)] = page
        return partial

    def take_memory(self, partial: Partial, ranges: Ranges) -> None:
        """Has pages under these ranges, counted in the arena's budget. Raises BudgetError, OSError."""
        new = without(merged((start // PAGE * PAGE, align_up(stop)) for start, stop in ranges), partial.pages)
        rank = partial.seal.rank
        self._arena.fill_in(self._job, partial.name, new, f"what ranks of this node need of rank {rank}'s segment")
        partial.pages = merged([*partial.pages, *new])

    def give_back(self) -> None:
        """All of it. What a rank has mapped stays where it is mapped."""
        with self._lock:
            gone, self._found = self._found or {}, None
        for partial in gone.values():
            self._arena.unlink(self._job, partial.name)
