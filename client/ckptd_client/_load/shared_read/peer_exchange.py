"""Nodes that read the same checkpoint send each other blocks: one of them reads each block from the store.

The first rank of a node opens a peer exchange for the time of a load: a server of the daemons' bulk protocol, at an
address that the daemons send to the other nodes' ranks. Through it each node first announces what it wants; from all
announcements each node computes which node reads which block. Then it sends what it reads, in order, while the others
wait for it. A node that receives nothing reads the store itself, as ranks do when another rank of their group fails.
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
from ckptd.shared.protocol.read_groups import ExchangeAddress
from ckptd_client._load.reader import Buffer
from ckptd_client._load.shared_read.node_group import NODES_JOIN_S, NodeGroup
from ckptd_client._load.shared_read.schedule import Blocks, SharedBlock

log = logging.getLogger("ckptd_client")
_WANTS = wire.PARITY  # in place of an image's rank: asks what the node wants
Check = Callable[[int, memoryview], None]  # a block's number and bytes; raises DamagedError


@dataclass(slots=True)
class _ExchangeSession:
    """What other nodes receive from this one for one save."""

    wants: bytes
    group: NodeGroup | None = None  # once the schedule is known
    blocks: Blocks | None = None
    epoch: int = 0
    closed: bool = False
    by_node: dict[int, dict[int, SharedBlock]] = field(default_factory=dict)  # blocks for each node

    def blocks_for(self, node: int) -> dict[int, SharedBlock]:
        """Blocks for the node, computed once: it sends a request for each image, and there may be many."""
        assert self.group is not None  # noqa: S101 - only a session that serves
        if node not in self.by_node:
            self.by_node[node] = {one.block: one for one in self.group.blocks_for_node(node)}
        return self.by_node[node]


class PeerExchange:
    """A server for the job's other nodes, open until close. host: this node's address for them. Raises OSError."""

    def __init__(self, host: str, job: JobKey, integrity: Integrity = XXH3) -> None:
        secret = os.urandom(32)
        self._job = job
        self._secret = secret
        self._changed = threading.Condition()
        self._sessions: dict[SaveId, _ExchangeSession] = {}
        self._server = BulkServer(self._open, lambda _link: secret, host=host, ended=self._ended, integrity=integrity)
        self.address = ExchangeAddress(host, self._server.port, secret)
        self._server.start()

    def close(self) -> None:
        """Ends every connection and releases the node groups."""
        self._server.close()
        with self._changed:
            self._sessions = {save: _ExchangeSession(b"", closed=True) for save in self._sessions}
            self._changed.notify_all()

    # --- the server's threads

    def _open(self, link: str, ask: wire.Ask, rank: int) -> Served:
        node, save = _node_of(link)
        if save != ask.save.text:
            raise PeerError(f"{ask.save} was asked for on a link of another")
        if ask.job != self._job:
            raise PeerError(f"job {ask.job.job!r} is not the one that is loaded here")
        session = self._session(ask.save, lambda session: rank == _WANTS or session.group is not None)
        if rank == _WANTS:
            return _Wants(session.wants)
        assert session.group is not None and session.blocks is not None  # noqa: PT018, S101 - waited for
        if ask.epoch != session.epoch:
            raise PeerError("other nodes take part there than here")
        return _Image(session.group, session.blocks, session.blocks_for(node), node, rank)

    def _session(self, save: SaveId, ready: Callable[[_ExchangeSession], bool]) -> _ExchangeSession:
        """The session of the save, once it is ready. Blocks. Raises PeerError when it does not become ready in time."""
        with self._changed:
            self._changed.wait_for(lambda: _is_ready(self._sessions.get(save), ready), NODES_JOIN_S)
            session = self._sessions.get(save)
        if session is None or session.closed or not ready(session):
            raise PeerError(f"{save} is not read together here")
        return session

    def _ended(self, link: str) -> None:
        node, save = _node_of(link)
        with self._changed:
            groups = [session.group for of, session in self._sessions.items() if of.text == save]
        for group in groups:
            if group is not None:
                group.leave_for(node)

    # --- this rank

    def announce(self, save: SaveId, wants: bytes) -> None:
        """Answers other nodes with what this one wants."""
        self._change(save, _ExchangeSession(wants))

    def serve(self, save: SaveId, group: NodeGroup, blocks: Blocks) -> None:
        """Sends other nodes what they want of the blocks that this one reads."""
        session = self._sessions[save]
        self._change(save, _ExchangeSession(session.wants, group, blocks, _epoch(group)))

    def refuse(self, save: SaveId) -> None:
        """Refuses requests of other nodes at once."""
        self._change(save, _ExchangeSession(b"", closed=True))

    def _change(self, save: SaveId, session: _ExchangeSession) -> None:
        with self._changed:
            self._sessions[save] = session
            self._changed.notify_all()


def _link_of(node: int, save: SaveId) -> str:
    return f"{node}:{save.text}"


def _node_of(link: str) -> tuple[int, str]:
    """The node that connected, and the save that it asks for. Raises PeerError."""
    node, _, save = link.partition(":")
    if not node.isdecimal():
        raise PeerError(f"{link!r} is no link of a node")
    return int(node), save


def _is_ready(session: _ExchangeSession | None, ready: Callable[[_ExchangeSession], bool]) -> bool:
    return session is not None and (session.closed or ready(session))


def _epoch(group: NodeGroup) -> int:
    return int.from_bytes(group.wants_digest[:8], "little") % MAX_INCARNATION


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
    """Another node's blocks of an image: whole blocks in order, each once this node has read and checked it."""

    group: NodeGroup
    blocks: Blocks
    due: Mapping[int, SharedBlock]
    node: int
    rank: int

    @property
    def nbytes(self) -> int:
        return self.blocks.image_nbytes(self.rank)

    def view(self, offset: int, nbytes: int) -> memoryview:
        one = self.due.get(self.blocks.at(self.rank, offset))
        buffer = self.group.take_for(self.node, one) if one is not None else None
        if buffer is None:
            raise PeerError(f"byte {offset} of rank {self.rank} could not be read")
        return buffer.view[:nbytes]

    def check(self, offset: int, nbytes: int) -> None:
        """Does nothing: the receiver compares the block with its digest."""

    def still(self) -> bool:
        self.group.sent(self.node, max(one.number for one in self.due.values()))
        return True


class PeerNodes:
    """Connections of this node's first rank to other nodes that read with it. A failure of theirs is never raised."""

    def __init__(
        self, job: JobKey, save: SaveId, exchanges: Sequence[ExchangeAddress], own: int, integrity: Integrity = XXH3
    ) -> None:
        self._job, self._save, self._own, self._integrity = job, save, own, integrity
        self._exchanges = dict(enumerate(exchanges))
        del self._exchanges[own]
        self._connections: dict[int, Connection] = {}
        self._answered: list[int] = []
        self._cancel = Cancel()

    def wants(self, nbytes: int) -> dict[int, bytes]:
        """What each node wants that answers in time; nbytes: of an answer. Blocks NODES_JOIN_S at most."""
        pool = ThreadPoolExecutor(len(self._exchanges))
        asked = {node: pool.submit(self._ask_wants, node, nbytes) for node in self._exchanges}
        wait(asked.values(), NODES_JOIN_S)
        pool.shutdown(wait=False, cancel_futures=True)
        found = {node: job.result() for node, job in asked.items() if job.done() and job.exception() is None}
        self._answered = list(found)
        for node in asked:
            if node not in found:
                log.info("ckptd: node %d of this load does not answer: both nodes read the store by themselves", node)
        return found

    def _ask_wants(self, node: int, nbytes: int) -> bytes:
        exchange = self._exchanges[node]
        address = Address(exchange.host, exchange.port, _link_of(self._own, self._save), exchange.secret)
        connection = Connection(
            f"{exchange.host}:{exchange.port}", address, self._cancel, steady=False, integrity=self._integrity
        )
        self._connections[node] = connection
        bits = bytearray(nbytes)
        connection.ask(self._job, self._save, 0, [wire.Range(_WANTS, 0, nbytes, checked=True)])
        connection.receive(memoryview(bits))
        return bytes(bits)

    @contextlib.contextmanager
    def receiving(self, group: NodeGroup, blocks: Blocks, check: Check) -> Iterator[None]:
        """Runs threads that fill buffers with the blocks that other nodes read; waits for them at the end."""
        due = {node: group.read_at(node) for node in self._answered}
        due = {node: coming for node, coming in due.items() if coming}
        with ThreadPoolExecutor(max(1, len(due)), thread_name_prefix="ckptd-fetch") as pool:
            for node, coming in due.items():
                pool.submit(self._receive_from, node, coming, group, blocks, check)
            yield

    def _receive_from(
        self, node: int, coming: Sequence[SharedBlock], group: NodeGroup, blocks: Blocks, check: Check
    ) -> None:
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
            connection.ask(self._job, self._save, _epoch(group), ranges)
        except (CkptdError, OSError) as error:
            lost.append(error)
        for one in coming:  # also lost blocks: ranks that wait for them learn of the failure
            with contextlib.suppress(CkptdError, OSError):
                group.fill(one, lambda buffer, one=one: receive(one, buffer))  # type: ignore[misc]
        if lost:
            log.info("ckptd: %s: this node reads the rest by itself", lost[0])

    def close(self) -> None:
        """Ends the connections: each node learns that this one wants nothing more from it."""
        self._cancel.cancel()
        for connection in list(self._connections.values()):
            connection.close()
