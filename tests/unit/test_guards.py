"""The table of guards is as the tree is: each text stands once, what is left compiles, and each test exists."""

import ast
import functools
import glob
import os

from tests.guards.guard import FAULTS, NODES, Guard, function_of
from tests.guards.run import ROOT
from tests.guards.table import GUARDS, WITHOUT


@functools.cache
def text_of(path: str) -> str:
    with open(os.path.join(ROOT, path), encoding="utf-8") as file:
        return file.read()


@functools.cache
def functions_of(path: str) -> frozenset[str]:
    return frozenset(node.name for node in ast.parse(text_of(path)).body if isinstance(node, ast.FunctionDef))


def problem_of(guard: Guard) -> str:
    """Why the row does not fit the tree; empty when it does."""
    for file, text, removed in guard.edits:
        there = text_of(file)
        if there.count(text) != 1:
            return f"{guard.name}: its text stands {there.count(text)} times in {file}: change the row"
        try:
            compile(there.replace(text, removed), file, "exec")
        except SyntaxError as error:
            return f"{guard.name}: what is left of {file} is no program: {error}"
    for test in guard.tests:
        path, _, name = function_of(test).partition("::")
        if name not in functions_of(path):
            return f"{guard.name}: {path} has no {name}"
    return ""


def test_every_row_fits_the_tree():
    assert [problem for guard in GUARDS if (problem := problem_of(guard))] == []


def test_names_are_unique():
    names = [guard.name for guard in GUARDS]
    assert sorted(set(names)) == sorted(names)


def test_each_fault_test_has_a_guard_or_a_reason():
    guarded = {function_of(test) for guard in GUARDS for test in guard.tests}
    paths = [path for folder in (FAULTS, NODES) for path in glob.glob(os.path.join(ROOT, folder, "test_*.py"))]
    names = [os.path.relpath(path, ROOT) for path in paths]
    found = {f"{name}::{test}" for name in names for test in functions_of(name) if test.startswith("test_")}
    assert sorted(found - guarded - WITHOUT.keys()) == [], "tests/guards/table.py lacks a row"
    assert sorted(WITHOUT.keys() & guarded) == []
    assert sorted(WITHOUT.keys() - found) == []
