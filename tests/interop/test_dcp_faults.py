"""What goes wrong around DCP's plug-ins: daemons that die half way, slots that are missing, bits that flip."""

import os

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from ckptd_client import UsageError
from ckptd_client.dcp import CkptdReader, CkptdStager, CkptdWriter
from tests.cluster import wait_for
from tests.interop.clients import JOB, client_of

pytestmark = [pytest.mark.faults, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]


@pytest.fixture
def node(fresh_node):
    return fresh_node


def state_of(seed, rows=1000):
    return {"w": torch.full((rows, 7), float(seed)), "deep": {"n": seed, "v": torch.arange(5) + seed}}


def loaded(client, **how):
    state = state_of(0)
    reader = CkptdReader(client, **how)
    dcp.load(state, storage_reader=reader)
    return state["deep"]["n"], state["w"].unique().tolist(), reader.tier


def flip(path, at=9000):
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))


def test_a_daemon_that_dies_between_staging_and_hand_over(node):
    """What was staged goes to the next daemon, although another save is staged first and wants a slot too."""
    with client_of(node) as client:
        first, second = CkptdWriter(client), CkptdWriter(client)
        staged = CkptdStager(first).stage(state_of(1))
        node.kill()
        node.start()
        later = CkptdStager(second).stage(state_of(2))  # takes another slot, though the first is granted anew as well
        dcp.save(staged, storage_writer=first, checkpoint_id="51")
        assert loaded(client) == (1, [1.0], "arena")
        with pytest.raises(CheckpointException, match="the load that came after"):
            dcp.save(later, storage_writer=second, checkpoint_id="52")
        dcp.save(state_of(3), storage_writer=second)
        assert loaded(client)[0] == 3
        client.wait("durable", 60)


def test_a_state_that_grew_goes_into_larger_slots(node):
    with client_of(node) as client:
        writer = CkptdWriter(client)
        for seed, rows in ((1, 10), (2, 400_000)):
            dcp.save(state_of(seed, rows), storage_writer=writer)
        state = state_of(0, 400_000)
        dcp.load(state, storage_reader=CkptdReader(client))
        assert state["w"].unique().tolist() == [2.0]


def test_writers_that_are_dropped_half_way_keep_no_slot(node):
    """Three slots, and more saves than that which were staged and never written."""
    with client_of(node, save_timeout_s=2) as client:
        for seed in range(8):
            CkptdStager(CkptdWriter(client)).stage(state_of(seed))
        dcp.save(state_of(9), storage_writer=CkptdWriter(client))
        assert loaded(client)[0] == 9


def test_another_state_than_the_staged_one_is_refused(node):
    with client_of(node) as client:
        writer = CkptdWriter(client)
        staged = CkptdStager(writer).stage(state_of(1))
        with pytest.raises(CheckpointException, match="asynchronous save of the same writer"):
            dcp.save(state_of(2), storage_writer=writer)
        del staged
        dcp.save(state_of(3), storage_writer=writer)
        assert loaded(client)[0] == 3


def test_no_slot_in_time_is_an_error_and_the_next_save_works(node):
    with client_of(node, save_timeout_s=0.5) as client:
        writer = CkptdWriter(client)
        stager = CkptdStager(writer)
        staged = [stager.stage(state_of(seed)) for seed in range(3)]
        with pytest.raises(CheckpointException, match=r"no slot was free(.|\n)*slots_per_rank"):
            dcp.save(state_of(7), storage_writer=CkptdWriter(client))
        for state in staged:
            dcp.save(state, storage_writer=writer)
        assert loaded(client)[0] == 2
        dcp.save(state_of(8), storage_writer=CkptdWriter(client))
        assert loaded(client)[0] == 8


def test_no_daemon_is_an_error_not_a_hang(node):
    with client_of(node, save_timeout_s=1) as client:
        writer = CkptdWriter(client)
        node.kill()
        with pytest.raises(CheckpointException, match="ckptd"):
            dcp.save(state_of(1), storage_writer=writer)
        assert writer.handle.end == "failed"
        node.start()
        client._link._retry_at = 0.0
        dcp.save(state_of(2), storage_writer=writer)
        assert loaded(client)[0] == 2


def test_a_flipped_bit_in_memory_is_read_from_the_store_instead(node):
    with client_of(node) as client:
        writer = CkptdWriter(client, wait="durable")
        dcp.save(state_of(1), storage_writer=writer)
        slot = next(path for path in node.slots() if sealed(path))
        flip(slot)
        assert loaded(client) == (1, [1.0], "arena")
        flip(os.path.join(node.store, JOB, writer.handle.save_id.dirname, "r00000-p00.safetensors"))
        with pytest.raises(CheckpointException, match=r"r00000-p00.safetensors: block 0"):
            loaded(client)
        with pytest.raises(CheckpointException, match=r"r00000-p00.safetensors: block 0"):
            dcp.load(state_of(0), storage_reader=CkptdReader(os.path.join(node.store, JOB, "latest")))


def sealed(path):
    with open(path, "rb") as file:
        return b"digested" in file.read()[-8192:]


def test_what_waits_for_a_milestone_gets_it(node):
    with client_of(node, drain_every=1000) as client:
        for wait, reached in (("staged", "staged"), ("durable", "durable")):
            writer = CkptdWriter(client, wait=wait, drain=wait == "durable")
            dcp.save(state_of(1), storage_writer=writer)
            assert writer.handle.milestone in (reached, "durable")
        writer = CkptdWriter(client, wait=None)
        dcp.save(state_of(2), storage_writer=writer)
        wait_for(lambda: writer.handle.milestone is not None)


def test_wrong_arguments(node):
    with client_of(node) as client:
        with pytest.raises(CheckpointException, match="names no step"):
            dcp.save(state_of(1), storage_writer=CkptdWriter(client), checkpoint_id="final")
        with pytest.raises(UsageError, match="give one of them"):
            CkptdWriter(client, job="x")
        with pytest.raises(CheckpointException, match="nothing to read from"):
            dcp.load(state_of(1), storage_reader=CkptdReader())
        with pytest.raises(CheckpointException, match="no checkpoint to restore"):
            dcp.load(state_of(1), storage_reader=CkptdReader(client))
    writer = CkptdWriter(job="owned", store=node.store, arena=node.arena, start=False)
    dcp.save(state_of(1), storage_writer=writer, checkpoint_id="out/checkpoint-12")
    assert writer.handle.step == 12
    writer.close()
