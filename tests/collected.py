"""Imports all tests that are asked for: a server of tests/pythons.py does, and a worker that it forks has them.

The worker collects its tests as ever, from modules that are there already, with their asserts rewritten. A second
process begins at the other end, and ends when this one has all: the asserts that either has rewritten, both find kept.
"""

import contextlib
import json
import os
import signal

import pytest

from tests.pythons import ASKED


def _collect(asked: list[str]) -> None:
    with open(os.devnull, "w", encoding="utf-8") as nowhere, contextlib.redirect_stdout(nowhere):
        pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", *asked])


def _from_the_end(asked: list[str]) -> list[str]:
    listed = [[os.path.join(path, name) for name in sorted(os.listdir(path))] for path in asked if os.path.isdir(path)]
    inner = [
        path for paths in listed for path in paths if "__" not in path and (os.path.isdir(path) or path.endswith(".py"))
    ]
    return inner[::-1]


_asked = json.loads(os.environ.pop(ASKED))
_other = os.fork()
if _other == 0:
    with contextlib.suppress(BaseException):
        _collect(_from_the_end(_asked))
    os._exit(0)
_collect(_asked)
os.kill(_other, signal.SIGKILL)
os.waitpid(_other, 0)
