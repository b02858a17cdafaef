"""A rank over there: the calls of the tests of one node, in a process group over loopback."""

import datetime
import logging
from typing import Any

import torch.distributed as dist

import ckptd_client
from tests.faults.ranks import Trainer

_GROUP_S = 60


class NodeTrainer(Trainer):
    """Every public method is a call."""

    def __init__(self, rank: int, world: int, nbytes: int, meeting: str) -> None:
        super().__init__(rank, nbytes)
        self._world = world
        self._meeting = meeting

    def connect(self, job: str, **settings: Any) -> int:
        """connect, after the process group; the incarnation."""
        if not dist.is_initialized():
            dist.init_process_group(
                "gloo",
                init_method=f"file://{self._meeting}",
                rank=self._rank,
                world_size=self._world,
                timeout=datetime.timedelta(seconds=_GROUP_S),
            )
        settings = {"save_timeout_s": 20.0, "start": False, **settings}
        self._client = ckptd_client.connect(job, **settings)
        return int(self._client.incarnation)

    def quiet(self) -> None:
        """The client's log is not for this test."""
        logging.getLogger("ckptd_client").setLevel(logging.CRITICAL)
