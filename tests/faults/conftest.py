"""Clients in this process, of a node whose daemon the test starts."""

import pytest

import ckptd_client
from tests.faults.ranks import told


@pytest.fixture(name="node")
def fixture_node(tmp_path):
    with told(str(tmp_path)) as node:
        yield node


@pytest.fixture(name="join")
def fixture_join(node, monkeypatch):
    """connect() in this process; what a test leaves open is closed."""
    for name in ("WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in node.environ().items():
        monkeypatch.setenv(name, value)
    clients = []

    def connect(job="job", **settings):
        clients.append(ckptd_client.connect(job, **{"start": False} | settings))
        return clients[-1]

    yield connect
    for client in clients:
        client.close()
