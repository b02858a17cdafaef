"""Ranks of a job read each block of a checkpoint on the store once, and need nobody to get it all."""

import contextlib
import os
import re

import pytest

from ckptd.shared.format.arena_paths import READ_GROUP_SUFFIX
from ckptd.shared.format.digest import BLOCK_NBYTES
from tests.cluster import Node
from tests.interop.launch import on_nodes, on_ranks
from tests.interop.together_ranks import ELEMENTS

WHOLE = 4 * ELEMENTS


@pytest.fixture
def saved(fresh_node, tmp_path):
    """A node whose memory is lost after a save of four replicas."""
    on_ranks(fresh_node, 4, "together_ranks.py", "save", str(tmp_path))
    fresh_node.stop()
    fresh_node.lose_arena()
    fresh_node.start()
    return fresh_node


@pytest.fixture
def nodes(saved):
    """That node, and seven more with their own memory."""
    with contextlib.ExitStack() as stack:
        found = [saved]
        for name in "bcdefgh":
            found.append(stack.enter_context(Node(saved.store)))
            found[-1].start(CKPTD_NODE=name)
        yield found


def groups(*nodes):
    return [
        name for node in nodes for _, _, names in os.walk(node.arena) for name in names if READ_GROUP_SUFFIX in name
    ]


def read(out):
    return [int(number) for number in re.findall(r"read (\d+) bytes", out)]


@pytest.mark.parametrize("ranks", [4, 3])
def test_each_block_is_read_once_on_the_node(saved, tmp_path, ranks):
    found = read(on_ranks(saved, ranks, "together_ranks.py", "load", str(tmp_path)))
    assert len(found) == ranks
    assert WHOLE <= sum(found) < 1.1 * WHOLE + ranks * 2**20, found
    assert max(found) < 0.6 * WHOLE, found
    assert groups(saved) == []


@pytest.mark.parametrize(
    ("many", "ranks", "call"),
    [(2, 4, "load"), (3, 3, "load"), (8, 8, "load"), (1, 2, "read_from"), (2, 4, "read_from"), (2, 4, "dcp")],
)
def test_each_block_is_read_once_in_the_job(nodes, tmp_path, many, ranks, call):
    found = read(on_nodes(nodes[:many], ranks, "together_ranks.py", call, str(tmp_path)))
    assert len(found) == ranks
    # One block more: where a loaded machine stops a rank for the patience of the others, one of them reads its block.
    assert WHOLE <= sum(found) < 1.1 * WHOLE + ranks * 2**20 + BLOCK_NBYTES, found
    assert max(found) < 0.6 * WHOLE, found
    assert groups(*nodes) == []


def test_a_rank_that_comes_late_reads_alone_and_so_do_the_others(saved, tmp_path):
    found = read(on_ranks(saved, 2, "together_ranks.py", "late", str(tmp_path)))
    assert all(one >= WHOLE for one in found), found
    assert groups(saved) == []


def test_a_rank_that_dies_costs_the_others_patience_and_nothing_else(saved, tmp_path):
    with pytest.raises(AssertionError, match="exit status -9"):  # the launcher's word of rank 1
        on_ranks(saved, 2, "together_ranks.py", "lost", str(tmp_path))
    found = read(on_ranks(saved, 2, "together_ranks.py", "load", str(tmp_path)))
    assert len(found) == 2
    assert groups(saved) == []
