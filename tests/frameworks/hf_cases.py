"""What Trainer documents of its checkpoints, and tests in its own repository, with ckptd underneath: rewritten, small.

Two ranks run all cases, one after the other: hf_cases.py <folder>.
"""

import json
import os
import sys
import time
import traceback

import hf_ranks
import hf_training
import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from transformers import AutoTokenizer, EarlyStoppingCallback, LlamaForCausalLM, Trainer, TrainerCallback

from ckptd_client.integrations.hf import CkptdTrainerMixin

CASES = []


def case(function):
    CASES.append(function)
    return function


def rank():
    return dist.get_rank() if dist.is_initialized() else 0


def barrier():
    if dist.is_initialized():
        dist.barrier()


def begun(out, trainer="ckptd", **arguments):
    return hf_ranks.make({"out": str(out), "trainer": trainer, "arguments": arguments})[0]


def trained(out, trainer="ckptd", resume=None, **arguments):
    made = begun(out, trainer, **arguments)
    made.train(resume_from_checkpoint=resume)
    barrier()
    return made


def checkpoints(out):
    return sorted((name for name in os.listdir(out) if name.startswith("checkpoint-")), key=lambda name: int(name[11:]))


def final(trainer):
    state = {
        "model": trainer.model.state_dict(),
        "optimizer": trainer.optimizer.state_dict(),
        "scheduler": trainer.lr_scheduler.state_dict(),
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "step": trainer.state.global_step,
    }
    return hf_training.flat(state)


def same(one, other):
    assert hf_training.difference(final(one), final(other)) == []


def scores(trainer, *values):
    """Has each evaluation find the next of these."""
    found = iter(values)
    trainer.compute_metrics = lambda prediction: {"score": next(found)}
    return trainer


BEST = {
    "eval_strategy": "steps",
    "eval_steps": 3,
    "metric_for_best_model": "score",
    "greater_is_better": True,
    "load_best_model_at_end": True,
}


@case
def what_is_published_is_what_the_stock_saver_writes(folder):
    stock, ours = folder + "/stock", folder + "/ours"
    trained(stock, "stock", max_steps=3)
    trained(ours, max_steps=3)
    one, other = stock + "/checkpoint-3/", ours + "/checkpoint-3/"
    assert sorted(os.listdir(other)) == sorted([".ckptd", *os.listdir(one)])
    for name in os.listdir(one):
        if name.endswith((".pt", ".pth")):
            a, b = (hf_training.flat(torch.load(path + name, weights_only=False)) for path in (one, other))
            assert hf_training.difference(plain(a), plain(b)) == [], name
        elif name.endswith((".json", ".safetensors")) and name != "trainer_state.json":
            with open(one + name, "rb") as left, open(other + name, "rb") as right:
                assert left.read() == right.read(), name


def plain(state):
    return {key: torch.as_tensor(value) if type(value).__module__ == "numpy" else value for key, value in state.items()}


@case
def from_pretrained_reads_it(folder):
    trainer = trained(folder, max_steps=3)
    model = LlamaForCausalLM.from_pretrained(folder + "/checkpoint-3")
    assert hf_training.difference(dict(model.state_dict()), dict(trainer.model.state_dict())) == []
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert len(AutoTokenizer.from_pretrained(folder + "/checkpoint-3")) == hf_training.VOCABULARY


@case
def the_stock_trainer_resumes_it(folder):
    whole = trained(folder)
    same(trained(folder, "stock", resume=folder + "/checkpoint-6"), whole)


@case
def ckptd_resumes_what_the_stock_trainer_wrote(folder):
    whole = trained(folder, "stock")
    same(trained(folder, resume=folder + "/checkpoint-3"), whole)


@case
def a_newer_checkpoint_of_the_stock_trainer_goes_first(folder):
    trained(folder, max_steps=3)
    trained(folder, "stock", resume=True, max_steps=6)
    assert trained(folder, resume=True)._initial_global_step == 6


@case
def it_resumes_in_the_middle_of_an_epoch_with_accumulated_gradients(folder):
    arguments = {"gradient_accumulation_steps": 3, "num_train_epochs": 3, "max_steps": -1, "save_steps": 5}
    whole = trained(folder, **arguments)
    same(trained(folder, resume=folder + "/checkpoint-5", **arguments), whole)


@case
def it_resumes_without_skipping_data(folder):
    trained(folder, max_steps=4, save_steps=2)
    again = trained(folder, resume=True, max_steps=6, ignore_data_skip=True)
    assert again.state.global_step == 6


@case
def it_resumes_under_another_scheduler(folder):
    arguments = {"lr_scheduler_type": "cosine", "warmup_steps": 4, "weight_decay": 0.1, "save_steps": 4}
    whole = trained(folder, **arguments)
    same(trained(folder, resume=folder + "/checkpoint-4", **arguments), whole)


@case
def to_resume_where_there_is_nothing_is_an_error(folder):
    with pytest.raises(ValueError, match="No valid checkpoint found"):
        begun(folder).train(resume_from_checkpoint=True)


@case
def a_finished_training_is_not_begun_again(folder):
    """Or as far as the stock Trainer does."""
    trained(folder)
    stock = trained(folder, "stock", resume=folder + "/checkpoint-9", save_strategy="no")
    same(trained(folder, resume=True, save_strategy="no"), stock)


@case
def it_goes_back_to_an_older_checkpoint(folder):
    whole = trained(folder)
    same(trained(folder, resume=folder + "/checkpoint-3"), whole)
    assert checkpoints(folder) == ["checkpoint-3", "checkpoint-6", "checkpoint-9"]


@case
def the_oldest_are_deleted(folder):
    """Saves this close may be superseded before their drain: what is left is published, and the last one is there."""
    trained(folder, save_steps=1, save_total_limit=2)
    assert len(checkpoints(folder)) == 2
    assert checkpoints(folder)[-1] == "checkpoint-9"


@case
def the_best_is_loaded_at_the_end(folder):
    made = scores(begun(folder, **BEST), 1, 3, 2)
    made.train()
    barrier()
    assert made.state.best_model_checkpoint == folder + "/checkpoint-6"
    best = safetensors.torch.load_file(folder + "/checkpoint-6/model.safetensors")
    found = made.model.state_dict()
    assert all(torch.equal(tensor, found[name]) for name, tensor in best.items())
    with open(folder + "/checkpoint-9/trainer_state.json") as file:
        assert json.load(file)["best_model_checkpoint"] == folder + "/checkpoint-6"


@case
def the_best_stays_when_one_may(folder):
    made = scores(begun(folder, save_total_limit=1, **BEST), 3, 1, 2)
    made.train()
    barrier()
    assert checkpoints(folder) == ["checkpoint-3"]


@case
def only_the_best_are_saved(folder):
    arguments = BEST | {"save_strategy": "best", "load_best_model_at_end": False}
    made = scores(begun(folder, **arguments), 2, 1, 3)
    made.train()
    barrier()
    assert checkpoints(folder) == ["checkpoint-3", "checkpoint-9"]
    assert made.state.best_model_checkpoint == folder + "/checkpoint-9"


@case
def a_best_one_that_is_gone_is_brought_back(folder):
    """As after a crash before it was published: a resuming Trainer forgets it."""
    scores(begun(folder, max_steps=6, **BEST), 5, 1).train()
    barrier()
    if rank() == 0:
        os.rename(folder + "/checkpoint-3", folder + "/elsewhere")
    barrier()
    made = scores(begun(folder, **BEST), 1)
    made.train(resume_from_checkpoint=True)
    barrier()
    assert made.state.best_model_checkpoint == folder + "/checkpoint-3"
    best = safetensors.torch.load_file(folder + "/elsewhere/model.safetensors")
    found = made.model.state_dict()
    assert all(torch.equal(tensor, found[name]) for name, tensor in best.items())


@case
def each_epoch_is_saved(folder):
    trained(folder, save_strategy="epoch", num_train_epochs=2, max_steps=-1)
    assert checkpoints(folder) == ["checkpoint-12", "checkpoint-24"]


@case
def only_the_model_is_saved(folder):
    trained(folder, save_only_model=True, max_steps=3)
    names = os.listdir(folder + "/checkpoint-3")
    assert "model.safetensors" in names
    assert "trainer_state.json" in names
    assert not {"optimizer.pt", "scheduler.pt", "rng_state_0.pth"} & set(names)


@case
def callbacks_get_their_state_back(folder):
    arguments = BEST | {"restore_callback_states_from_checkpoint": True}
    made = scores(begun(folder, max_steps=6, **arguments), 5, 1)
    made.add_callback(EarlyStoppingCallback(early_stopping_patience=7))
    made.train()
    barrier()
    again = scores(begun(folder, **arguments), 1)
    again.add_callback(EarlyStoppingCallback(early_stopping_patience=1))
    again.train(resume_from_checkpoint=True)
    found = [each for each in again.callback_handler.callbacks if isinstance(each, EarlyStoppingCallback)]
    assert [each.early_stopping_patience for each in found] == [7]
    barrier()


@case
def a_callback_may_ask_for_a_save_twice(folder):
    class Twice(TrainerCallback):
        def on_epoch_end(self, args, state, control, **others):
            control.should_save = True

    made = begun(folder, max_steps=-1, num_train_epochs=1)
    made.add_callback(Twice())
    made.train()
    barrier()
    assert checkpoints(folder)[-1] == "checkpoint-12"


@case
def a_saver_of_ones_own_may_change_the_weights_while_it_saves(folder):
    """As those do that save an average, or merged adapters, and put the weights back."""

    class Averaging(Trainer):
        def save_model(self, *args, **options):
            weights = {name: weight.clone() for name, weight in self.model.state_dict().items()}
            with torch.no_grad():
                for weight in self.model.parameters():
                    weight.data.copy_(torch.full_like(weight, 7))
            super().save_model(*args, **options)
            self.model.load_state_dict(weights)

    class Own(CkptdTrainerMixin, Averaging):
        pass

    made = begun(folder, max_steps=3)
    own = Own(
        model=made.model, args=made.args, train_dataset=made.train_dataset, processing_class=made.processing_class
    )
    own.train()
    barrier()
    saved = safetensors.torch.load_file(folder + "/checkpoint-3/model.safetensors")
    assert all(bool((weight == 7).all()) for weight in saved.values())
    assert not any(bool((weight == 7).all()) for weight in own.model.parameters())


@case
def a_training_that_begins_anew_with_smaller_batches_saves_anew(folder):
    class Fills(TrainerCallback):
        """The memory, once, after step 5."""

        def on_step_end(self, args, state, control, **others):
            if state.global_step == 5 and made._train_batch_size == 2:
                raise RuntimeError("CUDA out of memory.")

    made = begun(folder, auto_find_batch_size=True)
    made.add_callback(Fills())
    made.train()
    barrier()
    assert made._train_batch_size == 1
    assert checkpoints(folder) == ["checkpoint-3", "checkpoint-6", "checkpoint-9"]
    for name in checkpoints(folder):
        with open(f"{folder}/{name}/trainer_state.json") as file:
            assert json.load(file)["train_batch_size"] == 1


@case
def of_two_saves_of_a_step_the_second_stays(folder):
    class Twice(TrainerCallback):
        def on_epoch_end(self, args, state, control, model, **others):
            with torch.no_grad():
                for weight in model.parameters():
                    weight.fill_(7)
            control.should_save = True

    made = begun(folder, max_steps=-1, num_train_epochs=1)
    made.add_callback(Twice())
    made.train()
    barrier()
    saved = safetensors.torch.load_file(folder + "/checkpoint-12/model.safetensors")
    assert all(bool((weight == 7).all()) for weight in saved.values())


@case
def a_model_of_ones_own_is_saved(folder):
    class Own(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Embedding(64, 64)

        def forward(self, input_ids, labels, **others):
            logits = self.inner(input_ids)
            return {"loss": torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}

    def run(max_steps, resume=None):
        made = begun(folder, max_steps=max_steps, remove_unused_columns=False)
        torch.manual_seed(1)
        own = hf_ranks.Ckptd(
            model=Own(), args=made.args, train_dataset=made.train_dataset, processing_class=made.processing_class
        )
        own.train(resume_from_checkpoint=resume)
        barrier()
        return own

    whole = run(6)
    same(run(6, folder + "/checkpoint-3"), whole)


@case
def what_ckptd_cannot_do_the_stock_saver_does(folder):
    made = trained(folder, save_on_each_node=True, max_steps=3)
    assert checkpoints(folder) == ["checkpoint-3"]
    assert ".ckptd" not in os.listdir(folder + "/checkpoint-3")
    assert made.ckptd_client is None
    assert type(made).__mro__[2] is Trainer


@case
def a_training_that_raises_leaves_what_was_staged(folder):
    class Raises(TrainerCallback):
        def on_step_end(self, args, state, control, **others):
            if state.global_step == 5:
                raise RuntimeError("on purpose")

    made = begun(folder)
    made.add_callback(Raises())
    with pytest.raises(RuntimeError, match="on purpose"):
        made.train()
    assert made.ckptd_client is None
    deadline = time.monotonic() + 60
    while not os.path.isdir(folder + "/checkpoint-3"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    barrier()
    assert trained(folder, resume=True).state.global_step == 9


def main():
    torch.set_num_threads(1)
    folder = sys.argv[1]
    only = sys.argv[2:]
    for each in CASES:
        if only and each.__name__ not in only:
            continue
        try:
            each(os.path.join(folder, each.__name__))
            print(f"rank {rank()}: {each.__name__} passed", flush=True)
        except Exception:
            print(f"rank {rank()}: {each.__name__} FAILED", flush=True)
            traceback.print_exc()
        barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort an interpreter that ends


if __name__ == "__main__":
    main()
