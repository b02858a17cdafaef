"""Hugging Face's Trainer on two ranks, on the CPU: killed and resumed, and what is documented of its checkpoints."""

import json
import os

import pytest

from tests.frameworks.launch import on_ranks

pytestmark = [pytest.mark.frameworks("transformers", "accelerate"), pytest.mark.timeout(400)]
HELD = ("--drain-bandwidth", "1")  # byte a second: nothing is drained


def train(node, ranks=2, *, killed=False, **options):
    """What each rank says at its end, and all of its output."""
    said = on_ranks(node, ranks, "hf_ranks.py", json.dumps({"trainer": "ckptd"} | options), killed=killed)
    return [json.loads(line) for line in said.splitlines() if line.startswith('{"rank"')], said


def same(one, other, ranks=2):
    import torch  # noqa: PLC0415

    for rank in range(ranks):
        left, right = (torch.load(f"{path}.{rank}", weights_only=False) for path in (one, other))
        assert left.keys() == right.keys()
        different = [
            key
            for key in left
            if not (torch.equal(left[key], right[key]) if torch.is_tensor(left[key]) else left[key] == right[key])
        ]
        assert not different, (rank, different[:20])


def checkpoints(out):
    return sorted((name for name in os.listdir(out) if name.startswith("checkpoint-")), key=lambda name: int(name[11:]))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The final state of stock Trainer."""
    from tests.cluster import Node  # noqa: PLC0415

    folder = tmp_path_factory.mktemp("stock")
    with Node(str(folder)) as node:
        train(node, trainer="stock", out=str(folder / "out"), state=str(folder / "state"))
    return folder


def test_a_staged_checkpoint_is_resumed_from_memory(node, tmp_path, undisturbed):
    """Killed after step 8, with checkpoint-3 and -6 in memory only."""
    node.stop()
    node.start(*HELD)
    out = tmp_path / "out"
    train(node, killed=True, out=str(out), die_at=8)
    assert checkpoints(out) == []
    _, said = train(node, out=str(out), resume=True, state=str(tmp_path / "state"), arguments={"save_strategy": "no"})
    assert "step 6 is read from arena" in said
    same(tmp_path / "state", undisturbed / "state")
