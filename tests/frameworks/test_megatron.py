"""Megatron core on two ranks, on the CPU: killed and resumed, its own loads, its own tests rewritten."""

import os
import pathlib

import pytest

from tests.frameworks.hf_common import cases_of
from tests.frameworks.launch import on_ranks
from tests.interop.launch import torchrun
from tests.interop.test_documents import program

pytestmark = [pytest.mark.frameworks("megatron-core"), pytest.mark.timeout(400)]
SOURCE = pathlib.Path(__file__).with_name("megatron_cases.py")
CASES = cases_of(SOURCE)


def test_a_killed_training_goes_on_by_cores_own_load(node, tmp_path):
    on_ranks(node, 2, "megatron_ranks.py", "train", str(tmp_path), killed=True)
    out = on_ranks(node, 2, "megatron_ranks.py", "resume", str(tmp_path))
    assert out.count("did it") == 2, out
    assert out.count("tier 4 arena") == 2, out


def test_the_example_of_the_page_goes_on_where_it_ended(node):
    path = program("docs/megatron.md", "A complete example", node)
    code = pathlib.Path(path).read_text()
    assert code.count("/tmp/ckpt-megatron") == 1
    pathlib.Path(path).write_text(code.replace("/tmp/ckpt-megatron", os.path.join(node.temporary, "out")))
    for first in (0, 30):
        assert f"starting at step {first}\n" in torchrun(node, 2, path)


@pytest.mark.parametrize("name", CASES)
def test_a_case_of_cores_own_tests(cases, name):
    assert cases.count(f": {name} passed\n") == 2, cases
