"""Shares of replicated tensors: each byte is one replica's, and all replicas have equally many."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptd_client import ConfigError
from ckptd_client._balance import WINDOWS, streams_of
from ckptd_client._plan import make_plan
from ckptd_client._tree import flatten


def stream(shapes, ranks, dtype=torch.float32):
    state = {f"t{i}": torch.empty(shape, dtype=dtype, device="meta") for i, shape in enumerate(shapes)}
    flat = flatten(state, lambda value: isinstance(value, torch.Tensor))
    return streams_of(dict.fromkeys(range(len(shapes)), tuple(range(ranks))), flat, skipped=set())


def nbytes_of(share, shapes, itemsize=4):
    total = 0
    for position, rows in share.items():
        shape = shapes[position]
        whole = math.prod(shape) * itemsize
        total += whole if not shape else whole // shape[rows.dim] * (rows.stop - rows.first)
    return total


shape = st.lists(st.integers(1, 7), max_size=3).map(tuple)


@given(shapes=st.lists(shape, min_size=1, max_size=8), ranks=st.integers(2, 9))
def test_every_row_is_one_replicas(shapes, ranks):
    (found,) = stream(shapes, ranks)
    for position, size in enumerate(shapes):
        rows = []
        for rank in range(ranks):
            mine = found.share(rank).get(position)
            if mine is not None:
                assert all(size[d] == 1 for d in range(mine.dim))
                rows += range(mine.first, mine.stop)
        dim = next((d for d, n in enumerate(size) if n > 1), 0)
        assert rows == list(range(size[dim] if size else 1))


@given(shapes=st.lists(shape, min_size=1, max_size=8))
def test_windows_cover_the_stream_once(shapes):
    (found,) = stream(shapes, 2)
    seen = []
    for window in range(WINDOWS):
        bounds = window * found.nbytes // WINDOWS, (window + 1) * found.nbytes // WINDOWS
        seen += [(p, row) for p, rows in found.between(*bounds) for row in range(rows.first, rows.stop)]
    assert len(seen) == len(set(seen))
    assert sorted(seen) == sorted(
        (p, row) for p, rows in found.between(0, found.nbytes) for row in range(rows.first, rows.stop)
    )


def gpt2():
    block = [(768,), (768,), (2304, 768), (2304,), (768, 768), (768,), (768,), (768,)]
    block += [(3072, 768), (3072,), (768, 3072), (768,)]
    return [(50257, 768), (1024, 768), *block * 12, (768,), (768,)]


def llama():
    block = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336)]
    return [(128256, 4096), *[s for _ in range(32) for s in (*block, (4096,), (4096,))], (4096,), (128256, 4096)]


@pytest.mark.parametrize("ranks", [4, 8, 64])
@pytest.mark.parametrize("adam", [False, True])
@pytest.mark.parametrize("model", [gpt2, llama])
def test_shares_are_equal_to_one_in_a_hundred(model, ranks, adam):
    shapes = [s for s in model() for _ in range(3 if adam else 1)]
    (found,) = stream(shapes, ranks)
    shares = [nbytes_of(found.share(rank), shapes) for rank in range(ranks)]
    assert sum(shares) == found.nbytes
    assert max(shares) / (sum(shares) / ranks) <= 1.01


def plan(state, rank, world_size=3, replicated=("*",)):
    return make_plan(state, rank=rank, world_size=world_size, replicated=replicated)


def test_tied_tensors_are_saved_once_and_named_by_whoever_has_a_part():
    weight = torch.arange(30.0).view(10, 3)
    state = {"a": weight, "b": weight, "c": torch.arange(4)}
    names = [[box.name for box in plan(state, rank).image.boxes] for rank in range(3)]
    assert not any("b" in one for one in names)
    assert sum(box.sizes[0] for rank in range(3) for box in plan(state, rank).image.boxes if box.name == "a") == 10


def test_what_cannot_be_cut_and_what_is_not_named_is_everybodys_own():
    packed = torch.zeros(4, 2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    state = {"packed": packed, "none": torch.empty(0, 3), "mine": torch.ones(4), "ours": torch.ones(600)}
    for rank in range(3):
        names = {box.name for box in plan(state, rank, replicated=("ours", "packed", "none")).image.boxes}
        assert {"packed", "none", "mine"} <= names


def test_a_lone_rank_saves_everything():
    state = {"w": torch.ones(5)}
    assert not plan(state, 0, world_size=1).streams
    assert not make_plan(state, rank=0, world_size=2).streams


@pytest.mark.parametrize("wrong", ["model.*", 3, [""], [1]])
def test_patterns_that_are_none_are_told(join, wrong):
    with pytest.raises(ConfigError, match="replicated"):
        join(replicated=wrong)


@pytest.mark.parametrize("wrong", ["row", "", 1])
def test_a_balance_that_is_none_is_told(join, wrong):
    with pytest.raises(ConfigError, match="balance"):
        join(balance=wrong)
