"""Two ways for the training to keep its state: torch.save, only timed, and ckptd."""

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
_LAST_WORDS_S = 5.0


class Saver(Protocol):
    """What the training loop asks of a way to save."""

    def restore(self) -> int:
        """The step to go on with, the state set accordingly; 0 when there is nothing to restore."""

    def prepare(self) -> None:
        """Gets ready for the first save; the optimizer has its state by now, which it makes in its first step."""

    def save(self, step: int) -> None:
        """Saves the state as it is after step."""

    def finish(self) -> None:
        """Returns when the last save is safe."""


class TorchSaver:
    """The yardstick: rank 0 writes the whole state with torch.save and syncs it, while the other ranks wait for it."""

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
        """Overwrites one file and notes how long that took."""
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
    """ckptd, as a training uses it; a thread per save notes when the milestones are reached."""

    def __init__(self, task: Task, arena: str, state: dict[str, object], log: journal.Writer) -> None:
        self._client = ckptd_client.connect(job=task.job, store=task.store, arena=arena)
        self._state = state
        self._log = log
        self._watchers: list[threading.Thread] = []

    def restore(self) -> int:
        """Goes on after the newest checkpoint, wherever ckptd finds it."""
        restored = self._client.load(self._state)
        if restored is None:
            return 0
        self._log.write(journal.Restored(restored.step, restored.tier, restored.seconds, restored.nbytes))
        return restored.step + 1

    def prepare(self) -> None:
        """Has the memory for the checkpoints planned, allocated and touched."""
        self._client.prepare(self._state)

    def save(self, step: int) -> None:
        """Hands the state to ckptd; training goes on before it is safe."""
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
        """Waits until the newest checkpoint is durable and leaves."""
        self._client.wait("durable")
        for watcher in self._watchers:
            watcher.join(_LAST_WORDS_S)
        self._client.close()
