"""A plugin of pytest, in a run without a guard: writes each failure to a file, and the arenas that tests make.

Once a test that the row names has failed, its other cases are skipped: one is enough.
"""

import json
import os
import tempfile
from typing import Any

import pytest

from tests.guards.guard import function_of

FAILURES, ARENAS = "failures.jsonl", "arenas"
FOLDER = "GUARDS_FOLDER"  # the variable that says where; every process of the row has it
_MOST_CHARS = 60_000
_failed: set[str] = set()


def _note(name: str, text: str) -> None:
    with open(os.path.join(os.environ[FOLDER], name), "a", encoding="utf-8") as file:
        file.write(text + "\n")


_mkdtemp = tempfile.mkdtemp


def _noted_mkdtemp(*words: Any, **named: Any) -> Any:
    path = _mkdtemp(*words, **named)
    if os.fspath(path).startswith("/dev/shm"):
        _note(ARENAS, os.fspath(path))
    return path


def pytest_configure() -> None:
    """Before any test makes one."""
    tempfile.mkdtemp = _noted_mkdtemp


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips what has nothing to add."""
    if function_of(item.nodeid) in _failed:
        pytest.skip("another case of this test has failed without the guard")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """With what the test's own hooks have added to the report."""
    report = yield
    if report.failed:
        kind = call.excinfo.typename if call.excinfo is not None else ""
        message = str(call.excinfo.value) if call.excinfo is not None else ""
        text = "\n".join([report.longreprtext, *(content for _, content in report.sections)])
        row = {"test": item.nodeid, "when": report.when, "kind": kind, "message": message, "text": text[:_MOST_CHARS]}
        _note(FAILURES, json.dumps(row))
        if report.when != "setup":
            _failed.add(function_of(item.nodeid))
    return report
