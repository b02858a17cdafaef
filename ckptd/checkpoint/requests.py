"""What a daemon's store worker does on committed checkpoints, by the code of the offline commands."""

import os
from collections.abc import Callable

from ckptd.checkpoint.repair.copies import Copied, mend_from_copies
from ckptd.checkpoint.repair.files import Bytes, OpenFiles, block_buffer
from ckptd.checkpoint.repair.run import rebuild
from ckptd.checkpoint.report import Problem
from ckptd.checkpoint.scrub import scrub_piece
from ckptd.checkpoint.throttle import Throttle
from ckptd.shared.base.errors import CkptdError, DamagedError
from ckptd.shared.base.ids import rank_of_image
from ckptd.shared.format.committed import open_records
from ckptd.shared.format.digest import BLOCK_NBYTES
from ckptd.shared.stores.kinds import open_files
from ckptd.store.interface import Store
from ckptd.store.scrub_messages import (
    MAX_HARMS,
    BlockRead,
    Harm,
    MendCheckpoint,
    Mended,
    PieceRead,
    ReadBlock,
    ScrubCheckpoint,
    ScrubRequest,
    ScrubResult,
)

Alive = Callable[[], None]


def carry_out(store: Store, request: ScrubRequest, alive: Alive) -> ScrubResult:
    """Blocks. alive is called as the work continues. Raises OSError, CkptdError."""
    match request:
        case ScrubCheckpoint():
            return _read(store, request, alive)
        case ReadBlock():
            return BlockRead(_block(store, request))
        case MendCheckpoint():
            return _mended(store, request, alive)


def _read(store: Store, request: ScrubCheckpoint, alive: Alive) -> PieceRead:
    where = store.where(request.job, request.save)
    found = scrub_piece(where, request.place, request.nbytes, store.integrity, lambda _: alive())
    return PieceRead(found.next, found.nbytes, list(map(harm_of, found.problems[:MAX_HARMS])), found.gone)


def harm_of(problem: Problem) -> Harm:
    """With the rank, of an image's file."""
    name = os.path.basename(problem.path)
    return Harm(problem.path, str(problem).removeprefix(f"{problem.path}:").strip(), rank_of_image(name))


def _block(store: Store, request: ReadBlock) -> bytes:
    """Raises DamagedError: the store's block is no better."""
    location = store.where(request.job, request.save)
    record = open_records(open_files(location, store.integrity), save=request.save)[request.rank]
    start = request.block * BLOCK_NBYTES
    stop = min(start + BLOCK_NBYTES, record.nbytes)
    data = block_buffer()[: max(0, stop - start)]
    image = Bytes(open_files(location, store.integrity), record.extents(), record.digests, record.nbytes)
    with OpenFiles(image.files, cached=False) as files:
        try:
            image.read(files, start, data)
        except EOFError as error:
            raise DamagedError(f"{location}: the image of rank {request.rank} {error}") from error
    if start >= stop or not image.sound(request.block, data):
        raise DamagedError(f"{location}: block {request.block} of rank {request.rank} is damaged there, too")
    return bytes(data)


def _mended(store: Store, request: MendCheckpoint, alive: Alive) -> Mended:
    """What has a slot from there; where that is not enough, from parity. Named is only what got its new files."""
    where, ranks, copied = store.where(request.job, request.save), set(request.ranks), Copied()
    if request.slots:
        throttle = Throttle(request.bytes_per_s, alive)
        copied = mend_from_copies(where, dict(request.slots), throttle, store.integrity)
    left = ranks - copied.written - copied.sound
    rebuilt, lost, why = set[int](), left, [*copied.problems.values()]
    if left:
        try:
            outcome = rebuild(where, Throttle(request.bytes_per_s, alive), store.integrity, cached=False)
        except CkptdError as error:
            why.append(error.message)
        else:
            lost = left & {rank for one in outcome.lost for rank in one.ranks}
            names = map(os.path.basename, outcome.rebuilt)
            rebuilt = left & {rank for name in names if (rank := rank_of_image(name)) is not None} - lost
            why += [f"{one.path}: {one.what}" for one in outcome.lost]
    return Mended(sorted(copied.written & ranks), sorted(rebuilt), sorted(lost), "; ".join(why))
