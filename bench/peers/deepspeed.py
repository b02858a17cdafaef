"""DeepSpeed's fast engine: torch.save through buffers that are written with O_DIRECT, in the loop.

Its operators are compiled when they are first used (``python -m bench.peers.deepspeed``), into this environment.
"""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

os.environ |= {
    "DS_ACCELERATOR": "cpu",
    "DS_PIN_MEMORY_BACKEND": "native",  # torch pins no memory without a device
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",  # of its ninja
    "TORCH_EXTENSIONS_DIR": str(Path(sys.prefix) / "torch_extensions"),
}

import torch
from deepspeed.io import fast_file_writer
from deepspeed.ops.op_builder import AsyncIOBuilder
from deepspeed.runtime.checkpoint_engine.fast_checkpoint_engine import FastCheckpointEngine
from deepspeed.runtime.model_checkpointing.config import get_checkpoint_config
from deepspeed.runtime.model_checkpointing.data_parallel_writer_factory import (
    DataParallelWriterConfig,
)
from deepspeed.runtime.swap_tensor.aio_config import get_aio_config

from bench.peers import Finish, Place
from bench.peers.files import Directories, sync
from bench.states import State

_CONFIG = {"checkpoint": {"checkpoint_serialization": False, "writer": {"type": "fast"}}}


class _Casts:
    """Replaces the one operator without a build for CPUs: tensors as bytes, without a copy."""

    def load(self) -> SimpleNamespace:
        """The operator."""
        return SimpleNamespace(cast_to_byte_tensor=_as_bytes)


def _as_bytes(what: torch.Tensor | list[torch.Tensor]) -> torch.Tensor | list[torch.Tensor]:
    return what.reshape(-1).view(torch.uint8) if isinstance(what, torch.Tensor) else [_as_bytes(one) for one in what]  # type: ignore[misc]


class Fast(Directories):
    """One file per rank, each rank its own writer."""

    def __init__(self, place: Place) -> None:
        super().__init__(place, "rank-{rank}.pt")
        fast_file_writer.UtilsBuilder = _Casts
        config = SimpleNamespace(checkpoint_config=get_checkpoint_config(_CONFIG), aio_config=get_aio_config({}))
        writer = DataParallelWriterConfig(1, 0, place.rank, place.rank, pure_dp=True)
        self._engine = FastCheckpointEngine(config, writer, optimize_dp_state=False)

    def save(self, state: State, step: int) -> Finish:
        """Writes; it syncs its file when it closes it."""
        directory = self.directory(step)
        directory.mkdir(exist_ok=True)
        self._engine.save(state, str(directory / f"rank-{self._place.rank}.pt"))
        sync(directory)
        return lambda: None


if __name__ == "__main__":
    AsyncIOBuilder().load()
