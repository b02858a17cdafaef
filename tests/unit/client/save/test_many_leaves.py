"""States of very many tensors: saved, restored from memory and from the store, read by stock readers.

FAULTS=long takes 100,000 of them.
"""

import os
import time

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open

from ckptd.checkpoint.verify import verify_path
from ckptd_client._save import plans

LEAVES = 100_000 if os.environ.get("FAULTS") == "long" else 1000
OF_A_LEAF = 4  # elements
US_PER_LEAF = 4000  # of a processor's time, for a plan, two saves and two loads; ten times what it takes


def many():
    """As a model of many small modules has them."""
    model = {f"layers.{i // 100}.{i % 100}": torch.full((OF_A_LEAF,), float(i)) for i in range(LEAVES)}
    return {"model": model, "step": 3}


def emptied(state):
    torch._foreach_zero_(list(state["model"].values()))
    return state


def holds(state):
    return torch.equal(
        torch.cat(list(state["model"].values())), torch.arange(float(LEAVES)).repeat_interleave(OF_A_LEAF)
    )


@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_many_leaves_are_saved_restored_and_read_by_stock_readers(node, job, join):
    began, state, client = time.process_time(), many(), join(save_timeout_s=60)
    first = client.save(state).wait("durable", 120)
    second = client.save(state).wait("durable", 120)
    assert client.stats().plans == 1
    assert second.stall_s < 2 * first.stall_s  # no plan and no allocation, but on a busy machine
    assert client.stats().nbytes / 2 < LEAVES * 1000, "bytes per small tensor, with its archive"
    assert client.load(emptied(state)).tier == "arena"
    assert holds(state)
    client.close()
    client = join(save_timeout_s=60)
    assert client.load(emptied(state)).tier == "pfs"
    assert holds(state)
    assert (time.process_time() - began) / LEAVES < US_PER_LEAF / 1e6

    directory = os.path.join(node.store, job, "latest")
    dcp.load({"model": emptied(state)["model"]}, checkpoint_id=directory)
    assert holds(state)
    with safe_open(os.path.join(directory, "r00000-p00.safetensors"), "pt") as file:
        names = [name for name in file.keys() if name.startswith("model.")]  # noqa: SIM118 - it is no dict
        assert len(names) == LEAVES
        assert torch.equal(file.get_tensor("model.layers.7.9"), torch.full((OF_A_LEAF,), 709.0))
    assert verify_path(os.path.realpath(directory)).problems == []


def test_a_plan_that_takes_long_is_not_what_the_timeout_is_for(join, monkeypatch):
    """It is made once, by all ranks; a save that failed for it would fail on all, and its work be done."""
    make_plan = plans.make_plan

    def slow(*args, **named):
        time.sleep(1.2)
        return make_plan(*args, **named)

    monkeypatch.setattr(plans, "make_plan", slow)
    client = join(save_timeout_s=1)
    client.save({"w": torch.ones(100)}).wait("staged", 60)
    client.save({"w": torch.ones(100), "more": torch.ones(3)}).wait("staged", 60)
    assert client.stats().plans == 2
