"""DCP's plug-ins and the client on the same checkpoints: what each of them must not lose, mix up or hang on."""

import os

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckptd_client
from ckptd_client.dcp import CkptdWriter
from tests.cluster import Node

pytestmark = [pytest.mark.faults, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]


@pytest.fixture
def node(tmp_path):
    with Node(str(tmp_path)) as node:
        node.start()
        yield node


def client_of(node, **settings):
    settings = {"store": node.store, "arena": node.arena, "start": False} | settings
    return ckptd_client.connect("review", **settings)


def trained(seed):
    torch.manual_seed(seed)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    return model, optimizer


class Wrapper:
    """A Stateful that holds an optimizer, as in the tutorials of DCP."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def state_dict(self):
        return {"optim": self.optimizer.state_dict()}

    def load_state_dict(self, state):
        self.optimizer.load_state_dict(state["optim"])


@pytest.mark.parametrize("wrap", [lambda o: o, Wrapper])
@pytest.mark.parametrize("tier", ["arena", "pfs"])
def test_client_load_of_a_writers_optimizer(node, wrap, tier):
    """DCP makes text of the numbers of parameters, and of every other int key."""
    model, optimizer = trained(1)
    model(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    with client_of(node) as client:
        state = {"m": model, "o": wrap(optimizer), "table": {5: 1, 6: torch.ones(2)}}
        dcp.save(state, storage_writer=CkptdWriter(client, wait="durable"))
        if tier == "pfs":
            node.kill()
            for path in node.slots():
                os.unlink(path)
            node.start()
        fresh, restored = trained(2)
        table = {5: 0, 6: torch.zeros(2)}
        found = client.load({"m": fresh, "o": wrap(restored), "table": table})
        assert found.tier == tier
    assert list(table) == [5, 6]
    assert (table[5], table[6].tolist()) == (1, [1.0, 1.0])
    assert set(restored.state) == set(fresh.parameters())
    for old, new in zip(model.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(optimizer.state[old]["exp_avg"], restored.state[new]["exp_avg"])
    fresh(torch.ones(4, 3)).sum().backward()
    restored.step()
