"""Hugging Face Accelerate on two ranks, on the CPU: killed and resumed, and what is documented of its checkpoints."""

import json
import os
import pathlib

import pytest

from tests.cluster import Node, wait_for
from tests.frameworks.hf_common import cases_of, program, same
from tests.frameworks.launch import on_ranks

pytestmark = [pytest.mark.frameworks("transformers", "accelerate"), pytest.mark.timeout(400)]
SOURCE = pathlib.Path(__file__).with_name("accelerate_cases.py")
CASES = cases_of(SOURCE)
HELD = ("--drain-bandwidth", "1")  # byte a second: nothing is drained


def train(node, *, killed=False, environ=None, **options):
    return on_ranks(node, 2, "accelerate_ranks.py", json.dumps(options), killed=killed, **(environ or {}))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The final state with the stock Accelerator."""
    folder = tmp_path_factory.mktemp("stock")
    with Node(str(folder)) as node:
        train(node, kind="stock", out=str(folder / "out"), state=str(folder / "state"))
    return folder


def test_a_staged_state_is_loaded_from_memory(node, tmp_path, undisturbed):
    """Killed after step 7, with two checkpoints in memory only."""
    node.stop()
    node.start(*HELD)
    out, state = tmp_path / "out", str(tmp_path / "state")
    own = {"CKPTD_STORE": ""}
    train(node, killed=True, out=str(out), automatic=True, die_at=7, environ=own)
    assert sorted(os.listdir(out)) == [".ckptd-store"]
    said = train(node, out=str(out), automatic=True, resume="", state=state, wait=False, environ=own)
    assert said.count("resumed at 6") == 2
    assert "is read from arena" in said
    same(state, undisturbed / "state")


def test_a_drained_state_is_read_by_accelerate_itself(node, tmp_path, undisturbed):
    out, state = tmp_path / "out", str(tmp_path / "state")
    train(node, killed=True, out=str(out), die_at=7)
    wait_for((out / "step-6").exists)
    stock = sorted(os.listdir(undisturbed / "out" / "step-6"))
    assert sorted(os.listdir(out / "step-6")) == sorted([".ckptd", *stock])
    said = train(node, kind="stock", out=str(tmp_path / "again"), resume=str(out / "step-6"), state=state)
    assert said.count("resumed at 6") == 2
    same(state, undisturbed / "state")


@pytest.mark.parametrize("name", CASES)
def test_a_case_of_accelerates_own_tests(cases, name):
    assert cases.count(f": {name} passed\n") == 2, cases


def test_the_example_goes_on_where_it_ended(node):
    """Saves this close may be superseded: the last one is there."""
    path = program("Accelerate", node)
    place = f"{node.temporary}/project/checkpoints"
    for first, last in ((0, "checkpoint_3"), (20, "checkpoint_7")):
        assert f"starting at step {first}\n" in on_ranks(node, 2, path)
        assert len(os.listdir(place)) == 2
        assert max(os.listdir(place)) == last
