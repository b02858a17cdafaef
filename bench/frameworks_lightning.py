"""Stall of trainer.save_checkpoint on two ranks (DDP): Lightning's own saver, and ckptd's CheckpointIO.

One rank of it: ``python -m bench.frameworks_lightning STORE`` prints a line of JSON on rank 0.
"""

import json
import logging
import os
import statistics
import sys
import time
import warnings

import lightning as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import nn
from torch.utils.data import DataLoader

from ckptd_client.integrations.lightning import CkptdCheckpointIO

warnings.simplefilter("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
SAVES, WIDTH, LAYERS = 5, 1536, 6


class Net(pl.LightningModule):
    """Large enough for bytes to count."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))

    def training_step(self, batch: torch.Tensor, _index: int) -> torch.Tensor:
        """A loss."""
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """With moments."""
        return torch.optim.AdamW(self.parameters())


class Saves(Callback):
    """By turns with the one and the other, after each batch."""

    def __init__(self, store: str, ours: CkptdCheckpointIO) -> None:
        self.ways = {"default_s": TorchCheckpointIO(), "ckptd_s": ours}
        self.store, self.ours = store, ours
        self.seconds: dict[str, list[float]] = {name: [] for name in self.ways}

    def on_train_batch_end(self, trainer: pl.Trainer, *_: object) -> None:
        """Two saves."""
        for name, way in self.ways.items():
            trainer.strategy.checkpoint_io = way
            trainer.strategy.barrier()
            began = time.perf_counter()
            trainer.save_checkpoint(os.path.join(self.store, f"{name}.ckpt"))
            self.seconds[name].append(time.perf_counter() - began)
            if way is self.ours and trainer.global_rank == 0:
                self.ours.client.wait("durable")
            trainer.strategy.barrier()


def main() -> None:
    """A training of as many batches as saves."""
    store = sys.argv[1]
    ranks = int(os.environ["WORLD_SIZE"])
    saves = Saves(store, CkptdCheckpointIO(job="bench", store=os.path.join(store, "ckptd")))
    trainer = pl.Trainer(
        max_epochs=1, accelerator="cpu", devices=ranks, strategy="ddp", callbacks=[saves], logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False, default_root_dir=store,
        use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(Net(), DataLoader(torch.randn(SAVES, WIDTH), 1))
    if trainer.global_rank == 0:
        rows = {name: statistics.median(seconds[1:]) for name, seconds in saves.seconds.items()}
        nbytes = os.path.getsize(os.path.join(store, "default_s.ckpt"))
        print(json.dumps({"framework": "Lightning, DDP", "nbytes": nbytes, **rows}))


if __name__ == "__main__":
    main()
