"""Two savers for the training's state: torch.save, only timed, and ckptd."""

import os
import threading
import time
from collections.abc import Mapping
from typing import Protocol, cast

import torch

import ckptd_client
from ckptd.shared.base.errors import SaveFailedError
from ckptd_client.demo import journal
from ckptd_client.demo.plan import Task

_MILESTONES = ("staged", "protected", "durable")
_JOIN_S = 5.0


class Saver(Protocol):
    """The interface of a saver for the training loop."""

    def restore(self) -> int:
        """Restores the state and returns the next step; 0 if there is nothing to restore."""

    def prepare(self) -> None:
        """Prepares the first save. Called after the first step, in which the optimizer creates its state."""

    def save(self, step: int) -> None:
        """Saves the state after step."""

    def finish(self) -> None:
        """Returns when the last save is safe."""


class TorchSaver:
    """The reference: rank 0 writes the state with torch.save and syncs it; the other ranks wait."""

    def __init__(self, task: Task, state: dict[str, object], log: journal.Writer, rank: int) -> None:
        self._path = os.path.join(task.store, "torch-save.pt")
        self._state = state
        self._log = log
        self._rank = rank

    def restore(self) -> int:
        """0: the reference run is never interrupted."""
        return 0

    def prepare(self) -> None:
        """torch.save has nothing to prepare."""

    def save(self, step: int) -> None:
        """Overwrites one file and records the time."""
        if self._rank != 0:
            return
        began = time.perf_counter()
        with open(self._path, "wb") as file:
            torch.save({key: _state_dict(value) for key, value in self._state.items()}, file)
            file.flush()
            seconds = time.perf_counter() - began
            os.fsync(file.fileno())
            synced_s = time.perf_counter() - began
            self._log.write(journal.TorchSaved(step, file.tell(), seconds, synced_s))

    def finish(self) -> None:
        """Every save was safe when it returned."""


def _state_dict(value: object) -> Mapping[str, object]:
    return cast("torch.nn.Module", value).state_dict()


class CkptdSaver:
    """Saves with ckptd as a training does; a thread per save records when milestones are reached."""

    def __init__(self, task: Task, arena: str, state: dict[str, object], log: journal.Writer) -> None:
        self._client = ckptd_client.connect(job=task.job, store=task.store, arena=arena)
        self._state = state
        self._log = log
        self._watchers: list[threading.Thread] = []

    def restore(self) -> int:
        """Restores the newest checkpoint from any tier."""
        restored = self._client.load(self._state)
        if restored is None:
            return 0
        self._log.write(journal.Restored(restored.step, restored.tier, restored.seconds, restored.nbytes))
        return restored.step + 1

    def prepare(self) -> None:
        """Plans, allocates and touches the memory for checkpoints."""
        self._client.prepare(self._state)

    def save(self, step: int) -> None:
        """Hands the state to ckptd; training continues before it is safe."""
        began = time.perf_counter()
        handle = self._client.save(self._state, step)
        self._log.write(journal.Saved(step, handle.stall_s))
        self._watchers.append(threading.Thread(target=self._watch, args=(handle, began), daemon=True))
        self._watchers[-1].start()

    def _watch(self, handle: ckptd_client.SaveHandle, began: float) -> None:
        for milestone in _MILESTONES:
            try:
                handle.wait(milestone)
            except SaveFailedError:  # superseded by a newer one: not every checkpoint is drained
                return
            self._log.write(journal.Reached(handle.step, milestone, time.perf_counter() - began))

    def finish(self) -> None:
        """Waits until the newest checkpoint is durable, then closes the client."""
        self._client.wait("durable")
        for watcher in self._watchers:
            watcher.join(_JOIN_S)
        self._client.close()
