"""docs/status-captures.md: the driven ones are compared to the letter, and all keep what the page promises."""

import pytest

from ckptd.cli.view.unsafe import judged
from tests.situations import driven, page, real

FIRST = 6  # the command, and five lines of what it prints
QUIET = {"healthy", "restoring"}  # nothing is wrong there


@pytest.mark.parametrize("name", driven.SITUATIONS)
def test_a_driven_capture_is_what_is_printed_today(name):
    """To take it again: python -m tests.situations NAME."""
    assert page.captured(name) == f"$ ckptd status\n{page.rendered(driven.SITUATIONS[name]())}"


def test_there_are_ten_in_80_columns():
    assert set(page.names()) == {*driven.SITUATIONS, *real.SITUATIONS}
    assert len(page.names()) == 10
    for name in page.names():
        lines = page.captured(name).split("\n")
        assert lines[0] == "$ ckptd status"
        assert max(map(len, lines)) <= page.COLUMNS, name
        assert len(lines) <= 30, name


@pytest.mark.parametrize("name", [name for name in page.names() if name not in QUIET])
def test_what_is_wrong_and_what_to_do_stands_in_the_first_five_lines(name):
    first = page.captured(name).split("\n")[:FIRST]
    assert any(line.startswith(("unsafe", "error")) for line in first)
    assert any(line.startswith("hint") for line in first)


def test_where_nothing_is_wrong_nothing_is_said():
    for name in QUIET:
        assert "unsafe" not in page.captured(name)
    assert any(line.startswith("load") for line in page.captured("restoring").split("\n")[:FIRST])


def test_of_many_nodes_ranges_are_named_and_the_page_stays_low():
    (found,) = [one for one in judged(driven.thousand_nodes(64)).unsafe if one.code == "nodes_lost"]
    assert "nodes node[00003,00007-00012] (7 of 64) do not answer" in found.text
