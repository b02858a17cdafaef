"""Overlapped saves of CUDA tensors: exact, and no wait of the host or the compute stream but for the copy itself."""

import copy
import random
import time

import pytest
import torch
from torch import nn

from ckptd_client import SaveFailedError, UsageError
from tests.unit.client.same import difference

OPTIONS = [{"fused": True}, {"foreach": True}, {"foreach": False}, {"capturable": True}]


class Loop:
    """A training on the device. parameters: a state of nothing but what the optimizer writes."""

    def __init__(self, device, seed=0, width=64, optimizer=torch.optim.AdamW, **options):
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Linear(width, width)).to(device)
        self.optimizer = optimizer(self.model.parameters(), lr=0.01, **options)
        self.device, self.width = device, width

    def state(self):
        return {"model": self.model, "optimizer": self.optimizer}

    def parameters(self):
        return {"model": dict(self.model.named_parameters())}

    def snapshot(self):
        return copy.deepcopy({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()})

    def backward(self, micro=1):
        self.optimizer.zero_grad(set_to_none=True)
        for _ in range(micro):
            self.model(torch.randn(8, self.width, device=self.device)).square().mean().backward()

    def step(self, micro=1):
        self.backward(micro)
        self.optimizer.step()


@pytest.fixture
def begun(join, device):
    loop, client = Loop(device, width=2048), join()
    loop.step()
    client.attach(loop.optimizer, verify="proof")
    client.prepare(loop.parameters())
    torch.cuda.synchronize()
    return loop, client


@pytest.mark.timeout(600)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_200_saves_at_random_points_equal_synchronous_copies(options, join, device):
    loop, other, client = Loop(device, **options), Loop(device, seed=9, **options), join()
    loop.step()
    other.step()
    client.attach(loop.optimizer, verify="proof")
    chance = random.Random(5)
    for _ in range(200):
        for _ in range(chance.randrange(3)):
            loop.step(micro=chance.randint(1, 3))
        expected = loop.snapshot()
        handle = client.save(loop.state())
        if chance.random() < 0.8:
            loop.step(micro=chance.randint(1, 3))
        handle.wait("staged", 30)
        client.load(other.state())
        assert not difference(expected, other.snapshot())


def test_neither_save_nor_the_hook_waits_for_the_compute_stream(begun, busy):
    loop, client = begun
    expected = {name: tensor.detach().clone() for name, tensor in loop.model.named_parameters()}
    busy(1.0)
    done = torch.cuda.Event()
    done.record()
    began = time.perf_counter()
    handle = client.save(loop.parameters())
    saved = time.perf_counter()
    assert not done.query(), "save waited for the compute stream"
    loop.step()
    stepped = time.perf_counter()
    assert not done.query(), "the step waited for the compute stream"
    assert saved - began < 0.3
    assert stepped - saved < 0.6
    handle.wait("staged", 30)
    back = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    client.load({"model": back})
    assert not difference(expected, back)


def test_the_compute_stream_goes_on_while_the_copy_runs(begun):
    loop, client = begun
    handle = client.save(loop.parameters())
    loop.backward()
    done = torch.cuda.Event()
    done.record()
    done.synchronize()  # nothing holds back what does not write
    loop.optimizer.step()
    handle.wait("staged", 30)


@pytest.mark.parametrize("counted", [True, False])
def test_a_write_before_the_step_is_found_out(begun, busy, counted):
    loop, client = begun
    busy(0.2)
    handle = client.save(loop.parameters())
    weight = loop.model[0].weight
    with torch.no_grad():
        (weight if counted else weight.data).add_(1)
    loop.optimizer.step()
    with pytest.raises(SaveFailedError, match="written between save and the optimizer's step"):
        handle.wait("staged", 30)


def test_who_writes_from_the_beginning_is_never_trusted(join, device):
    loop, client = Loop(device), join()
    loop.step()
    client.attach(loop.optimizer, verify="proof")
    for _ in range(5):
        expected = {name: tensor.detach().clone() for name, tensor in loop.model.named_parameters()}
        client.save(loop.parameters()).wait("staged", 30)
        loop.model[0].weight.data.add_(1)
        loop.optimizer.step()
    back = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    client.load({"model": back})
    assert not difference(expected, back)


# --- graphs


def test_a_save_into_a_graph_is_refused_and_the_graph_is_whole(begun, device):
    loop, client = begun
    total = torch.zeros(1, device=device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        total.add_(1)
        with pytest.raises(UsageError, match="CUDA graph is being captured"):
            client.save(loop.parameters())
        total.add_(1)
    graph.replay()
    assert total.item() == 2
    client.save(loop.parameters()).wait("staged", 30)


def test_an_optimizer_whose_step_is_replayed_is_copied_at_once(join, device, caplog):
    loop, client = Loop(device, optimizer=torch.optim.SGD), join()
    client.attach(loop.optimizer, verify="proof")
    loop.step()
    for parameter in loop.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loop.optimizer.step()
    for _ in range(3):
        expected = {name: tensor.detach().clone() for name, tensor in loop.model.named_parameters()}
        handle = client.save(loop.parameters())
        graph.replay()
        handle.wait("staged", 30)
    assert "captured in a CUDA graph" in caplog.text
    back = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    client.load({"model": back})
    assert not difference(expected, back)
