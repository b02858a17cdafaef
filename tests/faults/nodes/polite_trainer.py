"""A rank over there that trains in lock-step, under DDP or FSDP2, and asks in each step whether to save and leave."""

import datetime as dt
import hashlib
import logging
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import ckptd_client

_GROUP_S = 60
_WAIT_S = 60.0
_SAVE_EVERY = 7  # steps


class PoliteTrainer:
    """Every public method is a call. The process stays: it leaves its loop, and comes back as another run would."""

    def __init__(self, rank: int, world: int, nbytes: int, meeting: str) -> None:
        self._rank, self._world, self._width, self._meeting = rank, world, nbytes, meeting
        self._client: Any = None
        self._state: dict[str, Any] = {}
        self._logs: list[str] = []
        self._next = 0
        handler = logging.Handler()
        handler.emit = lambda record: self._logs.append(record.getMessage())  # type: ignore[method-assign]
        logger = logging.getLogger("ckptd_client")
        logger.addHandler(handler)
        logger.propagate = False

    def watch(self) -> None:
        """Nothing is watched between calls."""

    def build(self, shape: str) -> None:
        """The process group, the model and its optimizer."""
        if not dist.is_initialized():
            where = f"file://{self._meeting}"
            patience = dt.timedelta(seconds=_GROUP_S)
            dist.init_process_group(
                "gloo", init_method=where, rank=self._rank, world_size=self._world, timeout=patience
            )
        torch.manual_seed(1)
        model: nn.Module = nn.Sequential(*(nn.Linear(self._width, self._width) for _ in range(3)))
        if shape == "ddp":
            model = DistributedDataParallel(model)
        else:
            for layer in model:
                fully_shard(layer)
            fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self._state = {"model": model, "optimizer": optimizer}

    def enter(self, job: str, drain_every: int, attach: bool) -> dict[str, Any]:
        """connect, load, and the first question: from here on a signal is a notice."""
        self._logs.clear()
        self._scramble()
        self._client = ckptd_client.connect(job, drain_every=drain_every, save_timeout_s=30.0)
        if attach:
            self._client.attach(self._state["optimizer"])
        restored = self._client.load(self._state)
        self._next = restored.step + 1 if restored is not None else 0
        found = {"step": None, "digest": "", "tier": ""}
        if restored is not None:
            found = {"step": restored.step, "digest": self._digest(), "tier": str(restored.tier)}
        assert self._client.preempted(self._next) is False
        return found

    def train(self, seconds: float, wait: bool = True) -> dict[str, Any]:
        """The loop of the README, for so long at most; at which step it was left, and what was saved."""
        began, said = time.monotonic(), ""
        step = self._next
        while True:
            step += 1
            self._step(step)
            if self._client.preempted(step):
                break
            if step % _SAVE_EVERY == 0:
                self._client.save(self._state, step)
            if self._everybody(time.monotonic() - began > seconds):
                return {"step": None, "digest": "", "said": "nobody preempted it", "logs": self._logs}
        digest = self._digest()
        try:
            handle = self._client.save(self._state, step, drain=True)
            if wait:
                handle.wait("durable", _WAIT_S)
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        return {"step": step, "digest": digest, "said": said, "logs": self._logs}

    def leave(self) -> None:
        """close."""
        self._client.close()

    def _step(self, step: int) -> None:
        """One whole step of a data-parallel training: gradients are reduced, so no rank is two steps ahead."""
        torch.manual_seed(1000 * step + self._rank)
        model, optimizer = self._state["model"], self._state["optimizer"]
        loss = model(torch.randn(4, self._width)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def _everybody(self, late: bool) -> bool:
        flag = torch.tensor([float(late)])
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag.item())

    def _tensors(self) -> list[torch.Tensor]:
        model, optimizer = self._state["model"], self._state["optimizer"]
        moments = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
        return [t.to_local() if isinstance(t, DTensor) else t for t in (*model.parameters(), *moments)]

    def _scramble(self) -> None:
        """What a new process would not have either."""
        with torch.no_grad():
            for tensor in self._tensors():
                tensor.fill_(float("nan"))
        if not self._client:
            return
        model, optimizer = self._state["model"], self._state["optimizer"]
        self._state["optimizer"] = type(optimizer)(model.parameters(), lr=1e-3)

    def _digest(self) -> str:
        """Of every bit that this rank has."""
        found = hashlib.sha256()
        for tensor in self._tensors():
            found.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return found.hexdigest()
