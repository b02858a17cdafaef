"""One rank of a small sharded training under Lightning: undisturbed, killed after a save, resumed, with ckptd or not.

Arguments: the kind of shards, what to do, a directory, and what to resume from. Prints what the test looks for.
"""

import os
import signal
import sys

import lightning as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning_training import Net, Seeded, data, sharded_strategy, state_digest

EPOCHS = 6


class Killed(Callback):
    """SIGKILL at the start of an epoch, when the last save is staged, or durable."""

    def __init__(self, epoch, milestone) -> None:
        self.epoch, self.milestone = epoch, milestone

    def on_train_epoch_start(self, trainer, module):
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
    kind, what, out, *rest = sys.argv[1:]
    ranks = int(os.environ["WORLD_SIZE"])
    pl.seed_everything(1)
    torch.set_num_threads(1)
    stock = what in {"reference", "stock"}
    strategy = sharded_strategy(kind, None if stock else {"job": "sharded", "start": False})
    keeping = ModelCheckpoint(out, filename="{epoch}", monitor="loss", save_top_k=2, save_last=True)
    callbacks = [Seeded(), Told(), keeping]
    callbacks += [Killed(4, *rest)] if what == "train" else []
    trainer = pl.Trainer(
        max_epochs=EPOCHS, accelerator="cpu", devices=ranks, strategy=strategy, callbacks=callbacks, logger=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=out, use_distributed_sampler=False,
    )  # fmt: skip
    path = None
    if what == "resume":
        path = strategy.last(out)
    elif what == "stock":
        path = os.path.join(out, *rest)
    print("resumes from", path and os.path.basename(path))
    trainer.fit(Net(sharded=kind == "fsdp2"), data(int(os.environ["RANK"])), ckpt_path=path)
    print(f"ended, {state_digest(trainer)}")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort an interpreter that ends


main()
