"""A daemon for a whole test file; for each test one of its own, where daemons are killed."""

import pytest

from tests.cluster import Node


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    with Node(str(tmp_path_factory.mktemp("store"))) as node:
        node.start()
        yield node


@pytest.fixture
def fresh_node(tmp_path):
    with Node(str(tmp_path)) as node:
        node.start()
        yield node
