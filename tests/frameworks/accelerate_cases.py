"""What Accelerate documents of save_state and load_state, and tests in its own repository, with ckptd underneath.

Two ranks run all cases, one after the other: accelerate_cases.py <folder>.
"""

import os
import sys
import traceback

import hf_training
import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import ProjectConfiguration
from accelerate_ranks import Counter, Training

from ckptd_client import ConfigError
from ckptd_client.integrations.accelerate import CkptdAccelerator

CASES = []


def case(function):
    CASES.append(function)
    return function


def differences(one, other):
    return hf_training.difference(hf_training.flat(one), hf_training.flat(other))


def published(training, *directories):
    """Waits until they are there, on all ranks; the training may go on."""
    training.accelerator._ckptd.settle()
    dist.barrier()
    assert all(os.path.isdir(path) for path in directories)


def copied(state):
    return {key: leaf.clone() if torch.is_tensor(leaf) else leaf for key, leaf in hf_training.flat(state).items()}


@case
def what_is_published_is_what_accelerate_writes(folder):
    training = Training(out=folder)
    training.run(2, save_every=0)
    stock, ours = folder + "/stock", folder + "/ours"
    Accelerator.save_state(training.accelerator, stock)
    training.accelerator.save_state(ours)
    published(training, ours)
    assert sorted(os.listdir(ours)) == sorted([".ckptd", *os.listdir(stock)])
    with open(stock + "/model.safetensors", "rb") as left, open(ours + "/model.safetensors", "rb") as right:
        assert left.read() == right.read()
    for name in os.listdir(stock):
        if name != "model.safetensors":
            states = (torch.load(f"{path}/{name}", weights_only=False) for path in (stock, ours))
            one, other = (hf_training.flat(state) for state in states)
            assert one.keys() == other.keys(), name


@case
def what_is_wrong_is_told_when_it_is_made(folder):
    project = ProjectConfiguration(folder, automatic_checkpoint_naming=True)
    with pytest.raises(ConfigError, match="round"):
        CkptdAccelerator(cpu=True, project_config=project, ckptd={"layout": "round"})
    with pytest.raises(ConfigError, match="round"):
        CkptdAccelerator(cpu=True, ckptd={"layout": "round", "store": folder, "job": "wrong"})


@case
def a_state_comes_back_before_it_is_drained(folder):
    """Of the objects in place: model, optimizer, scheduler, registered objects and random numbers."""
    training = Training(out=folder)
    training.run(2, save_every=0)
    training.accelerator.save_state(folder + "/first")
    before = copied(training.state())
    training.run(5, save_every=0)
    assert hf_training.difference(hf_training.flat(training.state()), before) != []
    training.accelerator.load_state(folder + "/first")
    assert hf_training.difference(hf_training.flat(training.state()), before) == []


@case
def a_hook_may_change_the_weights_while_it_saves(folder):
    """As one does that saves an average too, and puts the weights back."""
    training = Training(out=folder)
    training.run(1, save_every=0)

    def averaging(models, weights, directory):
        kept = {name: weight.clone() for name, weight in models[0].state_dict().items()}
        for weight in models[0].parameters():
            weight.data.fill_(7)
        torch.save(models[0].state_dict(), directory + "/average.pt")
        models[0].load_state_dict(kept)

    training.accelerator.register_save_state_pre_hook(averaging)
    training.accelerator.save_state(folder + "/first")
    published(training, folder + "/first")
    average = torch.load(folder + "/first/average.pt")
    assert all(bool((weight == 7).all()) for weight in average.values())
    assert len(torch.load(folder + "/first/optimizer.bin", weights_only=False)["state"]) > 0


@case
def an_older_state_comes_back(folder):
    training = Training(out=folder)
    states = {}
    for step in (1, 2, 4):
        training.run(step, save_every=0)
        training.accelerator.save_state(f"{folder}/after-{step}")
        states[step] = copied(training.state())
        published(training, f"{folder}/after-{step}")
    for step in (2, 1, 4):
        training.accelerator.load_state(f"{folder}/after-{step}")
        assert hf_training.difference(hf_training.flat(training.state()), states[step]) == []


@case
def a_directory_is_saved_again(folder):
    training = Training(out=folder)
    for step in (1, 2):
        training.run(step, save_every=0)
        training.accelerator.save_state(folder + "/latest")
    published(training, folder + "/latest")
    before = copied(training.state())
    training.run(3, save_every=0)
    Accelerator.load_state(training.accelerator, folder + "/latest")
    assert hf_training.difference(hf_training.flat(training.state()), before) == []


@case
def accelerates_own_files_are_loaded(folder):
    training = Training(out=folder)
    training.run(1, save_every=0)
    Accelerator.save_state(training.accelerator, folder + "/stock")
    before = copied(training.state())
    training.run(2, save_every=0)
    training.accelerator.load_state(folder + "/stock")
    assert hf_training.difference(hf_training.flat(training.state()), before) == []


@case
def names_are_automatic(folder):
    training = Training(out=folder, automatic=True)
    for step in (1, 2):
        training.run(step, save_every=0)
        training.save()
    place = folder + "/checkpoints"
    published(training, place + "/checkpoint_0", place + "/checkpoint_1")
    training.run(3, save_every=0)
    training.accelerator.load_state()
    assert training.counter.step == 2
    training.accelerator.load_state(place + "/checkpoint_0")
    assert training.counter.step == 1


@case
def a_name_is_not_given_twice(folder):
    training = Training(out=folder, automatic=True)
    training.save()
    training.accelerator.project_configuration.iteration = 0
    with pytest.raises(ValueError, match="is there already"):
        training.save()
    published(training, folder + "/checkpoints/checkpoint_0")
    with pytest.raises(ValueError, match="is there already"):
        training.save()


@case
def the_oldest_are_deleted(folder):
    training = Training(out=folder, automatic=True, total_limit=2)
    place = folder + "/checkpoints"
    for step in range(1, 6):
        training.run(step, save_every=0)
        training.save()
        published(training, f"{place}/checkpoint_{step - 1}")
    assert len(os.listdir(place)) <= 3, "one more than the limit, until the next save"
    training.accelerator._ckptd_rotate()  # as end_training does
    dist.barrier()
    assert sorted(os.listdir(place)) == ["checkpoint_3", "checkpoint_4"]


@case
def objects_that_were_not_registered_are_missed(folder):
    training = Training(out=folder)
    training.accelerator.save_state(folder + "/one")
    training.accelerator.register_for_checkpointing(Counter())
    with pytest.raises(RuntimeError, match="does not match the number of registered objects"):
        training.accelerator.load_state(folder + "/one")


@case
def hooks_of_the_users_own_are_called(folder):
    training = Training(out=folder)
    training.run(1, save_every=0)
    called = []

    def on_save(models, weights, output_dir):
        if training.accelerator.is_main_process:
            with open(os.path.join(output_dir, "note.txt"), "w") as file:
                file.write("mine")

    def on_load(models, input_dir):
        with open(os.path.join(input_dir, "note.txt")) as file:
            called.append(file.read())

    training.accelerator.register_save_state_pre_hook(on_save)
    training.accelerator.register_load_state_pre_hook(on_load)
    training.accelerator.save_state(folder + "/one")
    training.accelerator.load_state(folder + "/one")
    assert called == ["mine"]


@case
def pickled_models_are_saved_too(folder):
    training = Training(out=folder)
    training.run(1, save_every=0)
    training.accelerator.save_state(folder + "/one", safe_serialization=False)
    before = copied(training.state())
    training.run(2, save_every=0)
    training.accelerator.load_state(folder + "/one")
    assert hf_training.difference(hf_training.flat(training.state()), before) == []
    published(training, folder + "/one")
    assert "pytorch_model.bin" in os.listdir(folder + "/one")


@case
def what_is_not_there_is_an_error(folder):
    training = Training(out=folder)
    with pytest.raises(ValueError, match="folder does not exist"):
        training.accelerator.load_state(folder + "/nothing")
    with pytest.raises(ValueError, match="No input_dir provided"):
        training.accelerator.load_state()
    automatic = Training(out=folder + "/project", automatic=True)
    with pytest.raises(ValueError, match="there is no checkpoint"):
        automatic.accelerator.load_state()
    automatic.accelerator._ckptd.close()


def main():
    torch.set_num_threads(1)
    folder = sys.argv[1]
    for each in CASES:
        if sys.argv[2:] and each.__name__ not in sys.argv[2:]:
            continue
        AcceleratorState._reset_state()
        GradientState._reset_state()
        try:
            each(os.path.join(folder, each.__name__))
            said = "passed"
        except Exception:
            traceback.print_exc()
            said = "FAILED"
        print(f"rank {os.environ['RANK']}: {each.__name__} {said}", flush=True)
        dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort an interpreter that ends


if __name__ == "__main__":
    main()
