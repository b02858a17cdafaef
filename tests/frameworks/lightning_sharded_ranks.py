"""One rank of a small FSDP2 training under Lightning: undisturbed, killed after a save, resumed with ckptd or without.

Arguments: what to do, a directory, and what to resume from. Prints what the test looks for.
"""

import os
import signal
import sys

import lightning as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning_training import Net, Seeded, data, state_digest

from ckptd_client.integrations.lightning_sharded import CkptdModelParallelStrategy

EPOCHS = 6


class Killed(Callback):
    """SIGKILL at the start of an epoch, when the last save is staged; or when it is durable, and before it appears."""

    def __init__(self, epoch, milestone) -> None:
        self.epoch, self.milestone = epoch, milestone

    def on_train_epoch_start(self, trainer, module):
        if trainer.current_epoch == self.epoch - 1 and self.milestone == "durable" and trainer.is_global_zero:
            trainer.strategy._ckptd.arrivals.lock.acquire()  # so that nothing appears any more
        if trainer.current_epoch == self.epoch:
            trainer.strategy.handle.wait(self.milestone)
            trainer.strategy.barrier()
            print(f"saved {state_digest(trainer)}", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)


class Told(Callback):
    def on_train_start(self, trainer, module):
        tier = getattr(trainer.strategy, "tier", None)
        print(f"begins at epoch {trainer.current_epoch} from {tier}, {state_digest(trainer)}")


def main() -> None:
    what, out = sys.argv[1:3]
    ranks = int(os.environ["WORLD_SIZE"])
    pl.seed_everything(1)
    torch.set_num_threads(1)
    stock = what in {"reference", "stock"}
    sizes = {"data_parallel_size": ranks, "tensor_parallel_size": 1}
    settings = {"job": "sharded", "start": False}
    strategy = ModelParallelStrategy(**sizes) if stock else CkptdModelParallelStrategy(**sizes, ckptd=settings)
    keeping = ModelCheckpoint(out, filename="{epoch}", monitor="loss", save_top_k=2, save_last=True)
    callbacks = [Seeded(), Told(), keeping]
    callbacks += [Killed(4, sys.argv[3])] if what == "train" else []
    trainer = pl.Trainer(
        max_epochs=EPOCHS, accelerator="cpu", devices=ranks, strategy=strategy, callbacks=callbacks, logger=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=out, use_distributed_sampler=False,
    )  # fmt: skip
    path = None
    if what == "resume":
        path = strategy.last(out)
    elif what == "stock":
        path = os.path.join(out, sys.argv[3])
    print("resumes from", path and os.path.basename(path))
    trainer.fit(Net(sharded=True), data(int(os.environ["RANK"])), ckpt_path=path)
    print(f"ended, {state_digest(trainer)}")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort an interpreter that ends


main()
