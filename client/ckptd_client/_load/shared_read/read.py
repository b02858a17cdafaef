"""Reads what this rank wants of a checkpoint on the store: together with the job's other ranks, if they come too."""

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from ckptd.shared.base.errors import DamagedError
from ckptd.shared.format.digest import BLOCK_NBYTES, DIGEST_NBYTES, digest
from ckptd.shared.format.integrity import XXH3, Integrity
from ckptd.shared.format.manifest import FileRecord
from ckptd_client._load.reader import Pieces, Source, Target, copy_blocks, pieces_of
from ckptd_client._load.shared_read.node_group import Board, Buffer
from ckptd_client._load.shared_read.participants import Company
from ckptd_client._load.shared_read.peer_exchange import Neighbours
from ckptd_client._load.shared_read.schedule import Blocks, SharedBlock
from ckptd_client._local.destination import land

_READERS = 4  # reads in flight


def copy_out_together(
    open_source: Callable[[int], Source],
    targets: Mapping[int, list[Target]],
    records: Sequence[FileRecord],
    company: Company | None,
    integrity: Integrity = XXH3,
) -> None:
    """Fills the targets, by rank of the image, from its source. Raises DamagedError for a bad block, OSError.

    records: of every image of the checkpoint. Only blocks that hold something of a target are read.
    """
    blocks = Blocks([record.nbytes for record in records])
    wanted = {rank: pieces_of(found, BLOCK_NBYTES) for rank, found in targets.items()}
    alone = {blocks.number(rank, index) for rank, pieces in wanted.items() for index in pieces}
    with contextlib.ExitStack() as stack:
        if company is not None:
            alone -= _taken_together(company, stack, open_source, wanted, records, blocks, alone, integrity)
        for rank, pieces in sorted(wanted.items()):
            left = [index for index in sorted(pieces) if blocks.number(rank, index) in alone]
            if left:
                source = open_source(rank)
                try:
                    copy_blocks(source, pieces, left)
                finally:
                    source.close()


def _taken_together(  # noqa: PLR0913, PLR0917
    company: Company,
    stack: contextlib.ExitStack,
    open_source: Callable[[int], Source],
    wanted: Mapping[int, Pieces],
    records: Sequence[FileRecord],
    blocks: Blocks,
    numbers: Collection[int],
    integrity: Integrity,
) -> set[int]:
    """Copies out what several want, and returns the blocks that it got. stack: closed when this rank is done."""
    meeting = company.meeting
    board = meeting.board(blocks, digest(b"".join(record.digests for record in records)))
    neighbours = _neighbours(company, board, integrity)
    ask = _asking(company, neighbours) if neighbours is not None else None
    if neighbours is not None:
        stack.callback(neighbours.close)
    met = board is not None and board.meet(numbers, ask)
    if board is None or not met:
        if company.gate is not None:
            company.gate.refuse(meeting.save)
        return set()
    stack.callback(board.leave)  # whatever goes wrong here, nobody waits for this rank
    if neighbours is not None and company.gate is not None:
        company.gate.serve(meeting.save, board, blocks)
        stack.callback(board.wait_for_nodes)
        stack.enter_context(neighbours.fetching(board, blocks, _checking(records, blocks, integrity)))
        stack.push(_on_error(neighbours.close))
    stack.push(_on_error(board.leave))  # before threads are waited for
    return _shared(board, blocks, open_source, wanted)


def _on_error(act: Callable[[], None]) -> Callable[[object, object, object], None]:
    return lambda kind, _error, _trace: act() if kind is not None else None


def _neighbours(company: Company, board: Board | None, integrity: Integrity) -> Neighbours | None:
    """Other nodes, for the one rank that speaks with them."""
    if board is None or not board.first or company.gate is None:
        return None
    meeting = company.meeting
    return Neighbours(company.job, meeting.save, company.gates, meeting.node, integrity)


def _asking(company: Company, neighbours: Neighbours) -> Callable[[bytes], Mapping[int, bytes]]:
    gate, save = company.gate, company.meeting.save
    assert gate is not None  # noqa: S101 - who has neighbours has a gate

    def ask(wants: bytes) -> Mapping[int, bytes]:
        gate.show(save, wants)
        return neighbours.wants(len(wants))

    return ask


def _checking(records: Sequence[FileRecord], blocks: Blocks, integrity: Integrity) -> Callable[[int, memoryview], None]:
    """Holds a block that came from another node against its digest."""

    def check(block: int, view: memoryview) -> None:
        rank, index = blocks.place(block)
        if integrity.digest(view) != records[rank].digests[index * DIGEST_NBYTES : (index + 1) * DIGEST_NBYTES]:
            raise DamagedError(f"block {index} of {records[rank].name} was damaged on the way from another node")

    return check


def _shared(
    board: Board, blocks: Blocks, open_source: Callable[[int], Source], wanted: Mapping[int, Pieces]
) -> set[int]:
    """Copies out what several ranks want, and returns the blocks that it got."""
    mine = board.mine

    sources = _Sources(open_source, [blocks.place(one.block)[0] for one in mine])

    def read(one: SharedBlock) -> None:
        rank, index = blocks.place(one.block)

        def into(buffer: Buffer) -> None:
            with sources.of(rank) as source:
                source.checked(index, buffer)

        board.fill(one, into)

    taken: set[int] = set()
    with contextlib.ExitStack() as stack:
        stack.callback(board.done)
        stack.callback(sources.close)
        pool = stack.enter_context(ThreadPoolExecutor(_READERS))
        stack.push(_on_error(board.leave))
        for one in mine:
            pool.submit(read, one)  # what it raises comes again where the block is read alone
        for one in board.shared:
            buffer = board.take(one)
            if buffer is not None:
                rank, index = blocks.place(one.block)
                land(wanted[rank][index], buffer.address)
                taken.add(one.block)
            board.release(one)
    return taken


class _Sources:
    """Images that this rank reads blocks of, each open from its first block to its last: a job has thousands.

    ranks: of the image of each block. For threads.
    """

    def __init__(self, open_source: Callable[[int], Source], ranks: Sequence[int]) -> None:
        self._open_source = open_source
        self._left = Counter(ranks)
        self._open: dict[int, Source] = {}
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def of(self, rank: int) -> Iterator[Source]:
        """The image, for one of its blocks. Raises DamagedError, OSError."""
        with self._lock:
            if rank not in self._open:
                self._open[rank] = self._open_source(rank)
            source = self._open[rank]
        try:
            yield source
        finally:
            with self._lock:
                self._left[rank] -= 1
                if not self._left[rank]:
                    self._open.pop(rank).close()

    def close(self) -> None:
        """When no thread reads any more."""
        for source in self._open.values():
            source.close()
        self._open.clear()
