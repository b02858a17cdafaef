"""Finds this process's rank and session: from torch.distributed, MPI, the launcher's variables, or alone."""

import os
import socket
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ckptd.shared.base.errors import ConnectError, UsageError
from ckptd_client._local.meeting import meet_at_files
from ckptd_client._local.meeting_mpi import meet_by_messages
from ckptd_client._local.meeting_store import Store, meet_at_store
from ckptd_client._local.settlement import Settle, StoreSettlement, settle_alone, settle_by_mpi, settle_by_torch

_MPI_SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "PMIX_SIZE", "MPI_LOCALNRANKS")
_PATIENCE_S = 60.0
_POLL_S = 0.2
_GROUP_HINT = "call torch.distributed.init_process_group before connect"
_meetings: list[str] = []  # successful ones: their number is equal on all ranks


@dataclass(frozen=True, slots=True)
class Group:
    """This process's rank in the job. All ranks that connected together have the same session."""

    rank: int
    world_size: int
    session: str
    exchange: Callable[[bytes], list[bytes]] | None = field(default=None, compare=False, repr=False)
    """Gives every rank's bytes, by rank. Collective. None: ranks have no messages, and all run on this node."""
    settle: Settle = field(default=settle_alone, compare=False, repr=False)
    """One outcome for all ranks, of a few bytes. Collective."""
    meet: Callable[[Callable[[int], bool]], None] | None = field(default=None, compare=False, repr=False)
    """Blocks until the files of all ranks exist. None: the ranks have met. Raises ConnectError."""

    @property
    def has_messages(self) -> bool:
        """Whether ranks may run on other nodes, and can agree with each other."""
        return self.settle is not settle_alone


def find_group(patience_s: float = _PATIENCE_S) -> Group:
    """Finds this process's group. Collective: every rank calls it, in the same order as other collectives.

    Blocks until all ranks have called it, patience_s at most. Raises ConnectError, which names the missing ranks, and
    UsageError.
    """
    if dist.is_available() and dist.is_initialized():
        return _from_torch(patience_s)
    if _under_mpi():
        return _from_mpi(patience_s)
    world_size = _number("WORLD_SIZE", 1)
    if world_size > 1:
        return _from_launcher(world_size, patience_s)
    return lone_group()


def _number(name: str, default: int) -> int:
    """The number in a variable of the launcher. Raises UsageError."""
    text = os.environ.get(name, "") or str(default)
    if not text.isdecimal():
        raise UsageError(f"{name} is {text!r}, and should be a number", hint="start with torchrun or mpiexec")
    return int(text)


def lone_group() -> Group:
    """A group of this process alone, even if there are other ranks."""
    return Group(0, 1, _new_session())


def _new_session() -> str:
    return uuid.uuid4().hex


def _from_torch(patience_s: float) -> Group:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    store = distributed_c10d._get_default_store()  # noqa: SLF001 - there is no public way without a collective
    if world_size == 1:
        return Group(rank, world_size, _new_session(), _exchange_by_torch)
    if store is None:  # the backend is MPI
        return Group(rank, world_size, _broadcast(), _exchange_by_torch, settle_by_torch(dist, torch))
    ours = distributed_c10d.PrefixStore("ckptd/connect", store)
    session = _met(ours, rank, world_size, patience_s)
    return Group(rank, world_size, session, _exchange_by_torch, StoreSettlement(ours, session, rank, world_size))


def _met(store: Store, rank: int, world_size: int, patience_s: float) -> str:
    try:
        return meet_at_store(store, rank, world_size, patience_s)
    except RuntimeError as error:
        text = f"the store of torch.distributed does not answer: {error}"
        raise ConnectError(text, hint="look for a rank that ended first") from None


def _broadcast() -> str:
    box = [_new_session() if dist.get_rank() == 0 else None]
    try:
        dist.broadcast_object_list(box, src=0)
    except RuntimeError as error:
        raise ConnectError(f"rank 0 cannot be heard: {error}", hint="look for a rank that ended first") from None
    return str(box[0])


def _exchange_by_torch(data: bytes) -> list[bytes]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, data)
    return found


def _under_mpi() -> bool:
    if any(int(os.environ.get(name, "0") or 0) > 1 for name in _MPI_SIZES):
        return True
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi is not None and mpi.Is_initialized() and mpi.COMM_WORLD.Get_size() > 1


def _from_mpi(patience_s: float) -> Group:
    try:
        from mpi4py import MPI  # noqa: PLC0415 - importing it initialises MPI
    except ImportError as error:
        text = f"this process was started by mpiexec, but mpi4py cannot be imported: {error}"
        raise UsageError(text, hint="pip install 'ckptd[mpi]'") from None
    world = MPI.COMM_WORLD
    if world.Get_size() == 1:
        return Group(0, 1, _new_session(), world.allgather)
    session = meet_by_messages(MPI, world, patience_s)
    return Group(world.Get_rank(), world.Get_size(), session, world.allgather, settle_by_mpi(MPI, world))


def _from_launcher(world_size: int, patience_s: float) -> Group:
    """The group under torchrun before init_process_group: its store, or run id and restart count, name the session."""
    run = os.environ.get("TORCHELASTIC_RUN_ID")
    if run is None or "RANK" not in os.environ:
        raise _no_way_to_meet(world_size)
    rank, here = _number("RANK", 0), _number("LOCAL_WORLD_SIZE", world_size)
    if rank >= world_size:
        text = f"RANK is {rank}, and WORLD_SIZE {world_size}: there are ranks 0 to {world_size - 1}"
        raise UsageError(text, hint="start with torchrun or mpiexec; for a job of this process: connect(alone=True)")
    if here < world_size:
        raise UsageError(
            f"{here} of the job's {world_size} ranks run on this node, and they cannot ask the others where those run",
            hint=_GROUP_HINT,
        )
    port, restarts = os.environ.get("MASTER_PORT", "0"), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    run_instance = f"{run[:64]}:{port}:{restarts}"
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # else the launcher has chosen the run id
        store = _launchers_store(run_instance, patience_s)
        session = _met(store, rank, world_size, patience_s)
        return Group(rank, world_size, session, settle=StoreSettlement(store, session, rank, world_size))

    def meet(exists: Callable[[int], bool]) -> None:
        meet_at_files(exists, world_size, patience_s)
        _meetings.append(run_instance)

    return Group(rank, world_size, f"{run_instance}:{len(_meetings)}", meet=meet)


def _no_way_to_meet(world_size: int) -> UsageError:
    """The error if WORLD_SIZE is set, but not all variables of torchrun are, and there is no process group."""
    unset = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    alone = "for a job of this process: unset WORLD_SIZE, or connect(alone=True)"
    if not unset:
        text = f"WORLD_SIZE is {world_size}, but the ranks cannot find each other: there is no process group"
        return UsageError(text, hint=f"{_GROUP_HINT}, or start with torchrun or mpiexec; {alone}")
    names = " and ".join([", ".join(unset[:-1]), unset[-1]] if len(unset) > 1 else unset)
    text = f"WORLD_SIZE is {world_size}, but {names} {'is' if len(unset) == 1 else 'are'} not set"
    return UsageError(text, hint=f"start with torchrun or mpiexec; {alone}")


def _await_listener(host: str, port: int, patience_s: float) -> None:
    """Blocks until a server listens there. Raises ConnectError; torch would try twice as long and print its stack."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            socket.create_connection((host, port), max(_POLL_S, deadline - time.monotonic())).close()
        except (OSError, OverflowError) as error:  # OverflowError: a port above 65535
            if time.monotonic() + _POLL_S >= deadline:
                within = f"nothing answers at MASTER_ADDR={host}, MASTER_PORT={port} within {patience_s:g} s: {error}"
                hint = (
                    "does torchrun, or rank 0, still run? Start again with torchrun; where they are left over: unset "
                    "MASTER_ADDR MASTER_PORT RANK WORLD_SIZE; for a job of this process alone: connect(alone=True)"
                )
                raise ConnectError(within, hint=hint) from None
            time.sleep(_POLL_S)
        else:
            return


def _launchers_store(run_instance: str, patience_s: float) -> Store:
    """The launcher's store, which exists as long as the job runs. Raises ConnectError."""
    host, port = os.environ.get("MASTER_ADDR", "localhost"), _number("MASTER_PORT", 0)
    deadline = time.monotonic() + patience_s
    _await_listener(host, port, patience_s)
    try:
        limit = timedelta(seconds=max(1.0, deadline - time.monotonic()))
        store = dist.TCPStore(host, port, is_master=False, timeout=limit)  # type: ignore[attr-defined]  # it is public
    except RuntimeError as error:
        text = f"what listens at MASTER_ADDR={host}, MASTER_PORT={port} is not torchrun's TCPStore: {error}"
        raise ConnectError(text, hint=f"start with torchrun, or {_GROUP_HINT}") from None
    return distributed_c10d.PrefixStore(f"ckptd/connect/{run_instance}", store)
