"""Tests that need a framework run where it is installed: `make frameworks-test` makes an environment with all.

Each test says which, by the names that pip knows: pytestmark = pytest.mark.frameworks("megatron-core").
"""

import functools
import importlib.metadata
import os
import pathlib

import pytest

from tests.cluster import Node
from tests.frameworks.launch import on_ranks

HERE = str(pathlib.Path(__file__).parent) + os.sep
# A kill and a resume under three trainers, whose ways in differ most: the short form, FRAMEWORKS=short.
SHORT = (
    "test_deepspeed.py::test_a_killed_training_goes_on_from_memory_and_then_by_stock_means[2]",
    "test_lightning.py::test_a_killed_training_goes_on_from_memory_and_then_by_stock_means[1]",
    "test_hf.py::test_a_staged_checkpoint_is_resumed_from_memory",
)


def pytest_collection_modifyitems(config, items):
    ours = [item for item in items if str(item.path).startswith(HERE)]
    if os.environ.get("FRAMEWORKS") == "short":
        left_out = {item for item in ours if not item.nodeid.endswith(SHORT)}
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]
        ours = [item for item in ours if item not in left_out]
    for item in ours:
        marker = item.get_closest_marker("frameworks")
        assert marker, f"{item.nodeid} does not say which frameworks it needs"
        missing = [name for name in marker.args if not _installed(name)]
        if missing:
            item.add_marker(pytest.mark.skip(reason=f"not installed: {', '.join(missing)} (make frameworks-test)"))


@functools.cache
def _installed(distribution):
    try:
        return bool(importlib.metadata.version(distribution))
    except importlib.metadata.PackageNotFoundError:
        return False


@pytest.fixture(scope="module")
def cases(request, tmp_path_factory):
    """What two ranks say of all cases in the test file's SOURCE: they take their time to start.

    Of those of one kind, where the test says one.
    """
    kind = [request.param] if hasattr(request, "param") else []
    folder = tmp_path_factory.mktemp("cases")
    (folder / "out").mkdir()
    with Node(str(folder)) as node:
        node.start()
        yield on_ranks(node, 2, request.module.SOURCE.name, str(folder / "out"), *kind)


@pytest.fixture
def node(tmp_path):
    """A daemon with an arena and a store of its own."""
    with Node(str(tmp_path)) as node:
        node.start()
        yield node
