"""Reads what this rank wants of a checkpoint on the store, together with the job's other ranks if they read it too."""

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

from ckptd.shared.base.errors import DamagedError
from ckptd.shared.format.digest import BLOCK_NBYTES, DIGEST_NBYTES
from ckptd.shared.format.integrity import XXH3, Integrity
from ckptd.shared.format.stored_records import StoredRecords
from ckptd_client._load.reader import Buffer, Pieces, Source, Target, copy_blocks, pieces_of
from ckptd_client._load.shared_read.node_group import NodeGroup, Plan
from ckptd_client._load.shared_read.participants import Participants
from ckptd_client._load.shared_read.schedule import Blocks, SharedBlock
from ckptd_client._load.shared_read.senders import Read, Senders
from ckptd_client._local.destination import deliver

_READERS = 4  # reads in flight
_MOST_OPEN = 16  # images


def copy_out_together(
    open_source: Callable[[int], Source],
    targets: Mapping[int, list[Target]],
    records: StoredRecords,
    participants: Participants | None,
    integrity: Integrity = XXH3,
) -> None:
    """Fills the targets, by rank of the image, from that image. Raises DamagedError for a bad block, OSError.

    Only blocks that hold something of a target are read, and of records those of their images.
    """
    blocks = Blocks(records.sizes)
    wanted = {rank: pieces_of(found, BLOCK_NBYTES) for rank, found in targets.items()}
    alone = {blocks.number(rank, index) for rank, pieces in wanted.items() for index in pieces}
    with contextlib.ExitStack() as stack:
        if participants is not None:
            alone -= _copy_together(participants, stack, open_source, wanted, records, blocks, alone, integrity)
        for rank, pieces in sorted(wanted.items()):
            left = [index for index in sorted(pieces) if blocks.number(rank, index) in alone]
            if left:
                source = open_source(rank)
                try:
                    copy_blocks(source, pieces, left)
                finally:
                    source.close()


def _copy_together(  # noqa: PLR0913, PLR0917
    participants: Participants,
    stack: contextlib.ExitStack,
    open_source: Callable[[int], Source],
    wanted: Mapping[int, Pieces],
    records: StoredRecords,
    blocks: Blocks,
    numbers: Collection[int],
    integrity: Integrity,
) -> set[int]:
    """Copies out blocks that several members want and returns their numbers. stack: closed when this rank is done."""
    group = participants.open(blocks, records.proof)
    if group is None:
        return set()
    stack.callback(participants.leave)  # whatever fails from here on, no other waits for this rank
    exchange = participants.open_exchange(group.found, integrity) if group.is_leader else None
    if exchange is not None:
        stack.callback(exchange.close)
    senders: list[Senders] = []

    def meet(wants: bytes) -> Plan:
        if exchange is None or (met := participants.meet(exchange, wants, blocks, group.found)) is None:
            return Plan()
        read = Read(participants.job, exchange.save, met.number, group.found.proof, integrity)
        senders.append(Senders(read, met.addresses))
        return met.plan

    joined = group.join(numbers, meet)
    participants.counted(group.found.read)
    if not joined:
        stack.close()  # before this rank reads alone
        return set()
    files = _OpenImages(open_source)
    stack.callback(files.close)
    if exchange is not None:
        exchange.serve(group, blocks)
        stack.callback(group.wait_for_nodes)
    for some in senders:
        check = _checking(records, blocks, integrity)
        stack.enter_context(some.receiving(group, blocks, check, _filling(blocks, files)))
        stack.push(_on_error(some.close))
    stack.push(_on_error(group.leave))  # before threads are waited for
    return _copy_shared(group, blocks, files, wanted)


def _on_error(act: Callable[[], None]) -> Callable[[object, object, object], None]:
    return lambda kind, _error, _trace: act() if kind is not None else None


def _checking(records: StoredRecords, blocks: Blocks, integrity: Integrity) -> Callable[[int, memoryview], None]:
    """Gives a function that compares a block from another node with its digest."""

    def check(block: int, view: memoryview) -> None:
        rank, index = blocks.place(block)
        if integrity.digest(view) != records[rank].digests[index * DIGEST_NBYTES : (index + 1) * DIGEST_NBYTES]:
            raise DamagedError(f"block {index} of {records[rank].name} was damaged on the way from another node")

    return check


def _filling(blocks: Blocks, files: "_OpenImages") -> Callable[[SharedBlock, Buffer], None]:
    """Gives a function that reads a block from the store into a buffer, and checks it."""

    def fill(one: SharedBlock, buffer: Buffer) -> None:
        rank, index = blocks.place(one.block)
        with files.of(rank) as source:
            source.checked(index, buffer)

    return fill


def _copy_shared(group: NodeGroup, blocks: Blocks, files: "_OpenImages", wanted: Mapping[int, Pieces]) -> set[int]:
    """Copies out blocks that several members want and returns their numbers."""
    fill = _filling(blocks, files)

    def read(one: SharedBlock) -> None:
        group.fill(one, lambda buffer: fill(one, buffer))

    taken: set[int] = set()
    with contextlib.ExitStack() as stack:
        stack.callback(group.done)
        pool = stack.enter_context(ThreadPoolExecutor(_READERS))
        stack.push(_on_error(group.leave))
        for one in group.own_reads:
            pool.submit(read, one)  # an error occurs again when this rank reads the block alone
        for one in group.shared:
            buffer = group.take(one)
            if buffer is not None:
                rank, index = blocks.place(one.block)
                deliver(wanted[rank][index], buffer.address)
                taken.add(one.block)
            group.release(one)
    return taken


class _OpenImages:
    """Images from which this rank reads blocks: the last few stay open, since a job has thousands. For threads."""

    def __init__(self, open_source: Callable[[int], Source]) -> None:
        self._open_source = open_source
        self._users: Counter[int] = Counter()
        self._open: dict[int, Source] = {}  # the one that was used last comes last
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def of(self, rank: int) -> Iterator[Source]:
        """Gives the image while one of its blocks is read. Raises DamagedError, OSError."""
        with self._lock:
            source = self._open.pop(rank, None) or self._open_source(rank)
            self._open[rank] = source
            self._users[rank] += 1
            idle = [one for one in self._open if not self._users[one]]
            for one in idle[: max(0, len(self._open) - _MOST_OPEN)]:
                self._open.pop(one).close()
        try:
            yield source
        finally:
            with self._lock:
                self._users[rank] -= 1

    def close(self) -> None:
        """Closes all images. No thread may read any more."""
        for source in self._open.values():
            source.close()
        self._open.clear()
