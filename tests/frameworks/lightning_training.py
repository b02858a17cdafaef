"""A small training under Lightning: its module, data and trainers, as the tests of both kinds of strategy use them."""

import logging
import warnings

import lightning as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from ckptd.shared.format.digest import digest
from ckptd_client.integrations.lightning_sharded import CkptdFSDPStrategy, CkptdModelParallelStrategy

warnings.simplefilter("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
WIDTH = 16


class Net(pl.LightningModule):
    """With dropout, so that generators count. sharded: by FSDP2, over all ranks. scores: what each epoch logs."""

    def __init__(self, *, sharded: bool = False, scores=()) -> None:
        super().__init__()
        self.sharded, self.scores, self.tested = sharded, scores, None
        self.net = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.Dropout(0.1), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH))

    def configure_model(self):
        if self.sharded and not isinstance(next(self.net.parameters()), DTensor):
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch, index):
        loss = (self.net(batch) - batch).square().mean()
        self.log("loss", loss.detach(), on_step=False, on_epoch=True, sync_dist=True)
        if self.scores:
            score = torch.tensor(float(self.scores[self.current_epoch]))
            self.log("score", score, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def test_step(self, batch, index):
        self.tested = {name: _local(parameter.detach()) for name, parameter in self.named_parameters()}

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), 1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)]


class OnCpu:
    """Of an FSDPStrategy: FSDP1 works on CPUs when it is told so, which Lightning has no word for."""

    def _setup_model(self, model):
        if not any(isinstance(each, FullyShardedDataParallel) for each in model.modules()):
            layers, cpu = ModuleWrapPolicy({nn.Linear}), torch.device("cpu")
            model = FullyShardedDataParallel(model, auto_wrap_policy=layers, device_id=cpu, use_orig_params=True)
        return super()._setup_model(model)


class Fsdp1(OnCpu, FSDPStrategy):
    """Lightning's own."""


class CkptdFsdp1(OnCpu, CkptdFSDPStrategy):
    """Ours."""


def sharded_strategy(kind, ckptd=None):
    """Of two ranks, "fsdp1" or "fsdp2"; Lightning's own without settings for ckptd."""
    settings = {} if ckptd is None else {"ckptd": ckptd}
    if kind == "fsdp1":
        return (Fsdp1 if ckptd is None else CkptdFsdp1)(state_dict_type="sharded", **settings)
    sizes = {"data_parallel_size": 2, "tensor_parallel_size": 1}
    return (ModelParallelStrategy if ckptd is None else CkptdModelParallelStrategy)(**sizes, **settings)


class Seeded(Callback):
    """Dropout by the step: Lightning restores no generators."""

    def on_train_batch_start(self, trainer, module, batch, index):
        torch.manual_seed(100 * trainer.global_step + trainer.global_rank)


def data(rank=0):
    """Four batches an epoch, in one order."""
    found = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(2 + rank))
    return DataLoader(found, 8, generator=torch.Generator())


def state_of(trainer):
    """What training has made, by name: this rank's shards, optimizer, schedulers, and where it is."""
    found = {name: _local(parameter.detach()) for name, parameter in trainer.model.named_parameters()}
    for optimizer in trainer.optimizers:
        for number, state in optimizer.state_dict()["state"].items():
            found |= {f"{number}.{name}": _local(torch.as_tensor(value)) for name, value in state.items()}
    found["schedulers"] = repr([config.scheduler.state_dict() for config in trainer.lr_scheduler_configs])
    found["step"] = (trainer.global_step, trainer.current_epoch)
    return found


def _local(tensor):
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).clone()


def state_digest(trainer) -> str:
    found = [
        value.numpy().tobytes() if isinstance(value, torch.Tensor) else repr(value).encode()
        for _, value in sorted(state_of(trainer).items())  # FSDP1 loads an optimizer's state in an order of its own
    ]
    return digest(b"".join(found)).hex()
