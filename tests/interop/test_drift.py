"""Replicas that drift, come back and drift again: what is durable was compared on all of them, or is marked.

FAULTS=long adds jobs of four ranks.
"""

import json
import os
import sys

import pytest

from ckptd.cli.listing import _listing
from ckptd.shared.base.ids import JobKey
from tests.cluster import Node
from tests.interop.launch import on_ranks
from tests.long_form import in_long


@pytest.fixture
def node(tmp_path):
    with Node(str(tmp_path)) as node:
        node.start("--keep-last", "100")
        yield node


def drift(node, ranks, verify, folder, *more):
    """What was true of each save, by step; rows of `ckptd list` by step."""
    out = on_ranks(node, ranks, "drift_ranks.py", verify, str(folder), *more)
    assert out.count("did it") == ranks, out
    told = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(ranks)]
    saves = {one["step"]: one for one in told[0]}
    for others in told[1:]:
        assert [one["end"] for one in others] == [one["end"] for one in told[0]]
    rows = {row.step: row for row in _listing(JobKey(node.store, "drift")).checkpoints}
    return saves, rows


def marked(rows):
    """Steps of which the record says that not all was compared."""
    return {step for step, row in rows.items() if row.replicas not in {"", "all"}}


def unmarked(saves, rows):
    """Steps of durable checkpoints of replicas that differ of which the record does not say so."""
    return [step for step, one in saves.items() if not one["alike"] and step in rows and step not in marked(rows)]


def own(saves, rows):
    """What the records say of the saves in which each rank saved all of its own, by step."""
    return {step: rows[step].replicas for step, one in saves.items() if not one["balanced"] and step in rows}


@pytest.mark.parametrize("ranks", [2, *in_long(4)])
def test_a_save_of_replicas_that_differ_is_not_durable_and_the_keys_are_named(node, tmp_path, ranks):
    saves, rows = drift(node, ranks, "today", tmp_path)
    assert not unmarked(saves, rows)
    first = [one for one in saves.values() if one["balanced"] and not one["alike"]]
    assert [one["step"] for one in first] == [4, 12], "found at once, and each rank saves its own bytes from then on"
    assert all(one["end"] == "abandoned" for one in first)
    assert all("shared.c" in one["why"] for one in first), first
    assert sorted(set(saves) - set(rows)) == [4, 12]
    differing = dict.fromkeys((5, 7, 13, 15), "differing")
    assert own(saves, rows) == differing | dict.fromkeys((6, 8, 14, 16), "all")
    assert marked(rows) == set(differing), "nothing else is in doubt"


@pytest.mark.parametrize("ranks", [2, *in_long(4)])
def test_where_some_saves_are_drained_those_are_compared_and_one_that_was_not_due_is_marked(node, tmp_path, ranks):
    """Drained are those of steps 1, 3 and 6, 9, 13, for 12 is given up, and 15; the last of each session by force."""
    saves, rows = drift(node, ranks, "drained", tmp_path, "3")
    assert not unmarked(saves, rows)
    said = {step: row.replicas for step, row in rows.items()}
    compared = {1: "all", 3: "all", 6: "all", 9: "all", 13: "differing", 15: "differing"}
    assert said == compared | {8: "window", 16: "window"}, "each of the others was compared in full"


@pytest.mark.parametrize(("ranks", "verify"), [(2, "6"), (2, "off"), *in_long((4, "off"))])
def test_what_was_not_compared_in_full_is_marked_in_its_own_record(node, tmp_path, ranks, verify):
    saves, rows = drift(node, ranks, verify, tmp_path)
    assert not unmarked(saves, rows)
    doubted = marked(rows)
    command = (sys.executable, "-m", "ckptd", "list", os.path.join(node.store, "drift"))
    listed = node.complete(*command, timeout_s=60, COLUMNS="160")
    assert listed.count("replicas not compared") + listed.count("replicas differed") == len(doubted)
    assert {step for one in saves.values() for step in one.get("doubted", ())} == doubted, "ckptd status"
    assert set(saves[16]["read"]) == doubted, "load_from"
    assert doubted
    if saves[16]["balanced"]:
        assert any("step 16" in note and "compared" in note for note in saves[16]["notes"])
