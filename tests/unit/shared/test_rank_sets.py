"""Sets of ranks as runs: small for those of meshes, right for any."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.shared.protocol.rank_sets import joined_with, runs_of


@given(st.sets(st.integers(0, 200)))
def test_runs_are_the_ranks(ranks):
    assert sorted(rank for run in runs_of(sorted(ranks)) for rank in run.ranks) == sorted(ranks)


@pytest.mark.parametrize(("shards", "replicas"), [(8, 4), (64, 1_250), (1, 80_000)])
def test_the_sets_of_a_mesh_are_one_run_each(shards, replicas):
    sets = [runs_of(range(shard, shards * replicas, shards)) for shard in range(shards)]
    assert all(len(runs) == 1 for runs in sets)
    assert len(msgspec.msgpack.encode(sets)) <= 16 * shards


@given(st.lists(st.sets(st.integers(0, 30), min_size=1), max_size=5), st.sets(st.integers(0, 30)))
def test_a_node_needs_all_sets_of_its_ranks(sets, own):
    expected = own.union(*(some for some in sets if some & own))
    assert joined_with([runs_of(sorted(some)) for some in sets], own) == expected
