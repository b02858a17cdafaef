"""Whole tensors from shards: every layout, dtype and way to gather, on 1 to 4 ranks; and ranks that do not agree.

FAULTS=long adds worlds.
"""

import pytest
import torch

from tests.interop.launch import on_ranks
from tests.long_form import in_long

pytestmark = [pytest.mark.faults, pytest.mark.timeout(240)]

SCRIPT = "gather_ranks.py"


@pytest.mark.parametrize(
    ("layout", "ranks"), [("fsdp", 3), ("tp", 4), ("ddp", 2), *in_long(("fsdp", 1), ("fsdp", 2), ("hsdp", 4))]
)
def test_a_model_and_its_optimizer_are_built_to_the_bit(layout, ranks, node):
    on_ranks(node, ranks, SCRIPT, "layouts", layout)


@pytest.mark.parametrize("ranks", [3, *in_long(1, 2, 4)])
def test_odd_tensors_are_built_to_the_bit(ranks, node):
    on_ranks(node, ranks, SCRIPT, "odd")


@pytest.mark.parametrize("ranks", [2, *in_long(4)])
def test_ranks_that_gather_different_things_all_learn_what(ranks, node):
    on_ranks(node, ranks, SCRIPT, "disagree")


@pytest.mark.parametrize("ranks", [3, *in_long(2)])
def test_a_rank_that_stops_leaves_none_waiting(ranks, node):
    on_ranks(node, ranks, SCRIPT, "stops")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_shards_on_devices_are_built_while_these_work(node):
    on_ranks(node, min(4, torch.cuda.device_count()), SCRIPT, "cuda")
