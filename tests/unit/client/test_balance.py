"""Shares of replicated tensors: each byte is one replica's, and all replicas have equally many."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ckptd_client import ConfigError, _balance, _replicas
from ckptd_client._balance import WINDOWS, Looks, streams_of
from ckptd_client._plan import gather, make_plan
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


def test_a_look_counts_only_when_its_save_was_staged():
    class Handle:
        known_milestone = None
        ended = False

    (one,) = stream([(4, 4)], 2)
    looks, skipped, staged = Looks(), Handle(), Handle()
    assert one.cut not in looks.next(1).checked
    looks.looked([one], 1, skipped)
    assert one.cut not in looks.next(2).checked
    looks.looked([one], 2, staged)
    staged.known_milestone = "staged"
    assert one.cut in looks.next(3).checked


def test_a_large_stream_is_looked_at_in_parts(monkeypatch):
    class Staged:
        known_milestone = "staged"
        ended = False

    monkeypatch.setattr(_balance, "_LOOKED_NBYTES", 20)
    (one,) = stream([(4, 4)], 2)
    assert one.parts == 4
    looks = Looks()
    for turn in (1, 2, 2, 3):
        assert one.cut not in looks.next(turn).checked
        looks.looked([one], turn, Staged())
    assert one.cut not in looks.next(4).checked
    looks.looked([one], 4, Staged())
    assert one.cut in looks.next(5).checked


def test_a_rank_that_is_not_torchs_takes_no_mesh_or_process_group_for_replicas(lone_group):
    net = DistributedDataParallel(nn.Linear(4, 4))
    assert not make_plan({"net": net}, rank=2, world_size=4, replicated=()).streams


def test_parameters_that_ddp_does_not_sum_are_everybodys_own(lone_group, monkeypatch):
    """Of a group of one nobody shares; so the group is said to be of two."""
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda *_: 2)
    monkeypatch.setattr(_replicas, "_numbers_agree", lambda _: True)
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net[1].requires_grad_(False)
    state = {"net": DistributedDataParallel(net)}
    first = make_plan(state, rank=0, world_size=2, replicated=())
    assert sum(len(one.positions) for one in first.streams) == 4  # the frozen ones are as they were sent around
    assert gather(first, state) is not None
    net[1].requires_grad_(True)
    assert gather(first, state) is None
    assert not make_plan(state, rank=0, world_size=2, replicated=()).streams
