"""ckptd and its peers in one training loop: how long a save blocks, how much training it costs, when it is durable."""

import os
import shutil
import statistics
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import async_save

from bench import states
from bench.measure import Series
from bench.node import Client
from bench.report import PeerResult
from bench.training import Touching, Training

_FORWARD_BACKWARD_STEPS = 8  # of Training, between two of the optimizer: longer than a copy of the state
_QUIET_ITERATIONS = 3
_DURABLE_TIMEOUT_S = 120.0

Finish = Callable[[], None]  # blocks until the bytes of a save are durable


class Peer(Protocol):
    """A way of saving."""

    name: str

    def save(self, state: states.State, directory: Path, step: int) -> Finish:
        """Starts a save into directory and returns as soon as training may go on."""

    def close(self) -> None:
        """Gives back what the peer holds."""


class TorchSave:
    """torch.save into one file, then fsync, all in the loop."""

    name = "torch.save + fsync"

    def save(self, state: states.State, directory: Path, step: int) -> Finish:
        """Saves and syncs before it returns."""
        directory.mkdir()
        with (directory / f"step-{step}.pt").open("wb") as file:
            torch.save(state, file)
        _sync(directory)
        return lambda: None

    def close(self) -> None:
        """Holds nothing."""


class DcpAsync:
    """dcp.async_save as it comes."""

    name = "dcp.async_save, defaults"

    def save(self, state: states.State, directory: Path, step: int) -> Finish:  # noqa: ARG002
        """Stages in the call, writes in a thread."""
        return _finish(async_save(state, checkpoint_id=directory, no_dist=True), directory)

    def close(self) -> None:
        """Holds nothing."""


class DcpAsyncReused:
    """dcp.async_save with the staging memory and the plan kept between saves."""

    name = "dcp.async_save, reused stager + plan cache"

    def __init__(self) -> None:
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
            )
        )

    def save(self, state: states.State, directory: Path, step: int) -> Finish:  # noqa: ARG002
        """Stages into the kept memory in the call, writes in a thread."""
        upload = async_save(
            state,
            checkpoint_id=directory,
            planner=DefaultSavePlanner(enable_plan_caching=True),
            async_stager=self._stager,
            no_dist=True,
        )
        return _finish(upload, directory)

    def close(self) -> None:
        """Frees the staging memory."""
        self._stager.close()


class Ckptd:
    """ckptd, prepared; its own store takes the place of the directory."""

    def __init__(self, client: Client, name: str = "ckptd") -> None:
        self._client = client
        self.name = name

    def save(self, state: states.State, directory: Path, step: int) -> Finish:  # noqa: ARG002
        """Stages in the call; the daemon does the rest."""
        handle = self._client.save(state, step)
        return lambda: handle.wait("durable", _DURABLE_TIMEOUT_S)

    def close(self) -> None:
        """The client belongs to the caller."""


@dataclass(frozen=True, slots=True)
class _Save:
    block_s: float
    durable_s: float
    lost_s: float
    step_ratio: float | None


@dataclass(frozen=True, slots=True)
class Loop:
    """A training with a save now and then; it goes on until the save is durable."""

    state: states.State
    training: Training
    optimizer: Touching
    scratch: Path

    def _iteration(self) -> float:
        """Seconds of one forward, backward and step of the optimizer."""
        start = time.perf_counter()
        self.training.steps(_FORWARD_BACKWARD_STEPS)
        self.optimizer.step()
        return time.perf_counter() - start

    def run(self, peer: Peer, repeat: int) -> PeerResult:
        """One first save, then repeat measured ones."""
        first, *steady = [self._save(peer, step) for step in range(repeat + 1)]
        ratios = [one.step_ratio for one in steady if one.step_ratio is not None]
        return PeerResult(
            peer.name,
            first.block_s,
            Series("s", tuple(one.block_s for one in steady)),
            Series("s", tuple(one.lost_s for one in steady)),
            Series("s", tuple(one.durable_s for one in steady)),
            statistics.median(ratios) if ratios else None,
        )

    def _save(self, peer: Peer, step: int) -> _Save:
        quiet_s = statistics.median(self._iteration() for _ in range(_QUIET_ITERATIONS))
        states.mutate(self.state, step)
        directory = self.scratch / f"peer-{step}"
        busy: list[float] = []
        with ThreadPoolExecutor(1) as waiter:
            start = time.perf_counter()
            finish = peer.save(self.state, directory, step)
            block_s = time.perf_counter() - start
            durable_at = waiter.submit(_then_now, finish)
            while not durable_at.done():
                busy.append(self._iteration())
        shutil.rmtree(directory, ignore_errors=True)
        lost_s = block_s + sum(busy) - quiet_s * len(busy)
        step_ratio = statistics.fmean(busy) / quiet_s if len(busy) > 1 else None
        return _Save(block_s, durable_at.result() - start, lost_s, step_ratio)


def _then_now(finish: Finish) -> float:
    finish()
    return time.perf_counter()


def _finish(upload: object, directory: Path) -> Finish:
    """Waits for a DCP upload, then syncs what it wrote, in case it did not."""
    if not isinstance(upload, Future):
        raise TypeError(f"async_save returned {type(upload).__name__}, expected a Future")

    def finish() -> None:
        upload.result(_DURABLE_TIMEOUT_S)
        _sync(directory)

    return finish


def _sync(directory: Path) -> None:
    """Fsync of every file in a directory, the directory and its parent."""
    for path in (*directory.iterdir(), directory, directory.parent):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
