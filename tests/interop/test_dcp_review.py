"""DCP's plug-ins and the client on the same checkpoints: what each of them must not lose, mix up or hang on."""

import gc
import os
import threading
import time

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import ckptd_client
from ckptd_client.dcp import CkptdReader, CkptdStager, CkptdWriter
from tests.interop.clients import JOB, client_of

pytestmark = [pytest.mark.faults, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]


@pytest.fixture
def node(fresh_node):
    return fresh_node


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


def small(seed):
    return {"w": torch.full((10,), float(seed)), "n": seed}


def newest(client):
    state = small(0)
    client.load(state)
    return state["n"]


def test_a_checkpoint_id_without_a_number_ends_its_own_save_only(node):
    with client_of(node) as client:
        writer = CkptdWriter(client)
        stager = CkptdStager(writer)
        for seed, name in ((1, "run/final"), (2, "run/step-2")):
            if seed == 1:
                stager.stage(small(seed))
                with pytest.raises(CheckpointException, match="names no step"):
                    dcp.save(small(seed), storage_writer=writer, checkpoint_id=name)
            else:
                dcp.save(stager.stage(small(seed)), storage_writer=writer, checkpoint_id=name)
        assert writer.handle.step == 2
        assert newest(client) == 2


def test_a_fault_of_the_planner_leaves_no_save_behind(node):
    class Broken(DefaultSavePlanner):
        def create_local_plan(self):
            raise ValueError("no plan")

    with client_of(node) as client:
        writer = CkptdWriter(client)
        dcp.save(small(1), storage_writer=writer)
        with pytest.raises(CheckpointException, match="no plan"):
            dcp.save(small(2), storage_writer=writer, planner=Broken())
        assert client.wait("durable", 60).step == 0
        dcp.save(small(3), storage_writer=writer)
        assert newest(client) == 3


def test_a_stager_waits_for_no_thread_that_waits(node):
    with client_of(node, save_timeout_s=1, connect_timeout_s=6) as client:
        client.prepare(small(1))
        node.kill()
        client._link._retry_at = 0.0

        def wait():
            with pytest.raises(ckptd_client.CkptdError):
                client.steps()

        thread = threading.Thread(target=wait)
        thread.start()
        time.sleep(0.5)
        began = time.monotonic()
        CkptdStager(CkptdWriter(client)).stage(small(2))
        assert time.monotonic() - began < 5.5
        thread.join(20)


def test_waiting_for_durable_makes_it_durable(node):
    with client_of(node, drain_every=1000) as client:
        for _ in range(2):
            writer = CkptdWriter(client, wait="durable")
            dcp.save(small(1), storage_writer=writer)
            assert writer.handle.milestone == "durable"


class Odd:
    """Without a safe encoding."""

    def __init__(self, value):
        self.value = value


def odd(value):
    return {"w": torch.full((4,), float(value)), "hook": Odd(value)}


@pytest.mark.parametrize("staged", [False, True])
def test_keys_that_may_be_pickled_are_so_by_every_route(node, staged):
    with client_of(node, allow_pickle=["hook"]) as client:
        writer = CkptdWriter(client, wait="durable")
        dcp.save(CkptdStager(writer).stage(odd(1)) if staged else odd(1), storage_writer=writer)
        path = os.path.join(node.store, JOB, "latest")
        routes = [
            lambda state: client.load_from(path, state),
            lambda state: dcp.load(state, storage_reader=CkptdReader(client)),
            lambda state: dcp.load(state, storage_reader=CkptdReader(path, allow_pickle=["h*"])),
            client.load,
        ]
        for route in routes:
            state = odd(0)
            route(state)
            assert (state["w"].sum().item(), state["hook"].value) == (4, 1)
    with client_of(node) as client:
        with pytest.raises(ckptd_client.RestoreError, match=r"a pickle(.|\n)*connect\(allow_pickle=\['hook'\]\)"):
            client.load_from(path, odd(0))
        with pytest.raises(CheckpointException, match=r"a pickle(.|\n)*connect\(allow_pickle=\['hook'\]\)"):
            dcp.load(odd(0), storage_reader=CkptdReader(client))
        with pytest.raises(CheckpointException, match=r"a pickle(.|\n)*CkptdReader\(path, allow_pickle=\['hook'\]\)"):
            dcp.load(odd(0), storage_reader=CkptdReader(path))
        with pytest.raises(CheckpointException, match=r"cannot be saved(.|\n)*connect\(allow_pickle=\['hook'\]\)"):
            dcp.save(odd(1), storage_writer=CkptdWriter(client))


def descriptors():
    return len(os.listdir("/proc/self/fd"))


def test_a_load_that_fails_to_plan_keeps_no_file_open(node):
    with client_of(node) as client:
        dcp.save(small(1), storage_writer=CkptdWriter(client))
        before = descriptors()
        for _ in range(3):
            reader = CkptdReader(client)
            with pytest.raises(CheckpointException, match="absent"):
                dcp.load({"absent": torch.zeros(2)}, storage_reader=reader)
            assert (reader.step, reader.tier) == (0, "arena")
            del reader
            gc.collect()
        assert descriptors() == before


def test_a_tuple_of_tensors_that_dcp_writes_whole_comes_back(node):
    def paired(fill):
        return {"pair": (torch.full((3,), fill), [torch.full((2, 2), fill), {"x": fill}], "a"), "w": torch.ones(1)}

    with client_of(node) as client:
        dcp.save(paired(4.0), storage_writer=CkptdWriter(client, wait="durable"))
        path = os.path.join(node.store, JOB, "latest")
        for load in (client.load, lambda state: client.load_from(path, state)):
            state = paired(0.0)
            kept = state["pair"][0]
            load(state)
            assert state["pair"][0] is kept
            assert kept.tolist() == [4.0] * 3
            assert state["pair"][1][0].tolist() == [[4.0, 4.0]] * 2
            assert state["pair"][1][1] == {"x": 4.0}
            assert state["pair"][2] == "a"
        with pytest.raises(ckptd_client.MismatchError, match=r"state\['pair'\]\[0\].*F32 \[3\].*F32 \[5\]"):
            client.load({"pair": (torch.zeros(5), [torch.zeros(2, 2), {"x": 1}], "a"), "w": torch.ones(1)})
