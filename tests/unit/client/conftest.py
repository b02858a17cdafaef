"""A daemon for a whole test file, and clients of it for one test, each test with a job of its own."""

import re

import pytest
import torch.distributed as dist

import ckptd_client
from ckptd.shared.format.digest import digest
from ckptd.shared.format.stored_records import StoredRecords
from tests.cluster import Node, wait_for


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    with Node(str(tmp_path_factory.mktemp("store"))) as node:
        node.start()
        yield node


@pytest.fixture
def job(request):
    """A job's name that no other test has."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", request.node.name).strip("-")
    return f"{name[:50]}-{digest(name.encode()).hex()[:8]}"


@pytest.fixture
def join(node, job, monkeypatch):
    """connect() as one rank, alone, to this file's daemon; what a test leaves open is closed."""
    for name in ("WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    clients = []

    def connect(name=job, on=node, **settings):
        settings = {"store": on.store, "arena": on.arena, "start": False} | settings
        clients.append(ckptd_client.connect(name, **settings))
        return clients[-1]

    yield connect
    for client in clients:
        client.close()


@pytest.fixture
def emptied(node, job):
    """Waits until the arena holds nothing of this test's job, and says so."""

    def wait(name=job, on=node):
        return wait_for(lambda: not [path for path in on.slots() if f"/{name}-" in path])

    return wait


@pytest.fixture
def lone_group(tmp_path):
    """torch.distributed with this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def votes_read(monkeypatch):
    """The nodes whose votes are read."""
    seen = []
    real = StoredRecords._vote

    def counted(self, number):
        if number not in self._votes:
            seen.append(self.manifest.votes[number].node)
        return real(self, number)

    monkeypatch.setattr(StoredRecords, "_vote", counted)
    return seen
