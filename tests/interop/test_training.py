"""Saves in a training of several ranks: beside its collectives, of shards of any size, and when a rank ends early."""

import pytest

from tests.interop.launch import on_ranks


@pytest.mark.parametrize(("what", "ranks"), [("counted", 2), ("interleaved", 3), ("uneven", 3), ("forks", 1)])
def test_ranks_that_train(node, what, ranks):
    out = on_ranks(node, ranks, "training_ranks.py", what)
    assert out.count("did it") == ranks, out


def test_a_rank_that_raises_between_save_and_step_has_saved_all_the_same(node, tmp_path):
    for what in ("raises", "after"):
        assert on_ranks(node, 2, "training_ranks.py", what, str(tmp_path)).count("did it") == 2
