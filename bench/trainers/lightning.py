"""Lightning, a save in the middle of fit: its own saver and ckptd's, under DDP and under FSDP2's strategy."""

import logging
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from bench.trainers import Measure, Pair, Way, at_once, timed

NEEDS = "lightning"
_WIDTH = 1024


def ddp(nbytes: int, folder: Path, measure: Measure) -> None:
    """nbytes: of parameters and moments, which rank 0 saves for all."""
    from lightning.pytorch.plugins.io import TorchCheckpointIO  # noqa: PLC0415 - not where it is not measured

    from ckptd_client.integrations.lightning import CkptdCheckpointIO  # noqa: PLC0415

    ours = CkptdCheckpointIO(job="bench-lightning")

    def saving(trainer: Any) -> None:
        def choose(io: Any) -> Callable[[], None]:
            return lambda: setattr(trainer.strategy, "checkpoint_io", io)

        def settle() -> None:
            if trainer.is_global_zero:  # it alone is connected
                ours.client.wait("durable")

        stock = _way("TorchCheckpointIO", trainer, folder, choose(TorchCheckpointIO()), _nothing)
        measure(Pair("Lightning, DDP", stock, _way("CkptdCheckpointIO", trainer, folder, choose(ours), settle)))

    _fit(nbytes, "ddp", saving)


def fsdp2(nbytes: int, folder: Path, measure: Measure) -> None:
    """nbytes: of parameters and moments, over all ranks."""
    from lightning.pytorch.strategies import ModelParallelStrategy  # noqa: PLC0415

    from ckptd_client.integrations.lightning_sharded import CkptdModelParallelStrategy  # noqa: PLC0415

    class Both(CkptdModelParallelStrategy):  # type: ignore[misc]
        """Saves as the one of its bases that saver is."""

        saver: Any = CkptdModelParallelStrategy

        def save_checkpoint(self, *args: Any, **options: Any) -> None:
            """The whole."""
            self.saver.save_checkpoint(self, *args, **options)

        def lightning_module_state_dict(self) -> Any:
            """What Lightning asks for first."""
            return self.saver.lightning_module_state_dict(self)

        def optimizer_state(self, optimizer: Any) -> Any:
            """And then."""
            return self.saver.optimizer_state(self, optimizer)

    strategy = Both(dist.get_world_size(), 1, ckptd={"job": "bench-lightning-fsdp2"})

    def saving(trainer: Any) -> None:
        def way(saver: type, settle: Callable[[], None]) -> Way:
            return _way(saver.__name__, trainer, folder, lambda: setattr(strategy, "saver", saver), settle)

        def settle() -> None:
            strategy._ckptd_saves().settle()  # noqa: SLF001 - until its directory is there, too

        stock = way(ModelParallelStrategy, _nothing)
        measure(Pair("Lightning, FSDP2", stock, way(CkptdModelParallelStrategy, settle)))

    _fit(nbytes, strategy, saving)


def _way(name: str, trainer: Any, folder: Path, choose: Callable[[], None], settle: Callable[[], None]) -> Way:
    """trainer.save_checkpoint, when choose has put the saver in its place."""

    def save(step: int) -> float:
        choose()
        progress = trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step
        progress.total.completed = step  # trainer.global_step: of one step there would be one save
        return timed(lambda: trainer.save_checkpoint(folder / f"{name}-{step}.ckpt"))

    def settle_and_forget() -> float:
        settle()
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
        return at_once()

    return Way(name, save, settle_and_forget)


def _nothing() -> None:
    """For a saver whose files exist when it returns."""


def _fit(nbytes: int, strategy: Any, saving: Callable[[Any], None]) -> None:
    """Calls saving with the trainer after a step of the training."""
    import lightning as pl  # noqa: PLC0415
    from lightning.pytorch.callbacks import Callback  # noqa: PLC0415

    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    layers = max(1, nbytes // (3 * 4 * _WIDTH * _WIDTH))
    sharded = not isinstance(strategy, str)

    class Net(pl.LightningModule):  # type: ignore[misc]
        """A model of the requested size."""

        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(layers)))

        def configure_model(self) -> None:
            """Shards each layer if the strategy has a mesh."""
            if sharded:
                from torch.distributed.fsdp import fully_shard  # noqa: PLC0415

                fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

        def training_step(self, batch: torch.Tensor, _index: int) -> Any:
            """A loss."""
            return self.net(batch).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            """With moments."""
            return torch.optim.AdamW(self.parameters())

    class Saving(Callback):  # type: ignore[misc]
        """Saves where ModelCheckpoint does."""

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            """The only batch's."""
            saving(trainer)

    trainer = pl.Trainer(
        max_steps=1, accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy=strategy, logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False, callbacks=[Saving()],
        use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(Net(), torch.utils.data.DataLoader(torch.randn(1, _WIDTH)))
