"""Each machine of the coordinator writes its own column of the facts: what one writes, no other does."""

import ast
from collections import defaultdict

from tests.unit.sources import ROOT

FOLDER = ROOT / "ckptd/core/coordinator"
ONE_MACHINE = {"drains": "saves", "load_round": "restores"}  # in two files
RECORDS = {"chosen", "records"}  # names of a save's record
WIRING = {
    ("coordinator", "facts", name) for name in ("restore", "preemption")
}  # what the facts are given when they are made


def written(tree):
    """Whose attributes the module assigns, and which: as in ``record.due = True``, ``self._facts.on_store[x] = y``."""
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign | ast.Delete) else [getattr(node, "target", None)]
        for target in [one for several in targets for one in (getattr(several, "elts", None) or [several])]:
            column = without_index(target)
            if isinstance(column, ast.Attribute) and (owner := name_of(column.value)) != "self":
                yield "record" if owner in RECORDS else owner.lstrip("_"), column.attr


def without_index(node):
    return without_index(node.value) if isinstance(node, ast.Subscript) else node


def name_of(node):
    found = without_index(node)
    return found.id if isinstance(found, ast.Name) else found.attr


def test_no_two_machines_write_one_column():
    writers = defaultdict(set)
    for path in FOLDER.glob("*.py"):
        for column in written(ast.parse(path.read_text())):
            if (path.stem, *column) not in WIRING:
                writers[column].add(ONE_MACHINE.get(path.stem, path.stem))
    assert {column: found for column, found in writers.items() if len(found) > 1} == {}
    assert not any("coordinator" in found for found in writers.values()), "it calls the machines, and writes none"


def test_no_machine_is_an_argument_of_another():
    machines = {"Saves", "Drains", "ParityScheduler", "Restores", "Leave", "Notices", "MissingRanks", "MissedLoads"}
    taken = {
        (path.stem, name.id)
        for path in FOLDER.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.arg) and node.annotation is not None
        for name in ast.walk(node.annotation)
        if isinstance(name, ast.Name) and name.id in machines
    }
    assert taken == {("invariants", "ParityScheduler")}
