"""Megatron core: dist_checkpointing.save by its default strategy, synchronous and asynchronous, and by ours."""

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ckptd_client
from bench.trainers import Measure, Pair, Way, at_once

NEEDS = "megatron-core"
_WIDTH = 1024
_POLL_S = 0.01


class _Saves:
    """Saves of one strategy, None for core's default, each into a directory of its own."""

    def __init__(self, state: dict[str, torch.Tensor], folder: Path, strategy: Any) -> None:
        from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue  # noqa: PLC0415

        self._state, self._folder, self._strategy = state, folder, strategy
        self._queue = AsyncCallsQueue()

    def _sharded(self) -> dict[str, Any]:
        from megatron.core.dist_checkpointing import ShardedTensor  # noqa: PLC0415

        rank, size = dist.get_rank(), dist.get_world_size()
        cut = ShardedTensor.from_rank_offsets
        return {name: cut(name, tensor, (0, rank, size)) for name, tensor in self._state.items()}

    def _directory(self, step: int) -> str:
        path = self._folder / f"iter_{step:07d}"
        path.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        return str(path)

    def save(self, step: int, *, asynchronous: bool) -> float:
        """Seconds until training continues."""
        from megatron.core import dist_checkpointing  # noqa: PLC0415

        path = self._directory(step)
        began = time.perf_counter()
        request = dist_checkpointing.save(self._sharded(), path, self._strategy, async_sharded_save=asynchronous)
        if request is not None:
            self._queue.schedule_async_request(request)
        return time.perf_counter() - began

    def settle(self) -> float:
        """Seconds of the call that ends the save; trainers ask once an iteration."""
        while self._queue.get_num_unfinalized_calls():
            began = time.perf_counter()
            if self._queue.maybe_finalize_async_calls(blocking=False):
                return time.perf_counter() - began
            time.sleep(_POLL_S)
        return 0.0


def core(nbytes: int, folder: Path, measure: Measure) -> None:
    """nbytes: of fp32 matrices, over all ranks."""
    if not torch.cuda.is_available():  # core asks CUDA for a device where the CPU would do
        torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
        torch.cuda.synchronize = lambda: None  # type: ignore[assignment]
    from ckptd_client.integrations.megatron import CkptdSaveStrategy  # noqa: PLC0415

    rows = _WIDTH // dist.get_world_size()
    count = max(1, nbytes // (4 * _WIDTH * _WIDTH))
    state = {f"weight{i}": torch.full((rows, _WIDTH), float(i)) for i in range(count)}
    with ckptd_client.connect("bench-megatron") as client:
        stock = _Saves(state, folder / "stock", None)
        detached = _Saves(state, folder / "asynchronous", None)
        mine = _Saves(state, folder / "ckptd", CkptdSaveStrategy(client))
        ours = Way("CkptdSaveStrategy", lambda step: mine.save(step, asynchronous=True), mine.settle)
        default = Way("default", lambda step: stock.save(step, asynchronous=False), at_once)
        measure(Pair("Megatron core", default, ours))
        aside = Way("default", lambda step: detached.save(step, asynchronous=True), detached.settle)
        measure(Pair("Megatron core, async", aside, ours))
