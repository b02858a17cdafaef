"""Segments of a save that lie in the memory of nodes: this rank's daemon has what the rank needs of them here."""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager

from ckptd.shared.base.errors import CkptdError, DamagedError
from ckptd.shared.base.ids import JobKey, SaveId
from ckptd.shared.format.arena_paths import PARTIAL_SUFFIX
from ckptd.shared.format.byte_ranges import RANGE_NBYTES, Ranges, merged, packed, without
from ckptd.shared.format.integrity import XXH3, Integrity
from ckptd.shared.format.packed_layout import Parts, parted
from ckptd.shared.protocol.messages import AskSegments, DropSegments, Reply, Request, SegmentsHere
from ckptd.shared.protocol.segments import Wanted
from ckptd_client._load.image_ranges import Images, ReadAt
from ckptd_client._load.reader import Source, Target, layout_of, open_slot, reopened

Ask = Callable[[Callable[[int], Request], float | None], Reply]
_MOST_RANGES = 32_768  # of one request, which has a mebibyte at most
_MOST_SEGMENTS = 8_192
_GOODBYE_S = 2.0


class LackingError(DamagedError):
    """Segments of these ranks did not come, or are damaged."""

    def __init__(self, message: str, ranks: Iterable[int]) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class MemorySegments:
    """Those of one order to load. ask: as Link.ask; it may be replaced. Methods block, and may be called in threads.

    directory: of the job in the arena. Raises LackingError for what the daemon cannot have, DamagedError, OSError.
    """

    def __init__(self, ask: Ask, directory: str, job: JobKey, save: SaveId, integrity: Integrity = XXH3) -> None:
        self.ask = ask
        self._directory, self._job, self._save, self._integrity = directory, job, save, integrity
        self._names: dict[int, str] = {}
        self._described: dict[int, Source] = {}
        self._there: dict[int, Ranges] = {}  # what was asked for, and came
        self._lock = threading.Lock()

    def describe(self, ranks: Iterable[int]) -> dict[int, Source]:
        """What these ranks' tails say; a source to read from comes from open."""
        new = [rank for rank in ranks if rank not in self._described]
        for at in range(0, len(new), _MOST_SEGMENTS):
            self._have([Wanted(rank) for rank in new[at : at + _MOST_SEGMENTS]])
        for rank in new:
            with self.lacking(rank):
                source = open_slot(self._path(rank), self._job, self._save, rank, self._integrity)
                source.close()
                self._described[rank] = source.closed(holes=self._names[rank].endswith(PARTIAL_SUFFIX))
        return {rank: self._described[rank] for rank in ranks}

    def layout_parts(self, rank: int) -> Parts:
        """The layout of a rank that is described, encoded."""
        with self.lacking(rank):
            path = self._path(rank)
            raw = layout_of(path, self._job, self._save, rank, self._integrity)
            return parted(raw, path)

    def pull(self, targets: Mapping[int, Iterable[Target]]) -> None:
        """Has the bytes of these targets of ranks that are described."""
        self._pull({r: [(t.data_offset, t.data_offset + t.nbytes) for t in some] for r, some in targets.items()})

    def _pull(self, ranges: Mapping[int, Iterable[tuple[int, int]]]) -> None:
        batch, left = list[Wanted](), _MOST_RANGES
        asked: dict[int, Ranges] = {}
        for rank in sorted(ranges):
            if not self._described[rank].holes:
                continue
            missing = without(merged(ranges[rank]), self._there.get(rank, []))
            asked[rank] = missing
            while missing:
                some, missing = missing[:left], missing[left:]
                batch.append(Wanted(rank, packed(some)))
                left -= len(some)
                if not left:
                    self._have(batch)
                    batch, left = [], _MOST_RANGES
        if batch:
            self._have(batch)
        for rank, found in asked.items():
            self._there[rank] = merged([*self._there.get(rank, []), *found])

    def _have(self, wanted: list[Wanted]) -> None:
        assert sum(len(one.ranges) for one in wanted) <= _MOST_RANGES * RANGE_NBYTES  # noqa: S101 - as the callers cut
        with self._lock:
            answer = self.ask(lambda seq: AskSegments(seq=seq, save=self._save, wanted=wanted), None)
        assert isinstance(answer, SegmentsHere)  # noqa: S101 - the reply to AskSegments
        if answer.refused:
            raise DamagedError(answer.refused)
        if answer.lacks:
            texts = dict.fromkeys(f"rank {one.rank}: {one.problem}" for one in answer.lacks[:4])
            raise LackingError("; ".join(texts), [one.rank for one in answer.lacks])
        self._names |= {one.rank: one.name for one in answer.files}

    def open(self, rank: int) -> Source:
        """The segment of a rank that is described, as far as it is here. The caller closes it."""
        with self.lacking(rank):
            return reopened(self._described[rank], self._path(rank), self._job, self._save, rank)

    def _path(self, rank: int) -> str:
        if rank not in self._names:
            raise LackingError(f"rank {rank}: the daemon does not say where its segment is", [rank])
        return os.path.join(self._directory, self._names[rank])

    @contextlib.contextmanager
    def lacking(self, rank: int) -> Iterator[None]:
        """Says whose segment is damaged."""
        try:
            yield
        except LackingError:
            raise
        except DamagedError as error:
            raise LackingError(f"rank {rank}: {error.message}", [rank]) from error

    @property
    def images(self) -> Images:
        """Ranges of the images of all ranks that are described, pulled when they are read."""
        return Images({rank: source.table for rank, source in self._described.items()}, self._reading)

    def _reading(self, rank: int) -> AbstractContextManager[ReadAt]:
        return _open_to_read(self, rank)

    def read_at(self, source: Source, offset: int, nbytes: int) -> memoryview:
        """Bytes of an open source."""
        self._pull({source.layout.rank: [(offset, offset + nbytes)]})
        if source.mapping is None:
            raise DamagedError(f"{source.where} is not in memory")
        return source.mapping.view[offset : offset + nbytes]

    def release(self) -> None:
        """Nothing is read any more: the daemon gives back what it had pulled. Raises nothing."""
        with contextlib.suppress(CkptdError), self._lock:
            self.ask(lambda seq: DropSegments(seq=seq, save=self._save), time.monotonic() + _GOODBYE_S)


@contextlib.contextmanager
def _open_to_read(segments: MemorySegments, rank: int) -> Iterator[ReadAt]:
    with contextlib.closing(segments.open(rank)) as source:
        yield lambda offset, nbytes: segments.read_at(source, offset, nbytes)
