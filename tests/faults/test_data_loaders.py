"""DataLoader workers that are forked while late copies run."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import Node
from tests.faults.ranks import told

pytestmark = [pytest.mark.faults, pytest.mark.timeout(90)]

FORKS = """
import sys, threading, time, warnings
warnings.simplefilter("ignore")
import torch
import ckptd_client
from ckptd_client._overlap import Overlap
from tests.unit.client.same import difference

torch.set_num_threads(1)
copy = Overlap._copy
running = threading.Event()
Overlap._copy = lambda overlap: (running.set(), time.sleep(0.2), copy(overlap))
model = torch.nn.Linear(300, 300)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
state = {"model": model, "optimizer": optimizer}
with ckptd_client.connect("forks", start=False) as client:
    client.attach(optimizer)
    batches = 0
    for step in range(5):
        expected = {name: value.clone() for name, value in model.state_dict().items()}
        running.clear()
        handle = client.save(state, step)
        if step < 3:  # the first saves are not late
            model.weight.grad = torch.ones_like(model.weight)
            optimizer.step()
            continue
        assert running.wait(10)
        loader = torch.utils.data.DataLoader(torch.randn(8, 300), 2, num_workers=2, multiprocessing_context="fork")
        for batch in loader:
            model(batch).sum().backward()
            batches += 1
        optimizer.step()
        handle.wait("staged", 20)
    assert batches == 8
    client.load(state)
    assert not difference(expected, dict(model.state_dict()))
print("every batch came")
"""


@pytest.fixture(name="node")
def fixture_node(tmp_path: Path) -> Iterator[Node]:
    with told(str(tmp_path)) as node:
        node.start()
        yield node


def test_workers_forked_while_copies_run_disturb_nobody(node: Node):
    training = node.run(FORKS)
    out, errors = training.communicate(timeout=80)
    assert out == b"every batch came\n", errors.decode()
    assert training.returncode == 0, errors.decode()
