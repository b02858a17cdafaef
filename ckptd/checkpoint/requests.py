"""What a daemon's store worker does on committed checkpoints, by the code of the offline commands."""

import os
from collections.abc import Callable

from ckptd.checkpoint.repair.copies import mend_from_copies
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
    with OpenFiles(image.files) as files:
        try:
            image.read(files, start, data)
        except EOFError as error:
            raise DamagedError(f"{location}: the image of rank {request.rank} {error}") from error
    if start >= stop or not image.sound(request.block, data):
        raise DamagedError(f"{location}: block {request.block} of rank {request.rank} is damaged there, too")
    return bytes(data)


def _mended(store: Store, request: MendCheckpoint, alive: Alive) -> Mended:
    """What has a slot from there; where that is not enough, from parity."""
    where, copies = store.where(request.job, request.save), dict(request.slots)
    ranks, sound = set(request.ranks), set[int]()
    try:
        if copies:
            sound = mend_from_copies(where, copies, Throttle(request.bytes_per_s, alive), store.integrity)
        if ranks <= sound:
            return Mended("memory")
        outcome = rebuild(where, Throttle(request.bytes_per_s, alive), store.integrity)
    except CkptdError as error:
        return Mended("memory" if sound else "", sorted(ranks - sound), error.message)
    lost = {rank for one in outcome.lost if (rank := rank_of_image(os.path.basename(one.path))) is not None}
    why = "; ".join(f"{one.path}: {one.what}" for one in outcome.lost)
    return Mended("memory, or parity on the store" if sound else "parity on the store", sorted(lost & ranks), why)
