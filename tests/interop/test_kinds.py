"""What one rank saves as a tensor and another as a plain value, and replicas that are none by design."""

import pytest

from tests.cluster import Node
from tests.interop.launch import on_ranks


@pytest.fixture
def node(tmp_path):
    with Node(str(tmp_path)) as node:
        node.start("--keep-last", "100")
        yield node


def test_no_rank_gets_a_tensor_for_its_own_plain_value(node):
    assert on_ranks(node, 2, "kind_ranks.py").count("kept its own") == 2


def test_ddp_whose_hook_lets_parameters_differ_is_not_taken_for_replicas(node):
    assert on_ranks(node, 2, "local_sgd_ranks.py").count("all durable") == 2
