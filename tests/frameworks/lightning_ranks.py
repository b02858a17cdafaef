"""One rank of a small training under Lightning: undisturbed, killed after a save, resumed with ckptd or without.

Arguments: what to do, a directory. Prints what the test looks for.
"""

import logging
import os
import signal
import sys
import warnings

import lightning as pl
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader

from ckptd.shared.format.digest import digest
from ckptd_client.integrations.lightning import CkptdCheckpointIO

warnings.simplefilter("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
WIDTH, EPOCHS = 16, 6


class Net(pl.LightningModule):
    """With dropout, so that generators count."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.Dropout(0.1), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH))

    def training_step(self, batch, index):
        loss = (self.net(batch) - batch).square().mean()
        self.log("loss", loss.detach(), on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), 1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)]


class Seeded(Callback):
    """Dropout by the epoch: Lightning restores no generators."""

    def on_train_epoch_start(self, trainer, module):
        torch.manual_seed(100 * trainer.current_epoch + trainer.global_rank)


class Killed(Callback):
    """SIGKILL at the start of an epoch, when the last save is staged."""

    def __init__(self, io, epoch) -> None:
        self.io, self.epoch = io, epoch

    def on_train_epoch_start(self, trainer, module):
        if trainer.current_epoch == self.epoch:
            if trainer.global_rank == 0:
                self.io.handle.wait("staged")
            trainer.strategy.barrier()
            print(f"saved {state_digest(trainer)}", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)


class Told(Callback):
    def on_train_start(self, trainer, module):
        print(f"begins at epoch {trainer.current_epoch}, {state_digest(trainer)}")


def state_digest(trainer) -> str:
    found = [bytes(p.detach().numpy()) for p in trainer.model.parameters()]
    for optimizer in trainer.optimizers:
        for state in optimizer.state_dict()["state"].values():
            found += [bytes(torch.as_tensor(value).numpy()) for value in state.values()]
    found.append(repr([c.scheduler.state_dict() for c in trainer.lr_scheduler_configs]).encode())
    found.append(str(trainer.global_step).encode())
    return digest(b"".join(found)).hex()


def main() -> None:
    what, out = sys.argv[1:3]
    ranks = int(os.environ["WORLD_SIZE"])
    pl.seed_everything(1)
    io = CkptdCheckpointIO(job="lightning", start=False) if what in {"train", "resume"} else None
    keeping = ModelCheckpoint(out, filename="{epoch}", monitor="loss", save_top_k=2, save_last=True)
    callbacks = [Seeded(), Told(), keeping] + ([Killed(io, 4)] if what == "train" else [])
    trainer = pl.Trainer(
        max_epochs=EPOCHS, accelerator="cpu", devices=ranks, strategy="ddp" if ranks > 1 else "auto",
        plugins=[io] if io else [], callbacks=callbacks, logger=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=out, use_distributed_sampler=False,
    )  # fmt: skip
    data = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(2 + trainer.global_rank))
    path = None
    if what == "resume":
        trainer.strategy.setup_environment()  # ranks ask each other where to resume
        path = io.last()
    elif what == "stock":
        path = os.path.join(out, sys.argv[3])
    print("resumes from", path and os.path.basename(path))
    trainer.fit(Net(), DataLoader(data, 8, generator=torch.Generator()), ckpt_path=path)
    print(f"ended, {state_digest(trainer)}")


main()
