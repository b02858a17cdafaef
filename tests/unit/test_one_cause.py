"""An error whose message has its cause in it is raised alone: a chain of tracebacks would say it twice."""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[2]
SOURCES = sorted([*(ROOT / "ckptd").rglob("*.py"), *(ROOT / "client").rglob("*.py")])
SAY_ALL = {"ConfigError", "UsageError", "BudgetError", "ConnectError", "not_allowed"}
OF_USERS_CODE = {"pickle.py", "framework.py"}  # where in it is worth a traceback


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_a_user_can_mend_has_one_traceback(path):
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and isinstance(node.exc.func, ast.Name):
            chained = node.cause is not None and not isinstance(node.cause, ast.Constant)
            if node.exc.func.id in SAY_ALL and chained and path.name not in OF_USERS_CODE:
                found.append(f"{path}:{node.lineno}: raise {node.exc.func.id}(...) from None")
    assert not found, "\n".join(found)
