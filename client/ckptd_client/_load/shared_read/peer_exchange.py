"""Nodes that read the same checkpoint pass each other blocks: each is read from the store by one of them.

The first rank of a node opens a gate for the time of a load: a server of the daemons' bulk protocol, at an address that
the daemons tell the other nodes' ranks. Through it each node first says what it wants, and from what all said each
knows who reads which block. Then it hands out what it reads, in order, while the others wait for it. Who gets nothing
through a gate reads the store itself, as ranks do whose neighbour at the board fails them.
"""

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field

from ckptd.shared.base.errors import CkptdError, PeerError
from ckptd.shared.base.ids import MAX_INCARNATION, JobKey, SaveId
from ckptd.shared.bulk import wire
from ckptd.shared.bulk.client import Address, Connection
from ckptd.shared.bulk.server import BulkServer, Served
from ckptd.shared.bulk.sockets import Cancel
from ckptd.shared.format.integrity import XXH3, Integrity
from ckptd.shared.protocol.read_groups import Gate
from ckptd_client._load.shared_read.node_group import NODES_MEET_S, Board, Buffer
from ckptd_client._load.shared_read.schedule import Blocks, SharedBlock

log = logging.getLogger("ckptd_client")
_WANTS = wire.PARITY  # in place of an image's rank: what the node wants
Check = Callable[[int, memoryview], None]  # a block's number and bytes; raises DamagedError


@dataclass(slots=True)
class _Hall:
    """What other nodes are told and given of one save."""

    wants: bytes
    board: Board | None = None  # once all agree who reads what
    blocks: Blocks | None = None
    epoch: int = 0
    closed: bool = False
    due: dict[int, dict[int, SharedBlock]] = field(default_factory=dict)  # what each node gets, by block

    def due_to(self, node: int) -> dict[int, SharedBlock]:
        """Worked out once for a node: an ask is of one image, and there may be many."""
        assert self.board is not None  # noqa: S101 - only of a hall that serves
        if node not in self.due:
            self.due[node] = {one.block: one for one in self.board.sent_to(node)}
        return self.due[node]


class OpenGate:
    """Open until close. host: this node's address for the job's other nodes. Raises OSError."""

    def __init__(self, host: str, job: JobKey, integrity: Integrity = XXH3) -> None:
        secret = os.urandom(32)
        self._job = job
        self._secret = secret
        self._changed = threading.Condition()
        self._halls: dict[SaveId, _Hall] = {}
        self._server = BulkServer(self._open, lambda _link: secret, host=host, ended=self._ended, integrity=integrity)
        self.address = Gate(host, self._server.port, secret)
        self._server.start()

    def close(self) -> None:
        """Ends every connection, and lets go of the boards."""
        self._server.close()
        with self._changed:
            self._halls = {save: _Hall(b"", closed=True) for save in self._halls}
            self._changed.notify_all()

    # --- the server's threads

    def _open(self, link: str, ask: wire.Ask, rank: int) -> Served:
        node, save = _node_of(link)
        if save != ask.save.text:
            raise PeerError(f"{ask.save} was asked for on a link of another")
        if ask.job != self._job:
            raise PeerError(f"job {ask.job.job!r} is not the one that is loaded here")
        hall = self._hall(ask.save, lambda hall: rank == _WANTS or hall.board is not None)
        if rank == _WANTS:
            return _Wants(hall.wants)
        assert hall.board is not None and hall.blocks is not None  # noqa: PT018, S101 - waited for
        if ask.epoch != hall.epoch:
            raise PeerError("another node was heard there, or was not")
        return _Image(hall.board, hall.blocks, hall.due_to(node), node, rank)

    def _hall(self, save: SaveId, ready: Callable[[_Hall], bool]) -> _Hall:
        """Of the save, once it is ready. Blocks. Raises PeerError when it does not come to that."""
        with self._changed:
            self._changed.wait_for(lambda: _is_ready(self._halls.get(save), ready), NODES_MEET_S)
            hall = self._halls.get(save)
        if hall is None or hall.closed or not ready(hall):
            raise PeerError(f"{save} is not read together here")
        return hall

    def _ended(self, link: str) -> None:
        node, save = _node_of(link)
        with self._changed:
            boards = [hall.board for of, hall in self._halls.items() if of.text == save and hall.board is not None]
        for board in boards:
            board.left(node)

    # --- this rank

    def show(self, save: SaveId, wants: bytes) -> None:
        """Other nodes are told what this one wants."""
        self._change(save, _Hall(wants))

    def serve(self, save: SaveId, board: Board, blocks: Blocks) -> None:
        """Other nodes get what they want of the blocks that this one reads."""
        hall = self._halls[save]
        self._change(save, _Hall(hall.wants, board, blocks, _epoch(board)))

    def refuse(self, save: SaveId) -> None:
        """Other nodes get nothing, and are told so at once."""
        self._change(save, _Hall(b"", closed=True))

    def _change(self, save: SaveId, hall: _Hall) -> None:
        with self._changed:
            self._halls[save] = hall
            self._changed.notify_all()


def _link_of(node: int, save: SaveId) -> str:
    return f"{node}:{save.text}"


def _node_of(link: str) -> tuple[int, str]:
    """The node that came, and the save that it came for. Raises PeerError."""
    node, _, save = link.partition(":")
    if not node.isdecimal():
        raise PeerError(f"{link!r} is no link of a node")
    return int(node), save


def _is_ready(hall: _Hall | None, ready: Callable[[_Hall], bool]) -> bool:
    return hall is not None and (hall.closed or ready(hall))


def _epoch(board: Board) -> int:
    return int.from_bytes(board.agreed[:8], "little") % MAX_INCARNATION


@dataclass(frozen=True, slots=True)
class _Wants:
    bits: bytes

    @property
    def nbytes(self) -> int:
        return len(self.bits)

    def view(self, offset: int, nbytes: int) -> memoryview:
        return memoryview(self.bits)[offset : offset + nbytes]

    def check(self, offset: int, nbytes: int) -> None:
        pass

    def still(self) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class _Image:
    """What another node gets of an image: whole blocks in their order, each once it was read and checked here."""

    board: Board
    blocks: Blocks
    due: Mapping[int, SharedBlock]
    node: int
    rank: int

    @property
    def nbytes(self) -> int:
        return self.blocks.image_nbytes(self.rank)

    def view(self, offset: int, nbytes: int) -> memoryview:
        one = self.due.get(self.blocks.at(self.rank, offset))
        buffer = self.board.take_for(self.node, one) if one is not None else None
        if buffer is None:
            raise PeerError(f"byte {offset} of rank {self.rank} could not be read")
        return buffer.view[:nbytes]

    def check(self, offset: int, nbytes: int) -> None:
        """Whoever receives the block holds it against its digest."""

    def still(self) -> bool:
        self.board.sent(self.node, max(one.number for one in self.due.values()))
        return True


class Neighbours:
    """The other nodes that read with this one, as its first rank reaches them. Nothing here raises for their sake."""

    def __init__(self, job: JobKey, save: SaveId, gates: Sequence[Gate], own: int, integrity: Integrity = XXH3) -> None:
        self._job, self._save, self._own, self._integrity = job, save, own, integrity
        self._gates = dict(enumerate(gates))
        del self._gates[own]
        self._connections: dict[int, Connection] = {}
        self._heard: list[int] = []
        self._cancel = Cancel()

    def wants(self, nbytes: int) -> dict[int, bytes]:
        """What each of those wants that answer in time; nbytes: of such a word. Blocks NODES_MEET_S at most."""
        pool = ThreadPoolExecutor(len(self._gates))
        asked = {node: pool.submit(self._ask_wants, node, nbytes) for node in self._gates}
        wait(asked.values(), NODES_MEET_S)
        pool.shutdown(wait=False, cancel_futures=True)
        found = {node: job.result() for node, job in asked.items() if job.done() and job.exception() is None}
        self._heard = list(found)
        for node in asked:
            if node not in found:
                log.info("ckptd: node %d of this load is not heard: it and this one read the store by themselves", node)
        return found

    def _ask_wants(self, node: int, nbytes: int) -> bytes:
        gate = self._gates[node]
        address = Address(gate.host, gate.port, _link_of(self._own, self._save), gate.secret)
        connection = Connection(
            f"{gate.host}:{gate.port}", address, self._cancel, steady=False, integrity=self._integrity
        )
        self._connections[node] = connection
        bits = bytearray(nbytes)
        connection.ask(self._job, self._save, 0, [wire.Range(_WANTS, 0, nbytes, checked=True)])
        connection.receive(memoryview(bits))
        return bytes(bits)

    @contextlib.contextmanager
    def fetching(self, board: Board, blocks: Blocks, check: Check) -> Iterator[None]:
        """Inside, threads fill the buffers of what other nodes read. At the end they are waited for."""
        due = {node: board.coming_from(node) for node in self._heard}
        due = {node: coming for node, coming in due.items() if coming}
        with ThreadPoolExecutor(max(1, len(due)), thread_name_prefix="ckptd-fetch") as pool:
            for node, coming in due.items():
                pool.submit(self._fetch, node, coming, board, blocks, check)
            yield

    def _fetch(self, node: int, coming: Sequence[SharedBlock], board: Board, blocks: Blocks, check: Check) -> None:
        connection = self._connections[node]
        ranges = [
            wire.Range(blocks.place(one.block)[0], blocks.offset(one.block), blocks.nbytes(one.block), checked=False)
            for one in coming
        ]
        lost: list[Exception] = []

        def receive(one: SharedBlock, buffer: Buffer) -> None:
            if lost:
                raise lost[0]
            view = buffer.view[: blocks.nbytes(one.block)]
            try:
                connection.receive(view)
            except (CkptdError, OSError) as error:
                lost.append(error)
                raise
            check(one.block, view)

        try:
            connection.ask(self._job, self._save, _epoch(board), ranges)
        except (CkptdError, OSError) as error:
            lost.append(error)
        for one in coming:  # also those that are lost: who waits for them is told
            with contextlib.suppress(CkptdError, OSError):
                board.fill(one, lambda buffer, one=one: receive(one, buffer))  # type: ignore[misc]
        if lost:
            log.info("ckptd: %s: this node reads the rest by itself", lost[0])

    def close(self) -> None:
        """Hangs up: each of them knows that nothing more is wanted of it."""
        self._cancel.cancel()
        for connection in list(self._connections.values()):
            connection.close()
