"""Reads what this rank wants of a checkpoint on the store, together with the job's other ranks if they read it too."""

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from ckptd.shared.base.errors import DamagedError
from ckptd.shared.format.digest import BLOCK_NBYTES, DIGEST_NBYTES, digest
from ckptd.shared.format.integrity import XXH3, Integrity
from ckptd.shared.format.manifest import FileRecord
from ckptd_client._load.reader import Buffer, Pieces, Source, Target, copy_blocks, pieces_of
from ckptd_client._load.shared_read.node_group import NodeGroup
from ckptd_client._load.shared_read.participants import Participants
from ckptd_client._load.shared_read.peer_exchange import PeerNodes
from ckptd_client._load.shared_read.schedule import Blocks, SharedBlock
from ckptd_client._local.destination import deliver

_READERS = 4  # reads in flight


def copy_out_together(
    open_source: Callable[[int], Source],
    targets: Mapping[int, list[Target]],
    records: Sequence[FileRecord],
    participants: Participants | None,
    integrity: Integrity = XXH3,
) -> None:
    """Fills the targets, by rank of the image, from that image. Raises DamagedError for a bad block, OSError.

    records: of every image of the checkpoint. Only blocks that hold something of a target are read.
    """
    blocks = Blocks([record.nbytes for record in records])
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
    records: Sequence[FileRecord],
    blocks: Blocks,
    numbers: Collection[int],
    integrity: Integrity,
) -> set[int]:
    """Copies out blocks that several members want and returns their numbers. stack: closed when this rank is done."""
    rendezvous = participants.rendezvous
    group = rendezvous.open(blocks, digest(b"".join(record.digests for record in records)))
    peers = _peers(participants, group, integrity)
    ask = _node_wants(participants, peers) if peers is not None else None
    if peers is not None:
        stack.callback(peers.close)
    if group is None or not group.join(numbers, ask):
        if participants.exchange is not None:
            participants.exchange.refuse(rendezvous.save)
        return set()
    stack.callback(group.leave)  # whatever fails here, no member waits for this rank
    if peers is not None and participants.exchange is not None:
        participants.exchange.serve(rendezvous.save, group, blocks)
        stack.callback(group.wait_for_nodes)
        stack.enter_context(peers.receiving(group, blocks, _checking(records, blocks, integrity)))
        stack.push(_on_error(peers.close))
    stack.push(_on_error(group.leave))  # before threads are waited for
    return _copy_shared(group, blocks, open_source, wanted)


def _on_error(act: Callable[[], None]) -> Callable[[object, object, object], None]:
    return lambda kind, _error, _trace: act() if kind is not None else None


def _peers(participants: Participants, group: NodeGroup | None, integrity: Integrity) -> PeerNodes | None:
    """Connections to other nodes, at the one rank that exchanges blocks with them."""
    if group is None or not group.is_leader or participants.exchange is None:
        return None
    rendezvous = participants.rendezvous
    return PeerNodes(participants.job, rendezvous.save, participants.exchanges, rendezvous.node, integrity)


def _node_wants(participants: Participants, peers: PeerNodes) -> Callable[[bytes], Mapping[int, bytes]]:
    exchange, save = participants.exchange, participants.rendezvous.save
    assert exchange is not None  # noqa: S101 - a rank with peers has an exchange

    def ask(wants: bytes) -> Mapping[int, bytes]:
        exchange.announce(save, wants)
        return peers.wants(len(wants))

    return ask


def _checking(records: Sequence[FileRecord], blocks: Blocks, integrity: Integrity) -> Callable[[int, memoryview], None]:
    """Gives a function that compares a block from another node with its digest."""

    def check(block: int, view: memoryview) -> None:
        rank, index = blocks.place(block)
        if integrity.digest(view) != records[rank].digests[index * DIGEST_NBYTES : (index + 1) * DIGEST_NBYTES]:
            raise DamagedError(f"block {index} of {records[rank].name} was damaged on the way from another node")

    return check


def _copy_shared(
    group: NodeGroup, blocks: Blocks, open_source: Callable[[int], Source], wanted: Mapping[int, Pieces]
) -> set[int]:
    """Copies out blocks that several members want and returns their numbers."""
    reads = group.own_reads
    sources = _Sources(open_source, [blocks.place(one.block)[0] for one in reads])

    def read(one: SharedBlock) -> None:
        rank, index = blocks.place(one.block)

        def into(buffer: Buffer) -> None:
            with sources.of(rank) as source:
                source.checked(index, buffer)

        group.fill(one, into)

    taken: set[int] = set()
    with contextlib.ExitStack() as stack:
        stack.callback(group.done)
        stack.callback(sources.close)
        pool = stack.enter_context(ThreadPoolExecutor(_READERS))
        stack.push(_on_error(group.leave))
        for one in reads:
            pool.submit(read, one)  # an error occurs again when this rank reads the block alone
        for one in group.shared:
            buffer = group.take(one)
            if buffer is not None:
                rank, index = blocks.place(one.block)
                deliver(wanted[rank][index], buffer.address)
                taken.add(one.block)
            group.release(one)
    return taken


class _Sources:
    """Images from which this rank reads blocks, each open from its first block to its last: a job has thousands.

    ranks: the image of each block. For threads.
    """

    def __init__(self, open_source: Callable[[int], Source], ranks: Sequence[int]) -> None:
        self._open_source = open_source
        self._left = Counter(ranks)
        self._open: dict[int, Source] = {}
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def of(self, rank: int) -> Iterator[Source]:
        """Gives the image while one of its blocks is read. Raises DamagedError, OSError."""
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
        """Closes all images. No thread may read any more."""
        for source in self._open.values():
            source.close()
        self._open.clear()
