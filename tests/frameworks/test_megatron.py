"""Megatron core on two ranks, on the CPU: killed and resumed, its own loads, its own tests rewritten."""

import pytest

from tests.frameworks.launch import on_ranks

pytestmark = [pytest.mark.frameworks("megatron-core"), pytest.mark.timeout(400)]


def test_a_killed_training_goes_on_by_cores_own_load(node, tmp_path):
    on_ranks(node, 2, "megatron_ranks.py", "train", str(tmp_path), killed=True)
    out = on_ranks(node, 2, "megatron_ranks.py", "resume", str(tmp_path))
    assert out.count("did it") == 2, out
    assert out.count("tier 4 arena") == 2, out
