"""Hugging Face's Trainer on two ranks, on the CPU: killed and resumed, and what is documented of its checkpoints."""

import json
import os
import pathlib
import shutil

import pytest

from tests.cluster import Node, wait_for
from tests.frameworks.hf_common import cases_of, program, same
from tests.frameworks.launch import on_ranks

pytestmark = [pytest.mark.frameworks("transformers", "accelerate"), pytest.mark.timeout(400)]
SOURCE = pathlib.Path(__file__).with_name("hf_cases.py")
CASES = cases_of(SOURCE)
HELD = ("--drain-bandwidth", "1")  # byte a second: nothing is drained


def train(node, ranks=2, *, killed=False, **options):
    """What each rank says at its end, and all of its output."""
    said = on_ranks(node, ranks, "hf_ranks.py", json.dumps({"trainer": "ckptd"} | options), killed=killed)
    return [json.loads(line) for line in said.splitlines() if line.startswith('{"rank"')], said


def checkpoints(out):
    return sorted((name for name in os.listdir(out) if name.startswith("checkpoint-")), key=lambda name: int(name[11:]))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The final state of stock Trainer."""
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


def test_a_drained_checkpoint_is_resumed_by_the_stock_trainer(node, tmp_path, undisturbed):
    """Killed after step 8, with checkpoint-6 published by the daemon that lives on."""
    out = tmp_path / "out"
    train(node, killed=True, out=str(out), die_at=8)
    wait_for((out / "checkpoint-6").exists)
    train(node, trainer="stock", out=str(out), resume=True, state=str(tmp_path / "state"))
    same(tmp_path / "state", undisturbed / "state")


def test_a_lost_node_resumes_from_the_directory(node, tmp_path, undisturbed):
    out = tmp_path / "out"
    train(node, killed=True, out=str(out), die_at=8)
    wait_for((out / "checkpoint-6").exists)
    node.kill()
    node.lose_arena()
    node.start()
    train(node, out=str(out), resume=True, state=str(tmp_path / "state"))
    same(tmp_path / "state", undisturbed / "state")


@pytest.mark.parametrize("name", CASES)
def test_a_case_of_trainers_own_tests(cases, name):
    assert cases.count(f": {name} passed\n") == 2, cases


def test_the_example_goes_on_where_it_ended(node):
    path = program("Trainer", node)
    out = f"{node.temporary}/run"
    assert "done at step 20\n" in on_ranks(node, 2, path)
    assert checkpoints(out)[-1] == "checkpoint-20"
    shutil.rmtree(out + "/checkpoint-20")  # to be read from the store, then; from 15 it would be saved again
    assert "done at step 20\n" in on_ranks(node, 2, path)
    assert "checkpoint-20" not in checkpoints(out)
