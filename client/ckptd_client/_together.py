"""Reads what this rank wants of a checkpoint on the store: together with the node's other ranks, if they come too."""

import contextlib
import ctypes
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from ckptd.protocol.digest import BLOCK_NBYTES, block_count
from ckptd_client._board import Board, Buffer, Meeting, SharedBlock
from ckptd_client._restore import Pieces, Source, Target, copy_blocks, pieces_of

_READERS = 4  # reads in flight
_MAX_OPEN = 256  # images at a time


def copy_out_together(
    open_source: Callable[[int], Source],
    targets: Mapping[int, list[Target]],
    sizes: Sequence[int],
    meeting: Meeting | None,
) -> None:
    """Fills the targets, by rank of the image, from its source. Raises DamagedError for a bad block, OSError.

    sizes: bytes of every image of the checkpoint. Only blocks that hold something of a target are read.
    """
    bases, total = [], 0
    for nbytes in sizes:
        bases.append(total)
        total += block_count(nbytes)
    wanted = {rank: pieces_of(found, BLOCK_NBYTES) for rank, found in targets.items()}
    numbers = {bases[rank] + index: (rank, index) for rank, pieces in wanted.items() for index in pieces}
    board = meeting.board(numbers, total) if meeting is not None and len(targets) <= _MAX_OPEN else None
    alone = set(numbers)
    if board is not None:
        alone -= _shared(board, numbers, open_source, wanted)
    for rank, pieces in sorted(wanted.items()):
        left = [index for index in sorted(pieces) if bases[rank] + index in alone]
        if left:
            source = open_source(rank)
            try:
                copy_blocks(source, pieces, left)
            finally:
                source.close()


def _shared(
    board: Board,
    numbers: Mapping[int, tuple[int, int]],
    open_source: Callable[[int], Source],
    wanted: Mapping[int, Pieces],
) -> set[int]:
    """Copies out what several ranks want, and returns the blocks that it got."""
    mine = sorted({numbers[one.block][0] for one in board.shared if one.mine})

    def read(one: SharedBlock) -> None:
        rank, index = numbers[one.block]

        def into(buffer: Buffer) -> None:
            sources[rank].checked(index, buffer)

        board.fill(one, into)

    taken: set[int] = set()
    sources: dict[int, Source] = {}
    with contextlib.ExitStack() as stack:
        stack.callback(board.leave)  # whatever goes wrong here, nobody waits for this rank
        for rank in mine:
            sources[rank] = open_source(rank)
            stack.callback(sources[rank].close)
        pool = stack.enter_context(ThreadPoolExecutor(_READERS))
        stack.callback(board.leave)  # before the threads are waited for
        for one in board.shared:
            if one.mine:
                pool.submit(read, one)  # what it raises comes again where the block is read alone
        for one in board.shared:
            buffer = board.take(one)
            if buffer is not None:
                rank, index = numbers[one.block]
                for offset, address, nbytes in wanted[rank][index]:
                    ctypes.memmove(address, buffer.address + offset, nbytes)
                taken.add(one.block)
            board.release(one)
    return taken
