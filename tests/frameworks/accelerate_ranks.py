"""What each rank of test_accelerate.py runs: accelerate_ranks.py <options as JSON>.

out: directory of checkpoints. kind: "stock" or "ckptd". automatic: whether they are named automatically. resume: what
load_state is given, "" for nothing. die_at: a step after which the rank ends itself. state: a file for its state.
"""

import json
import logging
import os
import sys

import hf_training
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import ProjectConfiguration, set_seed

from ckptd_client.integrations.accelerate import CkptdAccelerator

SAVE_EVERY = 3


class Counter:
    """A registered object."""

    def __init__(self):
        self.step = 0

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
        self.step = state["step"]


class Training:
    """Model, optimizer, scheduler and loader of an Accelerator, with a counter of steps that is registered."""

    def __init__(self, kind="ckptd", out="", *, automatic=False, total_limit=None, **more):
        set_seed(11)
        project = ProjectConfiguration(out, automatic_checkpoint_naming=automatic, total_limit=total_limit)
        options = {"cpu": True, "project_config": project if automatic else None, **more}
        options["dataloader_config"] = DataLoaderConfiguration(use_seedable_sampler=True)
        self.accelerator = {"ckptd": CkptdAccelerator, "stock": Accelerator}[kind](**options)
        self.out, self.automatic = out, automatic
        model = hf_training.make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
        loader = torch.utils.data.DataLoader(hf_training.make_rows(), batch_size=4, shuffle=True)
        prepared = self.accelerator.prepare(model, optimizer, scheduler, loader)
        self.model, self.optimizer, self.scheduler, self.loader = prepared
        self.counter = Counter()
        self.accelerator.register_for_checkpointing(self.counter)

    def step(self, batch):
        loss = self.model(**batch).loss
        self.accelerator.backward(loss)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.counter.step += 1

    def run(self, steps, die_at=None, save_every=SAVE_EVERY):
        """A loop that begins its loader anew after each save, so that one that was resumed draws the same numbers."""
        while self.counter.step < steps:
            epoch, at = divmod(self.counter.step, len(self.loader))
            self.loader.set_epoch(epoch)
            for batch in self.accelerator.skip_first_batches(self.loader, at):
                self.step(batch)
                if self.counter.step == die_at:
                    hf_training.die()
                if save_every and self.counter.step % save_every == 0:
                    self.save()
                    break
                if self.counter.step == steps:
                    break

    def save(self):
        where = None if self.automatic else os.path.join(self.out, f"step-{self.counter.step}")
        return self.accelerator.save_state(where)

    def state(self):
        model = self.accelerator.unwrap_model(self.model)
        return {
            "model": model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "random": hf_training.random_states(),
            "step": self.counter.step,
        }


def main():
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO)
    options = json.loads(sys.argv[1])
    training = Training(options.get("kind", "ckptd"), options["out"], automatic=options.get("automatic", False))
    if options.get("resume") is not None:
        training.accelerator.load_state(options["resume"] or None)
        training.accelerator.project_configuration.iteration = training.counter.step // SAVE_EVERY
        print("resumed at", training.counter.step)
    training.run(options.get("steps", 8), options.get("die_at"))
    if options.get("state"):
        path = f"{options['state']}.{training.accelerator.process_index}"
        torch.save(hf_training.flat(training.state()), path)
    if options.get("wait", True):
        training.accelerator.end_training()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort an interpreter that ends


if __name__ == "__main__":
    main()
