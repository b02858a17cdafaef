"""What each rank of test_hf.py runs: hf_ranks.py <options as JSON>.

out: output_dir. trainer: "stock" or "ckptd". resume: as for train(). die_at: a step after which the rank ends itself.
state: a file for this rank's state at the end. arguments: more of TrainingArguments. ckptd: options of the mixin.
"""

import json
import logging
import os
import sys

import hf_training
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from ckptd_client.integrations.hf import CkptdTrainerMixin


class Ckptd(CkptdTrainerMixin, Trainer):
    pass


class Watch(TrainerCallback):
    """Ends the process after a step; notes what was there after each save."""

    def __init__(self, out, die_at):
        self.out, self.die_at, self.seen = out, die_at, []

    def on_save(self, args, state, control, **others):
        self.seen.append(sorted(name for name in os.listdir(self.out) if name.startswith("checkpoint-")))

    def on_step_end(self, args, state, control, **others):
        if state.global_step == self.die_at and not control.should_save:
            hf_training.die()


def make(options):
    out = options["out"]
    arguments = TrainingArguments(
        output_dir=out,
        use_cpu=True,
        per_device_train_batch_size=2,
        report_to=[],
        disable_tqdm=True,
        logging_steps=1,
        seed=11,
        **({"save_steps": 3, "max_steps": 9} | options.get("arguments", {})),
    )
    rows = hf_training.make_rows()
    watch = Watch(out, options.get("die_at"))
    more = {"ckptd": options.get("ckptd")} if options["trainer"] == "ckptd" else {}
    trainer = {"ckptd": Ckptd, "stock": Trainer}[options["trainer"]](
        model=hf_training.make_model(),
        args=arguments,
        train_dataset=rows,
        eval_dataset=rows[:8],
        processing_class=hf_training.make_tokenizer(),
        callbacks=[watch],
        **more,
    )
    return trainer, watch


def main():
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO)
    options = json.loads(sys.argv[1])
    trainer, watch = make(options)
    trainer.train(resume_from_checkpoint=options.get("resume"))
    rank = trainer.args.process_index
    state = {
        "model": trainer.model.state_dict(),
        "optimizer": trainer.optimizer.state_dict(),
        "scheduler": trainer.lr_scheduler.state_dict(),
        "random": hf_training.random_states(),
        "step": trainer.state.global_step,
        "epoch": trainer.state.epoch,
        "losses": [entry.get("loss") for entry in trainer.state.log_history],
        "best": trainer.state.best_model_checkpoint,
    }
    if options.get("state"):
        torch.save(hf_training.flat(state), f"{options['state']}.{rank}")
    print(json.dumps({"rank": rank, "seen": watch.seen, "best": state["best"]}))
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort an interpreter that ends


if __name__ == "__main__":
    main()
