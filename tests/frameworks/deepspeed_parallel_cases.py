"""What DeepSpeed's own tests of checkpoints ask beside ZeRO, asked of it with ckptd underneath: rewritten.

`latest`, tags, sparse models, universal checkpoints, experts and pipelines. Two ranks run each case:
deepspeed_parallel_cases.py <folder> [case...].
"""

import os
from functools import partial
from types import SimpleNamespace

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.checkpoint.ds_to_universal import main as convert_to_universal
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed_bench import WARMUP, WIDTH, Bench, Cases, plain, random_batch, run_cases, same, state_of, take_steps
from deepspeed_kinds import EXPERTS, PARTITIONED, PIPELINES, PIPELINES_OF_ZERO, PLAIN, TENSORS
from safetensors.torch import load_file
from torch import nn

from ckptd.checkpoint.export.names import Choice
from ckptd.checkpoint.export.run import Order, export
from ckptd.shared.base.errors import UsageError

case, universal_case, expert_case = Cases(), Cases(), Cases()
pipeline_case, pipeline_of_zero_case, tensor_case = Cases(), Cases(), Cases()


def saved(b, *saves):
    """The states of an engine that took a step before each save; those are the arguments of save_checkpoint."""
    engine, states = b.engine(), []
    for options in saves:
        take_steps(engine, 1)
        b.save(engine, **options)
        states.append(state_of(engine))
    return states


def loaded_both_ways(b, **options):
    """The states of two engines, which load without ckptd and with it."""
    found = []
    for under in (False, True):
        engine = b.engine(1)
        if under:
            with b.under(engine):
                engine.load_checkpoint(b.out(), **options)
        else:
            engine.load_checkpoint(b.out(), **options)
        found.append(state_of(engine))
    return found


@case
def latest_names_the_newest(b):
    _, newest = saved(b, {"tag": "one"}, {"tag": "two"})
    for found in loaded_both_ways(b):
        same(found, newest)


@case
def a_tag_is_found_that_is_not_the_newest(b):
    older, _ = saved(b, {"tag": "one"}, {"tag": "two"})
    for found in loaded_both_ways(b, tag="one"):
        same(found, older)


@case
def without_latest_and_without_a_tag_nothing_is_loaded(b):
    engine = b.engine()
    before = state_of(engine)
    with b.under(engine):
        assert engine.load_checkpoint(b.out("nowhere")) == (None, None)
    same(state_of(engine), before)


@case
def latest_stays_where_the_save_says_so(b):
    older, newest = saved(b, {"tag": "one"}, {"tag": "two", "save_latest": False})
    for found in loaded_both_ways(b):
        same(found, older)
    for found in loaded_both_ways(b, tag="two"):
        same(found, newest)


@case
def what_no_latest_names_is_found_by_its_tag_only(b):
    (state,) = saved(b, {"tag": "one", "save_latest": False})
    engine = b.engine(1)
    with b.under(engine):
        assert engine.load_checkpoint(b.out()) == (None, None)
    for found in loaded_both_ways(b, tag="one"):
        same(found, state)


@case
def the_tag_is_the_count_of_steps_without_one(b):
    (state,) = saved(b, {"tag": None})
    assert os.path.isdir(os.path.join(b.out(), "global_step1"))
    for found in loaded_both_ways(b):
        same(found, state)


@case
def a_number_is_a_tag(b):
    (state,) = saved(b, {"tag": 7})
    for found in loaded_both_ways(b, tag="7"):
        same(found, state)


@case
def tags_that_differ_between_ranks_are_refused(b):
    engine = b.engine(checkpoint={"tag_validation": "FAIL"})
    with b.under(engine):
        with pytest.raises(AssertionError, match="not consistent"):
            engine.save_checkpoint(b.out(), tag=f"tag-{dist.get_rank()}")
        engine.save_checkpoint(b.out(), tag="same")  # and the next save is well
    dist.barrier()


@case
def tags_that_differ_between_ranks_are_saved_if_one_says_so(b):
    """Under the tag of the lowest rank, whole: DeepSpeed alone would leave a part under each, which nothing loads."""
    for validation in ("WARN", "IGNORE"):
        inner = Bench(b.out(validation), b.client, "1-bf16")
        engine = inner.engine(checkpoint={"tag_validation": validation})
        take_steps(engine)
        inner.save(engine, tag=f"tag-{dist.get_rank()}")
        for found in loaded_both_ways(inner):
            same(found, state_of(engine))


@case
def an_unknown_validation_of_tags_is_refused(b):
    with pytest.raises(deepspeed.DeepSpeedConfigError):
        b.engine(checkpoint={"tag_validation": "foo"})


class Embedded(nn.Module):
    def __init__(self, *, sparse):
        super().__init__()
        self.emb = nn.EmbeddingBag(10, 3, mode="sum", sparse=sparse)
        self.linear = nn.Linear(3, 1)


class Linear(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 1)


@case
def sparse_models_are_loaded_where_they_fit(b):
    """Nine pairs of models: without an embedding, with one, with one whose gradients are sparse."""
    kinds = [Linear, partial(Embedded, sparse=False), partial(Embedded, sparse=True)]

    def make(model):
        return deepspeed.initialize(model=model(), config={"train_batch_size": 2})[0]

    for i, kind in enumerate(kinds):
        engine, out = make(kind), b.out(str(i))
        b.save(engine, out)
        for other in kinds:
            found = make(other)
            options = {"load_module_strict": False, "load_optimizer_states": False, "load_lr_scheduler_states": False}
            b.load_from_memory(found, out, "1", **options)
            same(plain(found.module.linear.state_dict()), plain(engine.module.linear.state_dict()))
            if Linear not in {kind, other}:
                assert torch.equal(found.module.emb.weight, engine.module.emb.weight)


def universal(out, tag="1"):
    """The universal checkpoint of a tag, made by DeepSpeed's own tool, on rank 0."""
    if dist.get_rank() == 0:
        source = os.path.join(out, tag)
        convert_to_universal(
            SimpleNamespace(
                input_folder=source,
                output_folder=f"{source}_universal",
                num_extract_workers=1,
                num_merge_workers=1,
                keep_temp_folder=False,
                strict=True,
                inject_missing_state=False,
            )
        )
    dist.barrier()


INFO = {"client_state": {"universal_checkpoint_info": {}}}


@universal_case
def a_universal_checkpoint_comes_back(b):
    engine = b.engine()
    take_steps(engine)
    b.save(engine, **INFO)
    universal(b.out())
    found = b.engine(1, checkpoint={"load_universal": True})
    with b.under(found):
        found.load_checkpoint(b.out(), tag="1_universal")
    for _ in range(2):
        found.module.seen.copy_(engine.module.seen)  # buffers are not in it
        same(state_of(found)["module"], state_of(engine)["module"])
        take_steps(found)
        take_steps(engine)


class Experts(nn.Module):
    """A layer of two experts of two ranks, or of each, between two that all have."""

    def __init__(self, parallel=2, experts=4):
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        expert = nn.Sequential(nn.Linear(WIDTH, 14), nn.ReLU(), nn.Linear(14, WIDTH))
        self.moe = MoE(WIDTH, expert, num_experts=experts, ep_size=parallel, k=1, use_rts=False)
        self.after = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        found, _, _ = self.moe(self.before(x))
        return self.after(found)


def by_expert(net):
    group = {"params": list(net.parameters()), "name": "all"}
    return torch.optim.AdamW(split_params_into_different_moe_groups_for_optimizer(group), lr=0.01)


@expert_case
def experts_come_back(b):
    for parallel in (2, 1):
        for whole in (True, False):
            inner = Bench(b.out(f"{parallel}-{whole}"), b.client, f"{b.stage}-{b.dtype}")
            make = partial(inner.engine, model=partial(Experts, parallel), optimizer=by_expert)
            trained, loaded = inner.round_trip(make, load_optimizer_states=whole)
            same(*((trained, loaded) if whole else (trained["module"], loaded["module"])))


@expert_case
def the_files_of_experts_hold_no_more_than_one(b):
    engine = b.engine(model=Experts, optimizer=by_expert)
    take_steps(engine)
    b.save(engine)
    names = [name for name in os.listdir(os.path.join(b.out(), "1")) if "_expert_" in name]
    assert len(names) == 4
    for name in names:
        found = torch.load(os.path.join(b.out(), "1", name), weights_only=True)
        assert found
        assert all(t.untyped_storage().nbytes() == t.nbytes for t in found.values())


@case
def more_experts_than_files_are_refused_at_once(b):
    """Else a rank without experts would wait in DeepSpeed for those whose save raised."""
    engine = b.engine(model=partial(Experts, 1, 249), optimizer=by_expert)
    with pytest.raises(UsageError, match="249 experts"), b.under(engine):
        pass


def pipeline(b, seed=0, stages=2, parallel_write=False, tied=False):
    """An engine of a pipeline of five layers."""
    torch.manual_seed(seed)
    layers = [LayerSpec(nn.Linear, WIDTH, WIDTH) for _ in range(5)]
    if tied:
        layers[0] = layers[-1] = TiedLayerSpec("ends", nn.Linear, WIDTH, WIDTH, tied_weight_attr=["weight", "bias"])
    net = PipelineModule(layers, num_stages=stages, loss_fn=nn.functional.mse_loss, partition_method="uniform")
    config = b.config(
        scheduler=WARMUP,
        gradient_accumulation_steps=2,
        checkpoint={"parallel_write": {"pipeline_stage": parallel_write}},
    )
    parameters = list(net.parameters())
    return deepspeed.initialize(model=net, model_parameters=parameters, config=config)[0]


def run_pipeline(engine):
    dtype = next(engine.module.parameters()).dtype
    for step in range(2):
        batches = [random_batch(10 * step + micro).to(dtype) for micro in range(2)]
        engine.train_batch(iter([(x, x.flip(0)) for x in batches]))


@pipeline_case
def a_pipeline_comes_back(b):
    for stages in (2, 1):
        for parallel_write in (False, True):
            inner = Bench(b.out(f"{stages}-{parallel_write}"), b.client, f"{b.stage}-{b.dtype}")
            make = partial(pipeline, inner, stages=stages, parallel_write=parallel_write)
            same(*inner.round_trip(make, steps=run_pipeline))
            files = os.listdir(os.path.join(inner.out(), "1"))
            assert len([name for name in files if name.startswith("layer_")]) == 5


@pipeline_case
def a_tied_layer_of_a_pipeline_comes_back(b):
    same(*b.round_trip(partial(pipeline, b, tied=True), steps=run_pipeline))


@pipeline_case
def layers_are_read_into_other_stages(b):
    """Without the optimizer, whose parts belong to stages."""
    engine = pipeline(b, stages=2)
    run_pipeline(engine)
    b.save(engine)
    other = pipeline(b, 1, stages=1)
    b.load_from_memory(other, load_module_only=True, load_optimizer_states=False)
    ours = dict(engine.module.named_parameters())
    found = dict(other.module.named_parameters())
    assert len(found) == 10
    assert ours.keys() < found.keys()
    same(plain({name: found[name] for name in ours}), plain(ours))


@pipeline_of_zero_case
def a_drained_pipeline_is_exported(b):
    engine = pipeline(b, tied=True)
    run_pipeline(engine)
    b.save(engine)
    if dist.get_rank() == 0:
        order = Order(source=b.out(), out=b.out("exported"), choice=Choice(only=("model",), strip="model"))
        export(order)
    dist.barrier()
    found = load_file(os.path.join(b.out("exported"), "model.safetensors"))
    assert len(found) == 8
    mine = {name: parameter.detach() for name, parameter in engine.module.named_parameters()}
    assert mine.keys() < found.keys()
    for name, parameter in mine.items():
        assert torch.equal(found[name].to(parameter.dtype), parameter), name


def in_tensors(b, seed):
    """An engine whose one layer lies in columns on two ranks, the other in rows: deepspeed's AutoTP."""
    cuts = [("first", "column"), ("second", "row")]
    layers = [{"patterns": [f".*{name}.weight$"], "partition_type": kind} for name, kind in cuts]
    cut = {"use_default_specs": False, "layer_specs": layers}
    return b.engine(seed, tensor_parallel={"autotp_size": 2, "partition_config": cut})


def alike(engine):
    """Steps for which all ranks have the same batch."""
    for _ in range(2):
        x = torch.full((4, WIDTH), 0.5 + engine.global_steps).to(next(engine.module.parameters()).dtype)
        engine.backward((engine(x) - x).float().square().mean())
        engine.step()


@tensor_case
def a_tensor_parallel_model_comes_back(b):
    same(*b.round_trip(partial(in_tensors, b), steps=alike))
    names = os.listdir(os.path.join(b.out(), "1"))
    assert {"mp_rank_00_model_states.pt", "mp_rank_01_model_states.pt"} < set(names)


if __name__ == "__main__":
    kinds = {case: PLAIN, universal_case: PARTITIONED, expert_case: EXPERTS}
    kinds |= {pipeline_case: PIPELINES, pipeline_of_zero_case: PIPELINES_OF_ZERO}
    run_cases(kinds | {tensor_case: TENSORS})
