"""The machines are booted once for all scenarios, and only where somebody asked for it: `make cluster-test`."""

import os
import tempfile

import pytest

from tests.machines import tree
from tests.machines.cluster import Machines, booted

_SHORT = ("test_save_drain_status", "test_a_machine_is_replaced")


def pytest_collection_modifyitems(items):
    asked = os.environ.get("MACHINES", "")
    obstacle = tree.obstacle() if asked else "boots machines: make cluster-test"
    for item in items:
        if "tests/machines/" in str(item.path):
            reason = obstacle or ("CLUSTER=short" if asked == "short" and item.name not in _SHORT else "")
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def machines():
    with booted() as cluster:
        yield cluster


@pytest.fixture(scope="session")
def logs():
    with tempfile.TemporaryDirectory(prefix="ckptd-test-") as directory:
        yield directory


@pytest.fixture(autouse=True)
def told(request, machines: Machines):
    """When a scenario fails: what the daemons said."""
    failed = request.session.testsfailed
    yield
    if request.session.testsfailed > failed:
        for machine in machines.all:
            print(f"--- {machine.name}\n{machine.root_does('journalctl -u ckptd@ann --no-pager -n 60', check=False)}")
