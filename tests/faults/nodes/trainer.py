"""A rank over there: the calls of the tests of one node, in a process group over loopback."""

import datetime as dt
import json
import logging
import time
from typing import Any

import torch.distributed as dist

import ckptd_client
from tests.faults.ranks import Trainer

_GROUP_S = 60
_PUMP_S = 0.02


class NodeTrainer(Trainer):
    """Every public method is a call."""

    def __init__(self, rank: int, world: int, nbytes: int, meeting: str) -> None:
        super().__init__(rank, nbytes)
        self._world = world
        self._meeting = meeting
        self._diary = ""

    def connect(self, job: str, **settings: Any) -> int:
        """connect, after the process group; the incarnation."""
        if not dist.is_initialized():
            dist.init_process_group(
                "gloo",
                init_method=f"file://{self._meeting}",
                rank=self._rank,
                world_size=self._world,
                timeout=dt.timedelta(seconds=_GROUP_S),
            )
        settings = {"save_timeout_s": 20.0, "start": False, **settings}
        self._client = ckptd_client.connect(job, **settings)
        return int(self._client.incarnation)

    def watch(self) -> None:
        """Notes what handles say now; in a file, so that it is known of a rank that is killed as well."""
        known = len(self._history)
        super().watch()
        if self._history[known:] and self._diary:
            with open(self._diary, "a", encoding="ascii") as file:
                file.writelines(json.dumps(news) + "\n" for news in self._history[known:])

    def keep_diary(self, path: str) -> None:
        """From now on what handles say is noted in this file."""
        self._diary = path

    def save_and_watch(self, step: int, seconds: float) -> str:
        """A save, and what becomes of it for so long; what went wrong."""
        try:
            self.save(step)
            deadline = time.monotonic() + seconds
            while self._handles[step].end is None and time.monotonic() < deadline:
                self._client._staging.pump(_PUMP_S)
                self.watch()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return str(self._handles[step].end)

    def quiet(self) -> None:
        """The client's log is not for this test."""
        logging.getLogger("ckptd_client").setLevel(logging.CRITICAL)

    def _meet(self, step: int) -> None:
        dist.barrier()

    def incarnation(self) -> int:
        """Which life of the job this is."""
        return int(self._client.incarnation)

    def save_staged(self, step: int, timeout_s: float) -> None:
        """A save that is staged in time, or raises."""
        self.save(step)
        self.wait(step, "staged", timeout_s)
