"""Machines of the coordinator share the facts, and no more: what decision 0051 says of their arguments and columns."""

import ast
import inspect

import pytest

from ckptd.core.coordinator import (
    last_rebuild,
    leave,
    missed_loads,
    missing_ranks,
    notices,
    parity_scheduler,
    restores,
    retention,
    runs,
    saves,
)  # fmt: skip
from tests.unit.sources import ROOT

FILES = sorted((ROOT / "ckptd" / "core" / "coordinator").glob("*.py"))
NAMED = {"session", "restore", "preemption", "inventory"}  # in the facts: their machines keep these columns
MACHINES = {
    last_rebuild.LastRebuild, leave.Leave, missed_loads.MissedLoads, missing_ranks.MissingRanks, notices.Notices,
    parity_scheduler.ParityScheduler,
    restores.Restores, retention.Retention, runs.Runs, saves.Saves,
}  # fmt: skip


@pytest.mark.parametrize("machine", sorted(MACHINES, key=lambda one: one.__name__), ids=lambda one: one.__name__)
def test_a_machine_gets_the_facts_and_no_other_machine(machine):
    first, *others = inspect.signature(machine).parameters.values()
    kinds = {getattr(parameter.annotation, "__name__", str(parameter.annotation)) for parameter in others}
    assert getattr(first.annotation, "__name__", first.annotation) == "JobState"
    assert kinds.isdisjoint({one.__name__ for one in MACHINES} | {"Sessions", "Preemption", "InventoryBarrier"})


def written(tree):
    """Targets of assignments, as text."""
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        yield from (ast.unparse(t) for t in targets if isinstance(t, ast.Attribute))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_no_machine_assigns_to_a_column_of_another_that_the_facts_name(path):
    found = [target.split(".") for target in written(ast.parse(path.read_text()))]
    into = [parts for parts in found if any(one in ("facts", "_facts") for one in parts[:-2]) and NAMED & {*parts[:-1]}]
    assert into == []
