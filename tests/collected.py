"""Imports all tests that are asked for: a server of tests/pythons.py does, and a worker that it forks has them.

The worker collects its tests as ever, from modules that are there already, with their asserts rewritten.
"""

import contextlib
import json
import os

import pytest

from tests.pythons import ASKED

with open(os.devnull, "w", encoding="utf-8") as nowhere, contextlib.redirect_stdout(nowhere):
    pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", *json.loads(os.environ.pop(ASKED))])
