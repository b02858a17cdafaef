"""Has a lost or remote segment in a slot of this node: pulled, solved, checked, and only then sealed. Blocks."""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Final, NamedTuple

from ckptd.arena.arena import Arena
from ckptd.parity.engine import Progress, Pull
from ckptd.parity.plan import Map, Task, map_of
from ckptd.parity.sources import Source, Sources, look
from ckptd.parity.streams import TAIL, block_range, cuts
from ckptd.parity.table import Table
from ckptd.shared.base.errors import DamagedError
from ckptd.shared.base.ids import JobKey
from ckptd.shared.bulk import wire
from ckptd.shared.bulk.sockets import Cancel
from ckptd.shared.format.digest import BLOCK_NBYTES, DIGEST_NBYTES, KIND, block_count
from ckptd.shared.format.integrity import KEYED_KIND, Integrity, Purpose
from ckptd.shared.format.slot import SEALS_NBYTES, Seal, align_up
from ckptd.shared.protocol.parity_types import ParityChunk
from ckptd.system import failpoints

THREADS: Final = 2
_FRAME_NBYTES: Final = 1 << 20
_WINDOW: Final = 64


class Fetched(NamedTuple):
    """A sealed slot of this node."""

    slot: str
    capacity: int


class Place(NamedTuple):
    """Where a segment is to be made."""

    arena: Arena
    job: JobKey
    seal: Seal


Accuse = Callable[[int], None]  # of a block that came out wrong: raises when a source's own copy is


def copy_segment(place: Place, node: str, sources: Sources, progress: Progress) -> Fetched:
    """The segment as the node has it. Raises PeerError, DamagedError, BudgetError, OSError; no slot is left then."""

    def fill(view: memoryview) -> None:
        source = sources.open(node)
        try:
            _copy(source, place, view, sources, progress)
        finally:
            source.close()

    def accuse(block: int) -> None:
        offset = block_range(place.seal, block)[0]
        look(sources, node, place.job, place.seal.save, [wire.Range(place.seal.rank, offset, 0, True)])

    return _fetch(place, fill, accuse, Table(place.seal.image_nbytes, place.arena.integrity))


def rebuild_segment(  # noqa: PLR0913, PLR0917 - what there is, where it is, and how to get it
    place: Place,
    parity_chunk: ParityChunk,
    homes: Mapping[int, str],
    parity_chunks: Mapping[int, str],
    sources: Sources,
    progress: Progress,
) -> Fetched:
    """The segment, rebuilt from the rest of its set: homes by rank, parity by member. Raises as copy_segment does."""
    where = map_of(parity_chunk, {r: n for r, n in homes.items() if r != place.seal.rank}, parity_chunks)
    tasks = where.rebuild(place.seal.rank)
    table = Table(place.seal.image_nbytes, place.arena.integrity)

    def fill(view: memoryview) -> None:
        def solve(task: Task) -> None:
            Pull(sources, place.job, where, task, view, table, verify=False).run(progress, "rebuild.half-pulled")

        _solve(tasks, solve, sources.cancel)

    def accuse(block: int) -> None:
        start, stop = block_range(place.seal, block)
        for task in tasks:
            length = task.last - task.first
            if any(offset < stop and start < offset + length for _, offset in task.outputs):
                for node, ranges in _inputs(where, task).items():
                    look(sources, node, place.job, parity_chunk.save, ranges, parity_chunk.epoch)

    return _fetch(place, fill, accuse, table)


# --- the slot


def _fetch(place: Place, fill: Callable[[memoryview], None], accuse: Accuse, table: Table) -> Fetched:
    arena, job, seal = place
    arena.integrity.check(KEYED_KIND if seal.key_id else KIND, seal.key_id, f"segment of rank {seal.rank}")
    capacity = align_up(seal.content_nbytes) + SEALS_NBYTES
    arena.reserve(seal.rank, 1, capacity)
    slot = arena.allocate(job, seal.rank, capacity)
    try:
        failpoints.reach("rebuild.slot-made")
        view = arena.view(job, slot)
        fill(view)
        view[seal.image_nbytes : seal.table_offset] = bytes(seal.table_offset - seal.image_nbytes)
        failpoints.reach("rebuild.before-check")
        _check(view, seal, accuse, table, arena.integrity)
        failpoints.reach("rebuild.before-seal")
        arena.seal(job, slot, seal)
        failpoints.reach("rebuild.after-seal")
    except BaseException:
        arena.unlink(job, slot)
        raise
    return Fetched(slot, capacity)


def _check(view: memoryview, seal: Seal, accuse: Accuse, table: Table, integrity: Integrity) -> None:
    """Holds every byte against the seal, the image as table found it.

    Raises DamagedError that says which block, and whose fault if it is known.
    """
    for what, part in seal.tail.items():
        if integrity.digest(view[part.offset : part.offset + part.nbytes], Purpose(what)) != part.digest:
            accuse(TAIL)
            raise DamagedError(f"rank {seal.rank}: {what} came out damaged, and every source's own copy is sound")

    def right(block: int) -> bool:
        at = seal.table_offset + block * DIGEST_NBYTES
        return table.one(block, view) == view[at : at + DIGEST_NBYTES]

    count = block_count(seal.image_nbytes)
    with ThreadPoolExecutor(THREADS) as pool:
        for block, whole in enumerate(pool.map(right, range(count))):
            if not whole:
                accuse(block)
                raise DamagedError(
                    f"rank {seal.rank}: block {block} came out damaged, and every source's own copy is sound: "
                    "it was damaged on the wire, or in this node's memory"
                )


# --- a copy


def _copy(source: Source, place: Place, view: memoryview, sources: Sources, progress: Progress) -> None:
    seal = place.seal
    if seal.save is None:
        raise DamagedError("the seal of no save")
    windows = _windows(seal)
    ahead = next(windows, [])
    source.ask(place.job, seal.save, 0, ahead)
    while ahead:
        window, ahead = ahead, next(windows, [])
        if ahead:
            source.ask(place.job, seal.save, 0, ahead)
        for asked in window:
            sources.cancel.check()
            source.receive(view[asked.offset : asked.offset + asked.nbytes])
            progress(asked.nbytes)
        failpoints.reach("rebuild.half-pulled")


def _windows(seal: Seal) -> Iterator[list[wire.Range]]:
    window = []
    for _, offset, nbytes in cuts(seal, 0, seal.content_nbytes):
        for start in range(offset, offset + nbytes, _FRAME_NBYTES):
            window.append(wire.Range(seal.rank, start, min(_FRAME_NBYTES, offset + nbytes - start), False))
            if len(window) == _WINDOW:
                yield window
                window = []
    if window:
        yield window


# --- a rebuild


def _solve(tasks: list[Task], solve: Callable[[Task], None], cancel: Cancel) -> None:
    """All tasks, a few at a time. The first that fails ends the others."""
    with ThreadPoolExecutor(THREADS) as pool:
        futures = [pool.submit(solve, task) for task in tasks]
        done, left = wait(futures, return_when=FIRST_EXCEPTION)
        failed = next((future for future in done if future.exception()), None)
        if failed is not None:
            for future in left:
                future.cancel()
            cancel.cancel()
            failed.result()


def _inputs(where: Map, task: Task) -> dict[str, list[wire.Range]]:
    """For each node, ranges of no bytes that make it look at every block it gave to the task."""
    ranges: dict[str, list[wire.Range]] = {}
    for symbol in task.inputs:
        for frame in where.frames(task, symbol, task.first, task.last):
            stop = frame.offset + frame.nbytes
            for offset in {*range(frame.offset, stop, BLOCK_NBYTES), stop - 1}:
                ranges.setdefault(frame.node, []).append(wire.Range(frame.rank, offset, 0, True))
    return ranges
