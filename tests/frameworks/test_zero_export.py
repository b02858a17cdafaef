"""ZeRO checkpoints made by the installed DeepSpeed, exported, and held against its own tools and a model of FSDP2's."""

import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from ckptd.checkpoint.export.names import Choice
from ckptd.checkpoint.export.run import Order, export
from tests.frameworks.zero_runs import EXPECTED, on_ranks, train, train_pipeline

pytestmark = [pytest.mark.frameworks("deepspeed"), pytest.mark.timeout(600)]
CASES = {
    "stage 1": (4, 1, "bf16", {}),
    "stage 1, elastic": (2, 1, "bf16", {"zero_optimization": {"elastic_checkpoint": True}}),
    "stage 1, gradients in fp32": (2, 1, "bf16", {"data_types": {"grad_accum_dtype": "fp32"}}),
    "stage 2": (2, 2, "fp32", {}),
    "stage 2, round robin": (4, 2, "bf16", {"zero_optimization": {"round_robin_gradients": True}}),
    "stage 3": (4, 3, "bf16", {}),
    "stage 3, one group": (2, 3, "fp32", {"zero_optimization": {"sub_group_size": 1_000_000}}),
}
STOCK_KNOWS = [case for case in CASES if "gradients in fp32" not in case]
IN_BF16 = [case for case, (_, _, dtype, _) in CASES.items() if dtype == "bf16"]
WEIGHTS = Choice(only=("model",), strip="model")


@pytest.fixture(scope="module", params=CASES)
def checkpoint(request, tmp_path_factory):
    ranks, stage, dtype, more = CASES[request.param]
    return request.param, train(tmp_path_factory.mktemp("zero"), ranks, stage, dtype, **more)


def exported(source, out, choice=WEIGHTS):
    export(Order(source=str(source), out=str(out), choice=choice))
    return load_file(out / "model.safetensors")


def assert_equal(found, wanted):
    assert found.keys() == wanted.keys(), found.keys() ^ wanted.keys()
    for name, tensor in wanted.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(found[name], tensor), name


def test_every_tensor_is_what_the_engine_held(checkpoint, tmp_path):
    _, source = checkpoint
    assert_equal(exported(source, tmp_path / "out", Choice()), load_file(source / EXPECTED))


def test_a_pipeline_is_what_its_engines_held(tmp_path):
    source = train_pipeline(tmp_path / "zero")
    assert_equal(exported(source, tmp_path / "out", Choice()), load_file(source / EXPECTED))


@pytest.mark.parametrize("checkpoint", STOCK_KNOWS, indirect=True)
def test_weights_are_those_of_zero_to_fp32(checkpoint, tmp_path):
    """Which leaves out the frozen parameters of stage 1, and does not know the optimizer with gradients in fp32."""
    case, source = checkpoint
    script = [sys.executable, "-W", "ignore", str(source / "zero_to_fp32.py"), str(source), str(tmp_path / "stock")]
    on_cpu = {**os.environ, "DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"}
    subprocess.run(script, check=True, capture_output=True, env=on_cpu)
    stock = torch.load(tmp_path / "stock" / "pytorch_model.bin", weights_only=True)
    found = exported(source, tmp_path / "out", Choice(only=("model",), strip="model", dtype="F32"))
    frozen = {"frozen.weight", "frozen.bias"} if case.startswith("stage 1") else set()
    assert_equal({name: found[name] for name in found.keys() - frozen}, stock)


@pytest.mark.parametrize("checkpoint", IN_BF16, indirect=True)
def test_half_precision_is_that_of_save_16bit_model(checkpoint, tmp_path):
    _, source = checkpoint
    half = torch.load(source / "16bit.pt", weights_only=True)
    assert half["embed.weight"].dtype == torch.bfloat16
    found = exported(source, tmp_path / "out", Choice(only=("model",), strip="model", dtype="BF16"))
    assert_equal(found, {name: tensor.bfloat16() if name == "mean" else tensor for name, tensor in half.items()})


def test_fsdp2_goes_on_from_it_on_two_ranks(checkpoint, tmp_path):
    """With the settings of the optimizer too, which DeepSpeed leaves out of elastic checkpoints."""
    case, source = checkpoint
    out = tmp_path / "out"
    export(Order(source=str(source), out=str(out), format="dcp"))
    settings = "without" if "elastic" in case else "with"
    assert "equal: 33" in on_ranks(2, "fsdp2_ranks.py", out, source / EXPECTED, settings)
