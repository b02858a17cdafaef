"""Ways of saving a state, each an adapter in a module of its own that is imported only in the ranks that run it."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from bench.states import State
from bench.training import Touching

Finish = Callable[[], None]  # blocks until the bytes of a save are on the disk


class Peer(Protocol):
    """A way of saving, in one rank."""

    def prepare(self, state: State) -> None:
        """Prepares the first save."""

    def save(self, state: State, step: int) -> Finish:
        """Starts a save and returns as soon as training may continue."""

    def before_step(self) -> None:
        """Blocks until the optimizer may write to the saved tensors."""

    def nbytes(self, step: int) -> int:
        """Bytes of this rank's files of a durable save."""

    def discard(self, step: int) -> None:
        """Removes a measured save; one rank calls it when all saves are durable."""

    def close(self) -> None:
        """Releases the adapter's resources and ends its processes."""


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a rank. shm and disk: directories of this row, equal for its ranks."""

    rank: int
    world_size: int
    shm: Path
    disk: Path
    optimizer: Touching


@dataclass(frozen=True, slots=True)
class Kind:
    """A row of the table: an adapter, its arguments and its package."""

    name: str
    adapter: str  # module of this package and the class in it
    options: Mapping[str, Any] = field(default_factory=dict)
    needs: str = ""  # a package that torch does not install
    install: str = ""
    note: str = ""  # for the reader of the table

    def make(self, place: Place) -> Peer:
        """The adapter, in the rank that uses it. Raises ImportError where its package is missing."""
        module, name = self.adapter.split(".")
        peer: Peer = getattr(importlib.import_module(f"bench.peers.{module}"), name)(place, **self.options)
        return peer


CKPTD, OVERLAPPED = "ckptd", "ckptd, overlapped"
DEEPSPEED = "DeepSpeed fast engine"
KINDS = (
    Kind("torch.save + fsync", "torch_save.TorchSave"),
    Kind("dcp.save", "dcp.Sync"),
    Kind("dcp.async_save, defaults", "dcp.Async"),
    Kind("dcp.async_save, thread", "dcp.Reused", note="stager reused, plan cached"),
    Kind(
        "dcp.async_save, process",
        "dcp.Reused",
        {"process": True},
        note="staged in shared memory, stager reused, plan cached",
    ),
    Kind(
        "dcp.async_save, process, late",
        "dcp.Reused",
        {"process": True, "late": True},
        note="the same, staged while training goes on",
    ),
    Kind("DLRover flash checkpoint", "dlrover.Flash", needs="dlrover", install="pip install dlrover grpcio protobuf"),
    Kind(
        DEEPSPEED,
        "deepspeed.Fast",
        needs="deepspeed",
        install="apt install g++ libaio-dev; DS_BUILD_OPS=0 pip install deepspeed",
        note="its cast of tensors to bytes has no build for CPUs and is replaced by a view; pinned natively",
    ),
    Kind(CKPTD, "ckptd.Staged"),
    Kind(OVERLAPPED, "ckptd.Overlapped"),
)
