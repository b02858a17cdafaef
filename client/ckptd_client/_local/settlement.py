"""One outcome for all ranks: what rank 0 offers, or the problem of a rank. Each rank sends and receives a few bytes.

Collective. Every rank calls it, in the same order as other collectives; how large the job is changes no message.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from ckptd.shared.base.errors import ConnectError
from ckptd_client._local.meeting import turns
from ckptd_client._local.meeting_store import Store

_PATIENCE_S = 600.0  # for ranks that look for their daemons, each as long as its connect_timeout_s


class Settled(NamedTuple):
    """``problem``: of that rank; else ``offer``: of rank 0."""

    rank: int
    offer: bytes = b""
    problem: bytes = b""


Settle = Callable[[bytes, bytes], Settled]
"""(offer, problem) -> Settled. offer: of rank 0; problem: of this rank, or empty."""


def settle_alone(offer: bytes, problem: bytes) -> Settled:
    """Of a rank that exchanges no messages with others."""
    return Settled(0, offer, problem)


class StoreSettlement:
    """By a store of torch.distributed. session: new for each connect, so that no key of an earlier one is left."""

    def __init__(self, store: Store, session: str, rank: int, world_size: int) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size
        self._prefix, self._round = f"settled/{session}", 0

    def __call__(self, offer: bytes, problem: bytes) -> Settled:
        """Blocks until every rank has called it. Raises ConnectError when one does not; RuntimeError of the store."""
        store, self._round = self._store, self._round + 1
        prefix = f"{self._prefix}/{self._round}"
        came, read, verdict, first = (f"{prefix}/{name}" for name in ("came", "read", "verdict", "problem"))
        if problem and store.add(f"{prefix}/failed", 1) == 1:
            store.set(first, f"{self._rank}:{problem.hex()}")
        if self._rank == 0:
            store.set(f"{prefix}/offer", offer.hex())
        if store.add(came, 1) == self._world_size:
            failed = store.check([f"{prefix}/failed"])
            text = store.get(first).decode() if failed else f":{store.get(f'{prefix}/offer').decode()}"
            store.set(verdict, text)
        for _ in turns(self._world_size, _PATIENCE_S, tuple):
            if store.check([verdict]):
                break
        else:
            raise ConnectError("a rank ended while all ranks connected", hint="look for a rank that ended first")
        rank, _, value = store.get(verdict).decode().partition(":")
        if store.add(read, 1) == self._world_size:
            for key in (came, read, verdict, first, f"{prefix}/offer", f"{prefix}/failed"):
                store.delete_key(key)
        if rank:
            return Settled(int(rank), problem=bytes.fromhex(value))
        return Settled(0, bytes.fromhex(value))


def settle_by_mpi(mpi: Any, world: Any) -> Settle:
    """By collectives of MPI. mpi: mpi4py's module; world: its communicator of all ranks."""

    def settle(offer: bytes, problem: bytes) -> Settled:
        rank, size = world.Get_rank(), world.Get_size()
        first = world.allreduce(rank if problem else size, op=mpi.MIN)
        if first < size:
            return Settled(first, problem=world.bcast(problem, root=first))
        return Settled(0, world.bcast(offer, root=0))

    return settle


def settle_by_torch(dist: Any, torch: Any) -> Settle:
    """By collectives of torch.distributed, on a backend that has no store: MPI."""

    def settle(offer: bytes, problem: bytes) -> Settled:
        rank, size = dist.get_rank(), dist.get_world_size()
        lowest = torch.tensor([rank if problem else size])
        dist.all_reduce(lowest, op=dist.ReduceOp.MIN)
        first = int(lowest.item())
        box = [problem if first < size else offer]
        dist.broadcast_object_list(box, src=first if first < size else 0)
        return Settled(first, problem=box[0]) if first < size else Settled(0, box[0])

    return settle
