"""Pulls parts of other nodes' segments into partial segments of this one. Blocks.

Each block that a range touches is checked by the node that sends it, each frame here. What of a range is there already
is not pulled again.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, NamedTuple

from ckptd.arena.partial_segments import Partial, PartialSegments
from ckptd.parity.sources import Source, Sources
from ckptd.parity.streams import cuts
from ckptd.shared.base.errors import BudgetError, CkptdError, DamagedError
from ckptd.shared.base.ids import JobKey
from ckptd.shared.bulk import wire
from ckptd.shared.format.byte_ranges import Ranges, merged, unpacked
from ckptd.shared.format.slot import Seal

_THREADS: Final = 4  # nodes at a time, for one rank
_FRAME_NBYTES: Final = 4 << 20
_WINDOW_NBYTES: Final = 32 << 20  # asked for ahead
_WINDOW_RANGES: Final = 1024


class Part(NamedTuple):
    """What is wanted of the segment of this seal. ranges: pairs of offset and bytes, as in AskSegments."""

    seal: Seal
    ranges: bytes


@dataclass(slots=True)
class Pulled:
    """What became of it: names of files by rank, and why others are not there; bytes that came."""

    files: dict[int, str] = field(default_factory=dict)
    lacks: dict[int, str] = field(default_factory=dict)
    nbytes: int = 0


def pull(partials: PartialSegments, job: JobKey, wanted: dict[str, list[Part]], sources: Sources) -> Pulled:
    """Has all that is wanted, by the node that holds it. Raises BudgetError, OSError when this node cannot have it."""
    pulled = Pulled()

    def of_node(node: str) -> int:
        return _of_node(partials, job, (node, wanted[node]), sources, pulled)

    with ThreadPoolExecutor(min(_THREADS, len(wanted)), thread_name_prefix="pull") as pool:
        pulled.nbytes = sum(done.result() for done in [pool.submit(of_node, node) for node in wanted])
    return pulled


def _of_node(
    partials: PartialSegments, job: JobKey, of: tuple[str, list[Part]], sources: Sources, pulled: Pulled
) -> int:
    """One connection; another after a segment that could not be had. Returns the bytes that came."""
    node, parts = of
    nbytes = 0
    source: Source | None = None
    try:
        for part in parts:
            try:
                partial = partials.of(part.seal)
                with partial.lock:
                    missing = partial.lacks(_ranges_of(part))
                    if missing and source is None:
                        source = sources.open(node)
                    if missing and source is not None:
                        partials.take_memory(partial, missing)
                        _receive(source, job, partial, missing, sources)
                        partial.there = merged([*partial.there, *missing])
                        nbytes += sum(stop - start for start, stop in missing)
                pulled.files[part.seal.rank] = partial.name
            except BudgetError:
                raise
            except CkptdError as error:
                pulled.lacks[part.seal.rank] = error.message
                if source is not None:
                    source.close()
                source = None
    finally:
        if source is not None:
            source.close()
    return nbytes


def _ranges_of(part: Part) -> Iterator[tuple[int, int]]:
    """Of the image, and the tail without what no reader wants of it. Raises DamagedError for bytes beyond the image."""
    seal = part.seal
    yield seal.table_offset, seal.objects_offset
    for start, stop in unpacked(part.ranges):
        if stop > seal.image_nbytes:
            raise DamagedError(f"bytes {start} to {stop} of an image of {seal.image_nbytes} bytes")
        yield start, stop


def _receive(source: Source, job: JobKey, partial: Partial, ranges: Ranges, sources: Sources) -> None:
    seal = partial.seal
    if seal.save is None:
        raise DamagedError("the seal of no save")
    windows = _windows(seal, ranges)
    ahead = next(windows, [])
    source.ask(job, seal.save, 0, ahead)
    while ahead:
        window, ahead = ahead, next(windows, [])
        if ahead:
            source.ask(job, seal.save, 0, ahead)
        for asked in window:
            sources.cancel.check()
            source.receive(partial.view[asked.offset : asked.offset + asked.nbytes])


def _windows(seal: Seal, ranges: Ranges) -> Iterator[list[wire.Range]]:
    frames = _frames(seal, ranges)
    while window := list(_first(frames)):
        yield window


def _first(frames: Iterator[wire.Range]) -> Iterator[wire.Range]:
    nbytes = 0
    for frame in islice(frames, _WINDOW_RANGES):
        yield frame
        nbytes += frame.nbytes
        if nbytes >= _WINDOW_NBYTES:
            return


def _frames(seal: Seal, ranges: Ranges) -> Iterator[wire.Range]:
    for first, stop in ranges:
        for _, offset, nbytes in cuts(seal, first, stop):
            for start in range(offset, offset + nbytes, _FRAME_NBYTES):
                yield wire.Range(seal.rank, start, min(_FRAME_NBYTES, offset + nbytes - start), True)


def parts_by_node(pulls: Sequence[tuple[str, Seal, bytes]]) -> dict[str, list[Part]]:
    """What is wanted, by the node that holds it."""
    found: dict[str, list[Part]] = {}
    for node, seal, ranges in pulls:
        found.setdefault(node, []).append(Part(seal, ranges))
    return found
