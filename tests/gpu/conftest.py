"""What needs a CUDA device; `make test-gpu`. Without one everything here is skipped."""

import pytest
import torch

from ckptd_client._local.copy_engines import CopyEngine
from tests.unit.client.conftest import (
    job,  # noqa: F401 - a fixture
    join,  # noqa: F401 - a fixture
    node,  # noqa: F401 - fixtures
)


def pytest_collection_modifyitems(items):
    here = [item for item in items if "/tests/gpu/" in str(item.path)]
    for item in here:
        item.add_marker(pytest.mark.gpu)
        if not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture
def device():
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def registered(monkeypatch):
    """Addresses that were registered, in order; while the real thing runs."""
    found = []
    register = CopyEngine.register

    def noted(engine, address, nbytes):
        found.append(address)
        return register(engine, address, nbytes)

    monkeypatch.setattr(CopyEngine, "register", noted)
    return found


@pytest.fixture
def busy(device):
    """Gives the current stream about so many seconds of work."""
    cycles = 100_000_000
    torch.cuda._sleep(1000)
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    torch.cuda._sleep(cycles)
    stop.record()
    torch.cuda.synchronize()
    per_s = cycles / (start.elapsed_time(stop) / 1e3)
    return lambda seconds: torch.cuda._sleep(int(seconds * per_s))
