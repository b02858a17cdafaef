"""Tests that need a framework run where it is installed: `make frameworks-test` makes an environment with all.

Each test says which, by the names that pip knows: pytestmark = pytest.mark.frameworks("megatron-core").
"""

import importlib.metadata
import pathlib

import pytest

from tests.cluster import Node

HERE = pathlib.Path(__file__).parent


def pytest_collection_modifyitems(items):
    for item in items:
        if HERE not in item.path.parents:
            continue
        marker = item.get_closest_marker("frameworks")
        assert marker, f"{item.nodeid} does not say which frameworks it needs"
        missing = [name for name in marker.args if not _installed(name)]
        if missing:
            item.add_marker(pytest.mark.skip(reason=f"not installed: {', '.join(missing)} (make frameworks-test)"))


def _installed(distribution):
    try:
        return bool(importlib.metadata.version(distribution))
    except importlib.metadata.PackageNotFoundError:
        return False


@pytest.fixture
def node(tmp_path):
    """A daemon with an arena and a store of its own."""
    with Node(str(tmp_path)) as node:
        node.start()
        yield node
