"""Nodes in a sentence."""

import pytest

from ckptd.cli.view.names import counted_nodes, named


@pytest.mark.parametrize(
    ("nodes", "text"),
    [
        ([], ""),
        (["a"], "a"),
        (["b", "a", "c", "d"], "a, b, c, d"),
        ([*"abcdef"], "a, b, c, d and 2 more"),
        (["node2", "node10", "node3"], "node[2-3], node10"),
        ([f"gpu-{n:04d}" for n in (3, *range(7, 13))], "gpu-[0003,0007-0012]"),
        (["3", "7", "8", "9"], "[3,7-9]"),
        (["gpu01.hall2.site", "gpu02.hall2.site"], "gpu[01-02].hall2.site"),
        ([f"n{n:03d}" for n in range(0, 40, 2)], "n[000,002,004,006,008,010] and 14 more"),
        (["a\x1b[2J", "b"], "a�[2J, b"),
    ],
)
def test_runs_of_numbers_are_drawn_together(nodes, text):
    assert named(nodes) == text


def test_of_how_many_is_said_where_they_are_many():
    assert counted_nodes(["b"], 4) == "node b"
    assert counted_nodes(["b", "c"], 10_000) == "nodes b, c (2 of 10,000)"
    assert counted_nodes([f"n{n:05d}" for n in range(10_000)], 10_000) == "nodes n[00000-09999]"
