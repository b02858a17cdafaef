"""The table of guards is as the tree is: each text stands once, what is left compiles, and each test exists."""

import ast
import functools
import os

from tests.guards.guard import Guard, function_of
from tests.guards.run import ROOT
from tests.guards.table import GUARDS


@functools.cache
def text_of(path: str) -> str:
    with open(os.path.join(ROOT, path), encoding="utf-8") as file:
        return file.read()


@functools.cache
def functions_of(path: str) -> frozenset[str]:
    return frozenset(node.name for node in ast.parse(text_of(path)).body if isinstance(node, ast.FunctionDef))


def problem_of(guard: Guard) -> str:
    """Why the row does not fit the tree; empty when it does."""
    text = text_of(guard.file)
    if text.count(guard.text) != 1:
        return f"{guard.name}: its text stands {text.count(guard.text)} times in {guard.file}: change the row"
    try:
        compile(text.replace(guard.text, guard.removed), guard.file, "exec")
    except SyntaxError as error:
        return f"{guard.name}: what is left of {guard.file} is no program: {error}"
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
