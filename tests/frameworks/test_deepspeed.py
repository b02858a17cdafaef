"""DeepSpeed on two ranks of the CPU: ZeRO-1, 2, 3 and pipelines, killed and resumed, and read by its own tools."""

import os
import re
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from ckptd.checkpoint.export.names import Choice
from ckptd.checkpoint.export.run import Order, export
from ckptd.shared.base.errors import UsageError
from tests.cluster import Node, wait_for
from tests.frameworks.launch import on_ranks

pytestmark = [pytest.mark.frameworks("deepspeed"), pytest.mark.timeout(400)]

SCRIPT = "deepspeed_ranks.py"
KINDS = ["1", "2", "3", "pipe"]


def digests(text, words):
    return sorted(re.findall(rf"{words}.*?, ([0-9a-f]{{32}})", text))


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


def test_a_killed_training_goes_on_from_memory_and_then_by_stock_means(kind, tmp_path):
    """The last save is never drained before the kill: DeepSpeed's own `latest` names the one before until it is."""
    out = tmp_path / "out"
    with Node(str(tmp_path)) as node:
        node.start("--drain-bandwidth", "30K")
        undisturbed = on_ranks(node, 2, SCRIPT, "reference", kind, str(out))
        trained = on_ranks(node, 2, SCRIPT, "train", kind, str(out), killed=True)
        assert (out / "latest").read_text() == "global_step3"
        assert not (out / "global_step5").exists()
        resumed = on_ranks(node, 2, SCRIPT, "resume", kind, str(out))
        assert digests(resumed, "loaded step 4 of global_step5") == digests(trained, "saved step 4"), resumed
        assert digests(resumed, "ended") == digests(undisturbed, "ended")
        wait_for(lambda: (out / "latest").read_text() == "global_step5", 60)
        stock = on_ranks(node, 2, SCRIPT, "stock", kind, str(out))
        assert digests(stock, "loaded step 4") == digests(trained, "saved step 4")
        assert digests(stock, "ended") == digests(undisturbed, "ended")
        if kind != "pipe":
            check_tools(out, kind)
        else:
            assert len(list((out / "global_step5").glob("layer_*"))) == 5
            with pytest.raises(UsageError, match="its weights are whole"):  # without ZeRO; with it: test_zero_export.py
                exported(out)


def exported(out):
    """The weights, as `ckptd export` makes them of what was drained."""
    order = Order(source=str(out), out=f"{out}-exported", choice=Choice(only=("model",), strip="model"))
    export(order)
    return load_file(f"{out}-exported/model.safetensors")


def test_what_is_loaded_is_what_latest_names_and_what_lies_there(tmp_path):
    with Node(str(tmp_path)) as node:
        node.start()
        told = on_ranks(node, 2, SCRIPT, "back", "2", str(tmp_path / "out"))
        for found in ("newest 1", "set back 0", "beside 0", "again 3"):
            assert told.count(found) == 2, told[-3000:]


def check_tools(out, kind):
    """zero_to_fp32, as DeepSpeed copied it there, and the universal checkpoint; and what ckptd makes of it."""
    environ = os.environ | {"DS_ACCELERATOR": "cpu", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "zero_to_fp32.py", ".", "fp32"]
    subprocess.run(command, cwd=out, env=environ, check=True, capture_output=True)
    weights = torch.load(out / "fp32" / "pytorch_model.bin", weights_only=True)
    assert sorted(weights) == ["first.bias", "first.weight", "second.bias", "second.weight", "seen"]
    found = exported(out)
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name].to(weights[name].dtype), weights[name]) for name in weights)
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"]
    command += ["--input_folder", str(out / "global_step5"), "--output_folder", str(out / "universal")]
    command += ["--inject_missing_state", "--num_extract_workers", "1", "--num_merge_workers", "1"]
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    found = torch.load(out / "universal" / "zero" / "first.weight" / "fp32.pt", weights_only=False)
    found = found["param"] if isinstance(found, dict) else found
    assert torch.equal(found.reshape(-1), weights["first.weight"].reshape(-1))
