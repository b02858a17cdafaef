"""An error whose message has its cause in it is raised alone: a chain of tracebacks would say it twice."""

import ast

import pytest

from tests.unit.sources import EVERYTHING, trees

pytestmark = pytest.mark.xdist_group("sources")  # one parse of all of them

SAY_ALL = {"ConfigError", "UsageError", "BudgetError", "ConnectError", "not_allowed"}
OF_USERS_CODE = {"pickle.py", "framework.py"}  # where in it is worth a traceback


def test_what_a_user_can_mend_has_one_traceback():
    raised = [
        (EVERYTHING[module], node)
        for module, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and isinstance(node.exc.func, ast.Name)
    ]
    found = [
        f"{path}:{node.lineno}: raise {node.exc.func.id}(...) from None"
        for path, node in raised
        if node.exc.func.id in SAY_ALL and node.cause is not None and not isinstance(node.cause, ast.Constant)
        if path.name not in OF_USERS_CODE
    ]
    assert not found, "\n".join(found)
