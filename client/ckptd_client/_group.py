"""Which rank of which session this process is: from torch.distributed, MPI, the launcher's variables, or alone."""

import itertools
import os
import sys
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ckptd.protocol.errors import ConnectError, UsageError

_MPI_SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "PMIX_SIZE", "MPI_LOCALNRANKS")
_STORE_TIMEOUT_S = 60
_connects = itertools.count()


@dataclass(frozen=True, slots=True)
class Group:
    """This process's place in the job. All ranks that connected together share the session."""

    rank: int
    world_size: int
    session: str
    exchange: Callable[[bytes], list[bytes]] | None = field(default=None, compare=False, repr=False)
    """Collective: what every rank gave, by rank. None: the ranks cannot ask each other, and all run on this node."""


def find_group() -> Group:
    """Collective: every rank of the job calls it, in the same order as other collectives."""
    if dist.is_available() and dist.is_initialized():
        return _from_torch()
    if _under_mpi():
        return _from_mpi()
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size > 1:
        return _from_launcher(world_size)
    return lone_group()


def lone_group() -> Group:
    """This process by itself, whatever ranks there are beside it."""
    return Group(0, 1, _new_session())


def _new_session() -> str:
    return uuid.uuid4().hex


def _from_torch() -> Group:
    box = [_new_session() if dist.get_rank() == 0 else None]
    try:
        dist.broadcast_object_list(box, src=0)
    except RuntimeError as error:
        raise ConnectError(f"rank 0 cannot be heard: {error}", hint="look for a rank that ended first") from error
    return Group(dist.get_rank(), dist.get_world_size(), str(box[0]), _exchange_by_torch)


def _exchange_by_torch(word: bytes) -> list[bytes]:
    words: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(words, word)
    return words


def _under_mpi() -> bool:
    if any(int(os.environ.get(name, "0") or 0) > 1 for name in _MPI_SIZES):
        return True
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi is not None and mpi.Is_initialized() and mpi.COMM_WORLD.Get_size() > 1


def _from_mpi() -> Group:
    try:
        from mpi4py import MPI  # noqa: PLC0415 - importing it initialises MPI
    except ImportError as error:
        raise UsageError(
            "this process was started by mpiexec, but mpi4py cannot be imported", hint="pip install 'ckptd[mpi]'"
        ) from error
    world = MPI.COMM_WORLD
    session = world.bcast(_new_session() if world.Get_rank() == 0 else None, root=0)
    return Group(world.Get_rank(), world.Get_size(), session, world.allgather)


def _from_launcher(world_size: int) -> Group:
    """torchrun before init_process_group: its run id and restart count name the session without a collective."""
    run, rank = os.environ.get("TORCHELASTIC_RUN_ID"), os.environ.get("RANK")
    if run is None or rank is None:
        raise UsageError(
            f"WORLD_SIZE is {world_size}, but the ranks cannot find each other",
            hint="call torch.distributed.init_process_group before connect, or start with torchrun or mpiexec",
        )
    here = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    if here < world_size:
        raise UsageError(
            f"{here} of the job's {world_size} ranks run on this node, and they cannot ask the others where those run",
            hint="call torch.distributed.init_process_group before connect",
        )
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    name = f"{run[:64]}:{os.environ.get('MASTER_PORT', '0')}:{restart}:{next(_connects)}"
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        name = _drawn_by_one(name)  # else the launcher has drawn the run id: nobody can ask it anything
    return Group(int(rank), world_size, name)


def _drawn_by_one(name: str) -> str:
    """Drawn at random for this name by the first rank that asks; the launcher's store keeps it while the job runs.

    The name alone comes again when a job is started twice with one run id and port.
    """
    host, port = os.environ.get("MASTER_ADDR", "localhost"), int(os.environ.get("MASTER_PORT", "0"))
    try:
        limit = timedelta(seconds=_STORE_TIMEOUT_S)
        store = dist.TCPStore(host, port, is_master=False, timeout=limit)  # type: ignore[attr-defined]  # it is public
        return store.compare_set(f"ckptd/session/{name}", "", _new_session()).decode()
    except RuntimeError as error:
        hint = "call torch.distributed.init_process_group before connect"
        raise ConnectError(f"the launcher's store at {host}:{port} does not answer: {error}", hint=hint) from error
