"""What DeepSpeed's own tests of checkpoints ask of ZeRO, asked of it with ckptd underneath: rewritten.

Two ranks run each case for the stages and numbers that it is for: deepspeed_cases.py <folder> [case...].
"""

import os
import pathlib
from functools import partial

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.checkpoint.constants import BASE_OPTIMIZER_STATE, OPTIMIZER_STATE_DICT
from deepspeed.checkpoint.reshape_3d_utils import model_3d_desc
from deepspeed.checkpoint.zero_checkpoint import ZeROCheckpoint
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from deepspeed_bench import (
    WARMUP,
    WIDTH,
    Bench,
    Cases,
    Frozen,
    Small,
    difference,
    plain,
    run_cases,
    same,
    state_of,
    take_steps,
)
from deepspeed_kinds import ANY, FLAT, IN_PARTS, PARTITIONED
from zero_model import Model as Tied

case, partitioned_case, flat_case, in_parts_case = Cases(), Cases(), Cases(), Cases()


def words(engine):
    """Steps of the model with tied weights."""
    for _ in range(2):
        generator = torch.Generator().manual_seed(100 * engine.global_steps + dist.get_rank())
        engine.backward(engine(torch.randint(13, (4, 5), generator=generator)).float().square().mean())
        engine.step()


@case
def optimizer_states_come_back(b):
    trained, loaded = b.round_trip(b.engine)
    same(trained, loaded)


@case
def optimizer_states_are_left_out(b):
    trained, loaded = b.round_trip(b.engine, load_optimizer_states=False)
    same(trained["module"], loaded["module"])
    same(trained["counts"], loaded["counts"])
    assert difference(trained["optimizer"], loaded["optimizer"])


@case
def only_the_module_comes_back(b):
    trained, loaded = b.round_trip(b.engine, load_module_only=True, load_optimizer_states=False)
    same(trained["module"], loaded["module"])
    assert loaded["counts"] == [0, 0, 0]


@case
def the_scheduler_comes_back(b):
    trained, loaded = b.round_trip(partial(b.engine, scheduler=WARMUP), load_optimizer_states=False)
    same(trained["scheduler"], loaded["scheduler"])


@case
def the_scheduler_is_left_out(b):
    make = partial(b.engine, scheduler=WARMUP)
    _, loaded = b.round_trip(make, load_optimizer_states=False, load_lr_scheduler_states=False)
    same(loaded["scheduler"], state_of(make())["scheduler"])


@case
def frozen_weights_come_back(b):
    trained, loaded = b.round_trip(partial(b.engine, model=Frozen))
    same(trained, loaded)


@case
def frozen_weights_come_back_without_optimizer_states(b):
    trained, loaded = b.round_trip(partial(b.engine, model=Frozen), load_optimizer_states=False)
    same(trained["module"], loaded["module"])


@case
def frozen_weights_come_back_with_the_module_only(b):
    trained, loaded = b.round_trip(partial(b.engine, model=Frozen), load_module_only=True, load_optimizer_states=False)
    same(trained["module"], loaded["module"])


@case
def frozen_weights_are_left_out(b):
    saving = {"exclude_frozen_parameters": True}
    trained, loaded = b.round_trip(partial(b.engine, model=Frozen), saving=saving, load_module_strict=False)
    if b.stage < 3:
        names = model_file(b.out())["module"].keys()
        assert names == {"second.weight", "second.bias", "seen"}
        same(trained["optimizer"], loaded["optimizer"])


@case
def tied_weights_come_back(b):
    trained, loaded = b.round_trip(partial(b.engine, model=Tied), steps=words)
    for state in (trained, loaded):
        state["module"].pop("mean")  # of rank 0, and each has its own
    same(trained, loaded)
    if b.stage:
        Tied().load_state_dict(get_fp32_state_dict_from_zero_checkpoint(b.out()), strict=b.stage > 1)


@case
def what_the_client_gives_comes_back(b):
    given = {"epoch": 3, "seen": torch.arange(5), "where": ("a", {1: None})}
    b.round_trip(b.engine, saving={"client_state": given})
    _, said = b.load_from_memory(b.engine(1))
    same(plain({key: said[key] for key in given}), plain(given))


@case
def an_engine_that_took_no_step_comes_back(b):
    trained, loaded = b.round_trip(b.engine, steps=lambda _: None, tag=None, load_optimizer_states=False)
    same(trained["module"], loaded["module"])


@case
def the_engine_that_saved_loads_at_once(b):
    """While it is being drained. The directory may be any object that names one."""
    out = pathlib.Path(b.out())
    engine = b.engine()
    take_steps(engine)
    before = state_of(engine)["module"]
    with b.under(engine) as attached:
        engine.save_checkpoint(out)
        path, _ = engine.load_checkpoint(out, load_optimizer_states=False, load_lr_scheduler_states=False)
        assert path.startswith(os.path.join(b.out(), "global_step2", "")), path
        attached.client.wait("durable", 60)
    dist.barrier()
    same(state_of(engine)["module"], before)


@case
def what_was_loaded_is_saved_at_once(b):
    first = b.engine()
    take_steps(first)
    b.save(first)
    second = b.engine(1)
    with b.under(second) as attached:
        second.load_checkpoint(b.out())
        second.save_checkpoint(b.out(), "2")
        attached.handle.wait("durable", 60)
    dist.barrier()
    third = b.engine(2)
    third.load_checkpoint(b.out(), "2")
    same(state_of(first), state_of(third))


@case
def it_is_saved_before_gradients_are_accumulated(b):
    def half(engine):
        x = torch.ones(4, WIDTH, dtype=next(engine.module.parameters()).dtype)
        engine.backward(engine(x).float().square().mean())
        engine.step()

    trained, loaded = b.round_trip(partial(b.engine, gradient_accumulation_steps=2), steps=half)
    same(trained["module"], loaded["module"])


@case
def training_goes_on_as_if_nothing_had_been(b):
    make = partial(b.engine, scheduler=WARMUP)
    undisturbed = make()
    take_steps(undisturbed)
    b.save(undisturbed)
    take_steps(undisturbed, 3)
    loaded = make(1)
    b.load_from_memory(loaded)
    take_steps(loaded, 3)
    same(state_of(undisturbed), state_of(loaded))


@case
def the_weights_in_half_precision_are_there_at_once(b):
    gathering = {"zero_optimization": {"stage3_gather_16bit_weights_on_model_save": True}}
    engine = b.engine(**gathering)
    take_steps(engine)
    engine.save_16bit_model(b.out("stock"), "model.pt")
    with b.under(engine):
        assert engine.save_16bit_model(b.out(), "model.pt")
        if dist.get_rank() == 0:
            same(*(plain(dict(torch.load(os.path.join(b.out(name), "model.pt")))) for name in ("stock", "ckptd")))
    dist.barrier()


@case
def the_weights_in_half_precision_are_not_gathered_unless_asked_for(b):
    engine = b.engine()
    with b.under(engine):
        assert engine.save_16bit_model(b.out()) == (b.stage < 3)
    dist.barrier()


@partitioned_case
def zero_to_fp32_finds_the_same(b):
    engine = b.engine(model=Tied)
    words(engine)
    b.save(engine)
    engine.save_checkpoint(b.out("stock"), "1")
    same(*(plain(dict(get_fp32_state_dict_from_zero_checkpoint(b.out(name)))) for name in ("stock", "ckptd")))
    assert {"zero_to_fp32.py"} <= set(os.listdir(b.out()))


class Counted(torch.optim.SGD):
    """Counts its steps where DeepSpeed's own optimizers do: ZeRO-1 and 2 cannot load elastic states of others."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
        return super().step(closure)


def counted(net):
    return Counted(net.parameters(), lr=0.01, momentum=0.9)


@case
def an_elastic_checkpoint_comes_back_into_either(b):
    for saves, loads in ((False, True), (True, False), (True, True)):
        inner = Bench(b.out(f"{saves}-{loads}"), b.client, f"{b.stage}-{b.dtype}")

        def make(seed, saves=saves, loads=loads, inner=inner):
            elastic = {"elastic_checkpoint": loads if seed else saves}
            return inner.engine(seed, optimizer=counted, zero_optimization=elastic)

        trained, loaded = inner.round_trip(make)
        same(trained["module"], loaded["module"])
        assert isinstance(trained["optimizer"].get(BASE_OPTIMIZER_STATE), list) == (saves and b.stage in {1, 2})


@case
def an_elastic_checkpoint_comes_back_without_its_optimizer_states(b):
    make = partial(b.engine, zero_optimization={"elastic_checkpoint": True})
    trained, loaded = b.round_trip(make, load_optimizer_states=False)
    same(trained["module"], loaded["module"])


class Mixed(torch.optim.Optimizer):
    """States of several kinds for one parameter: a tensor of its size, one of none, a number."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.01})

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                state.setdefault("mean", torch.zeros_like(parameter)).lerp_(parameter.grad.to(parameter.dtype), 0.1)
                state.setdefault("norm", torch.zeros(())).add_(1)
                state["count"] = state.get("count", 0) + 1
                parameter.data.sub_(group["lr"] * state["mean"])


OPTIMIZERS = {
    "momentum": lambda net: torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9),
    "plain": lambda net: torch.optim.SGD(net.parameters(), lr=0.01),
    "rmsprop": lambda net: torch.optim.RMSprop(net.parameters(), lr=0.01),
    "amsgrad": lambda net: torch.optim.Adam(net.parameters(), lr=0.01, amsgrad=True),
    "mixed": lambda net: Mixed(net.parameters()),
}


@case
def other_optimizers_come_back(b):
    for name, optimizer in OPTIMIZERS.items():
        inner = Bench(b.out(name), b.client, f"{b.stage}-{b.dtype}")
        same(*inner.round_trip(partial(inner.engine, optimizer=optimizer)))


@case
def another_optimizer_is_left_out(b):
    make = partial(b.engine, optimizer=OPTIMIZERS["mixed"])
    trained, loaded = b.round_trip(make, load_optimizer_states=False)
    same(trained["module"], loaded["module"])


@case
def muon_comes_back(b):
    muon = {"type": "muon", "params": {"lr": 0.02, "momentum": 0.95, "torch_adam": True}}
    whole = {"zero_optimization": {"reduce_scatter": False}}  # or ZeRO-3 refuses it
    trained, loaded = b.round_trip(partial(b.engine, settings=muon, **whole))
    same(trained["module"], loaded["module"])
    if b.dtype == "fp32":  # DeepSpeed's own load rounds the momentum to bf16
        same(trained, loaded)


@in_parts_case
def offloaded_parameters_come_back(b):
    both = {part: {"device": "cpu"} for part in ("offload_param", "offload_optimizer")}
    same(*b.round_trip(partial(b.engine, zero_optimization=both)))


@flat_case
def reshaped_it_is_what_stock_files_are(b):
    """By DeepSpeed's reader of whole directories, to one rank. It cannot join Adam's count of steps."""
    engine = b.engine(optimizer=OPTIMIZERS["momentum"])
    take_steps(engine)
    b.save(engine)
    engine.save_checkpoint(b.out("stock"), "1")
    found = [ZeROCheckpoint(os.path.join(b.out(name), "1")) for name in ("stock", "ckptd")]
    for each in found:
        each.reshape(model_3d_desc(pp_degree=1, tp_degree=1, dp_degree=1))
    same(*(plain(each.get_state_for_rank(0, 0, 0)[OPTIMIZER_STATE_DICT]) for each in found))


@in_parts_case
def a_model_that_was_made_in_parts_comes_back(b):
    """Under deepspeed.zero.Init; read one rank after the other, from weights in fp32, or both ranks at once."""
    for reading in ({}, {"pipeline_loading_checkpoint": True}, {"load_from_fp32_weights": False}):
        inner = Bench(b.out("-".join(reading) or "plain"), b.client, f"3-{b.dtype}")

        def make(seed, reading=reading, inner=inner):
            config = inner.config(zero_optimization=reading)
            return inner.engine(seed, model=partial(in_parts, config), zero_optimization=reading)

        same(*inner.round_trip(make))


def in_parts(config):
    with deepspeed.zero.Init(config_dict_or_path=config):
        return Small()


@partitioned_case
def an_offloaded_optimizer_comes_back(b):
    trained, loaded = b.round_trip(partial(b.engine, zero_optimization={"offload_optimizer": {"device": "cpu"}}))
    same(trained, loaded)


@case
def files_are_no_larger_than_their_tensors(b):
    engine = b.engine()
    take_steps(engine)
    b.save(engine)
    for name in os.listdir(os.path.join(b.out(), "1")):
        if name.endswith(".pt"):
            path = os.path.join(b.out(), "1", name)
            storages = {t.untyped_storage().data_ptr(): t for t in tensors(torch.load(path, weights_only=False))}
            assert all(t.untyped_storage().nbytes() == t.nbytes for t in storages.values()), name


def tensors(value):
    if isinstance(value, torch.Tensor):
        return [value] * bool(value.numel())
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for each in inner for tensor in tensors(each)]


def model_file(out, tag="1"):
    return torch.load(os.path.join(out, tag, "mp_rank_00_model_states.pt"), weights_only=False)


if __name__ == "__main__":
    run_cases({case: ANY, partitioned_case: PARTITIONED, flat_case: FLAT, in_parts_case: IN_PARTS})
