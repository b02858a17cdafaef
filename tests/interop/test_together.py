"""Ranks of a job read each block of a checkpoint on the store once, and need nobody to get it all.

FAULTS=long adds worlds.
"""

import contextlib
import os
import re

import pytest

from ckptd.shared.files.mounts import SHARED_MEMORY
from ckptd.shared.format.arena_paths import READ_GROUP_SUFFIX
from ckptd.shared.format.digest import BLOCK_NBYTES
from ckptd_client._load.shared_read.planned import READS
from tests.cluster import Node, wait_for
from tests.interop.launch import on_nodes, on_ranks
from tests.interop.together_ranks import ELEMENTS
from tests.long_form import LONG, in_long

WHOLE = 4 * ELEMENTS


@pytest.fixture(scope="module")
def saved(node):
    """A node whose memory is lost after a save of four replicas."""
    on_ranks(node, 4, "together_ranks.py", "save")
    node.stop()
    node.lose_arena()
    node.start()
    return node


@pytest.fixture(scope="module")
def nodes(saved):
    """That node, and more with their own memory."""
    with contextlib.ExitStack() as stack:
        found = [saved]
        for name in "bcdefgh" if LONG else "bc":
            found.append(stack.enter_context(Node(saved.store)))
            found[-1].start(CKPTD_NODE=name)
        yield found


def groups(*nodes):
    return [
        name for node in nodes for _, _, names in os.walk(node.arena) for name in names if READ_GROUP_SUFFIX in name
    ]


def read(out):
    return [int(number) for number in re.findall(r"read (\d+) bytes", out)]


@pytest.mark.parametrize("ranks", [3, *in_long(4)])
def test_each_block_is_read_once_on_the_node(saved, ranks):
    found = read(on_ranks(saved, ranks, "together_ranks.py", "load"))
    assert len(found) == ranks
    assert WHOLE <= sum(found) < 1.1 * WHOLE + ranks * 2**20, found
    assert max(found) < 0.6 * WHOLE, found
    assert groups(saved) == []


@pytest.mark.parametrize(
    ("many", "ranks", "call"),
    [
        (3, 3, "load"),
        (2, 2, "read_from"),
        (2, 4, "dcp"),
        (2, 2, "dcp_path"),
        *in_long((2, 4, "load"), (8, 8, "load"), (1, 2, "read_from"), (2, 4, "read_from")),
        *in_long((1, 3, "dcp_path"), (2, 4, "dcp_path"), (8, 8, "dcp_path")),
    ],
)
def test_each_block_is_read_once_in_the_job(nodes, many, ranks, call):
    found = read(on_nodes(nodes[:many], ranks, "together_ranks.py", call))
    assert len(found) == ranks
    # One block more: where a loaded machine stops a rank for the patience of the others, one of them reads its block.
    assert WHOLE <= sum(found) < 1.1 * WHOLE + ranks * 2**20 + BLOCK_NBYTES, found
    assert max(found) < 0.6 * WHOLE, found
    assert groups(*nodes) == []
    left = {name for name in os.listdir(SHARED_MEMORY) if name.startswith(f"{READS}{os.geteuid()}-")}
    wait_for(lambda: left.isdisjoint(os.listdir(SHARED_MEMORY)))  # loads of other tests have such memory, for a moment


def test_a_rank_that_comes_late_reads_alone_and_so_do_the_others(saved):
    found = read(on_ranks(saved, 2, "together_ranks.py", "late"))
    assert all(one >= WHOLE for one in found), found
    assert groups(saved) == []


def test_a_rank_that_dies_costs_the_others_patience_and_nothing_else(saved):
    with pytest.raises(AssertionError, match="exit status -9"):  # the launcher's word of rank 1
        on_ranks(saved, 2, "together_ranks.py", "lost")
    found = read(on_ranks(saved, 2, "together_ranks.py", "load"))
    assert len(found) == 2
    assert groups(saved) == []
