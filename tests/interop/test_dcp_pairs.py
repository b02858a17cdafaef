"""A stager beside a writer that is not its own: nothing live is written, and no slot stays behind."""

import gc

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import ckptd_client
from ckptd_client.dcp import CkptdReader, CkptdStager, CkptdWriter
from tests.interop.clients import client_of

pytestmark = [pytest.mark.faults, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]


@pytest.fixture
def node(fresh_node):
    return fresh_node


@pytest.fixture
def client(node):
    with client_of(node, save_timeout_s=3) as client:
        yield client


def state_of(seed):
    return {"w": torch.full((100, 7), float(seed)), "deep": {"n": seed, "v": torch.arange(5) + seed}}


def ended_well(handle):
    assert handle.wait("staged", 60)
    return handle.milestone in {"staged", "durable"}


def test_a_stager_of_another_writer_is_refused_and_keeps_no_slot(client):
    stager_of, writer = CkptdWriter(client), CkptdWriter(client)
    for seed in range(8):
        with pytest.raises(CheckpointException, match=r"belongs to another writer(.|\n)*CkptdStager\(writer\)"):
            dcp.async_save(state_of(seed), storage_writer=writer, async_stager=CkptdStager(stager_of)).result()
    assert ended_well(client.save(state_of(9), 50))
    dcp.async_save(state_of(10), storage_writer=writer, async_stager=CkptdStager(writer)).result()
    assert ended_well(writer.handle)
    dcp.save(state_of(11), storage_writer=stager_of)
    assert ended_well(stager_of.handle)


def test_a_kept_stager_serves_a_file_writer_and_keeps_no_slot(client, tmp_path):
    writer = CkptdWriter(client)
    stager = CkptdStager(writer)
    for seed in range(8):
        files = dcp.FileSystemWriter(tmp_path / f"files-{seed}")
        dcp.async_save(state_of(seed), storage_writer=files, async_stager=stager).result()
        found = state_of(100)
        dcp.load(found, checkpoint_id=tmp_path / f"files-{seed}")
        assert torch.equal(found["w"], state_of(seed)["w"])
    assert ended_well(client.save(state_of(9), 50))
    dcp.async_save(state_of(10), storage_writer=writer, async_stager=stager).result()
    found = state_of(0)
    dcp.load(found, storage_reader=CkptdReader(client))
    assert found["deep"]["n"] == 10


def test_a_state_that_another_process_still_holds_keeps_its_slot_and_the_error_says_so(client):
    stager = CkptdStager(CkptdWriter(client))
    held = [stager.stage(state_of(seed)) for seed in range(3)]
    handle = client.save(state_of(9), 50)
    with pytest.raises(ckptd_client.SaveFailedError, match=r"3 (.|\n)*staged and not yet written"):
        handle.wait("staged", 60)
    assert [state["deep"]["v"][0].item() for state in held] == [0, 1, 2]
    del held
    assert ended_well(client.save(state_of(9), 51))


def test_a_state_that_is_released_gives_its_slot_back_without_a_collection_of_garbage(client):
    """A collection takes a large process seconds, of the save's timeout."""
    collected = []

    def note(phase, facts):
        if phase == "start":
            collected.append(facts["generation"])

    stager = CkptdStager(CkptdWriter(client))
    held = [stager.stage(state_of(seed)) for seed in range(3)]
    gc.disable()
    try:
        del held
        gc.callbacks.append(note)
        assert ended_well(client.save(state_of(9), 50))
        assert collected == []
        held = [stager.stage(state_of(seed)) for seed in range(2)]  # the third slot keeps the save
        cycle = [held]
        cycle.append(cycle)
        del held, cycle
        collected.clear()
        assert ended_well(client.save(state_of(9), 51))
        assert collected == [1]
    finally:
        gc.callbacks.remove(note)
        gc.enable()


def test_a_state_that_could_not_be_staged_is_written_by_none(node, client, tmp_path):
    """A writer of files knows nothing of the stager's error: it must not be given the live state."""
    stager = CkptdStager(CkptdWriter(client))
    node.kill()
    live = state_of(1)
    made = stager.stage(live)
    assert not set(live) & set(made)
    with pytest.raises(CheckpointException, match="ckptd"):
        dcp.save(made, storage_writer=dcp.FileSystemWriter(tmp_path / "files"))
    assert not (tmp_path / "files" / ".metadata").exists()
    with pytest.raises(CheckpointException, match="ckptd"):
        dcp.async_save(live, storage_writer=dcp.FileSystemWriter(tmp_path / "more"), async_stager=stager).result()
