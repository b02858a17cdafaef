"""Lightning with DDP: trainer.save_checkpoint through its own CheckpointIO, and through ckptd's."""

import contextlib
import logging
import os
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from bench.trainers import Pair, Way

NEEDS = "lightning"
_WIDTH = 1024


@contextlib.contextmanager
def pairs(nbytes: int, folder: Path) -> Iterator[list[Pair]]:
    """nbytes: of parameters and moments, which rank 0 saves for all."""
    import lightning as pl  # noqa: PLC0415 - not where it is not measured
    from lightning.pytorch.plugins.io import TorchCheckpointIO  # noqa: PLC0415

    from ckptd_client.integrations.lightning import CkptdCheckpointIO  # noqa: PLC0415

    class Net(pl.LightningModule):  # type: ignore[misc]
        """As many bytes as were asked for."""

        def __init__(self) -> None:
            super().__init__()
            layers = max(1, nbytes // (3 * 4 * _WIDTH * _WIDTH))
            self.net = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(layers)))

        def training_step(self, batch: torch.Tensor, _index: int) -> Any:
            """A loss."""
            return self.net(batch).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            """With moments."""
            return torch.optim.AdamW(self.parameters())

    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    os.environ |= {"TORCHELASTIC_RUN_ID": "bench", "GROUP_RANK": "0", "LOCAL_RANK": os.environ["RANK"]}
    trainer = pl.Trainer(
        max_steps=1, accelerator="cpu", devices=dist.get_world_size(), strategy="ddp", logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(Net(), torch.utils.data.DataLoader(torch.randn(1, _WIDTH)))
    ours = CkptdCheckpointIO(job="bench-lightning")

    def saving(io: Any) -> Any:
        def save(step: int) -> float:
            trainer.strategy.checkpoint_io = io
            began = time.perf_counter()
            trainer.save_checkpoint(folder / f"{type(io).__name__}-{step}.ckpt")
            return time.perf_counter() - began

        return save

    def settle() -> float:
        if dist.get_rank() == 0:
            ours.client.wait("durable")
        dist.barrier()
        for path in folder.glob("*.ckpt"):
            path.unlink(missing_ok=True)
        return 0.0

    own = Way("TorchCheckpointIO", saving(TorchCheckpointIO()), lambda: 0.0)
    yield [Pair("Lightning, DDP", own, Way("CkptdCheckpointIO", saving(ours), settle))]
    ours.teardown()
