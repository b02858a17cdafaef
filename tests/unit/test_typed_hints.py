"""What messages give to type can be typed: a verb that needs a path is given one."""

import ast
import re

import pytest

from tests.unit.sources import EVERYTHING, trees

pytestmark = pytest.mark.xdist_group("sources")  # one parse of all of them

NEED_A_PATH = "list|verify|export|commit|publish|prune|pin|rebuild"
TYPED = re.compile(rf"\bckptd (?:{NEED_A_PATH})\b(?! (?:--[a-z-]+(?: [A-Za-z0-9]+)? )*(?:/|\$|\{{|[A-Z]{{3}}))")


def messages(tree):
    """Each text of a program that is no docstring, with {} for what is filled in."""
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    parts = {id(one) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for one in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield node, "".join(one.value if isinstance(one, ast.Constant) else "{}" for one in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs | parts:
            yield node, node.value


def test_a_verb_that_needs_a_path_has_one():
    found = [
        f"{EVERYTHING[module]}:{node.lineno}: {text[match.start() :][:60]}"
        for module, tree in trees().items()
        for node, text in messages(tree)
        for match in TYPED.finditer(text)
    ]
    assert not found, "\n".join(found)
