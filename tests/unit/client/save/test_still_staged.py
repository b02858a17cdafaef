"""Whether what a save staged is still what there is, byte by byte: also what no version of a tensor counts."""

import pytest
import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.state_dict_saver import save

from ckptd_client._save.unchanged import is_still
from ckptd_client.client import staging_of
from ckptd_client.dcp import CkptdSavePlanner, CkptdWriter
from ckptd_client.files import TorchFile


def state():
    return {
        "model": {"w": torch.arange(12.0).view(3, 4).T, "half": torch.ones(3, dtype=torch.bfloat16)},
        "step": torch.tensor(3),
        "groups": [{"lr": 0.5, "betas": (0.9, 0.99)}],
    }


CHANGES = {
    "a byte, uncounted": lambda s: s["model"]["w"].data[0].copy_(torch.tensor([7.0, 8.0, 9.0])),
    "a scalar": lambda s: s["step"].add_(1),
    "a plain value": lambda s: s["groups"][0].update(lr=0.25),
    "one more": lambda s: s.update(more=1),
    "one less": lambda s: s["model"].pop("half"),
    "another shape": lambda s: s["model"].update(half=torch.ones(1, 3, dtype=torch.bfloat16)),
    "another dtype": lambda s: s["model"].update(half=torch.ones(3, dtype=torch.float16)),
    "a tensor made plain": lambda s: s.update(step=3),
}


@pytest.fixture
def staged(lone_group, join):
    """A client, the handle of a state's save, and the state."""
    client, kept = join(drain_every=1000), state()
    return client, saved(CkptdWriter(client), kept, 1), kept


def saved(writer, kept, step):
    save(kept, checkpoint_id=str(step), storage_writer=writer, planner=CkptdSavePlanner())
    return writer.handle.wait("staged")


def test_the_same_state_is_still_staged(staged):
    client, handle, kept = staged
    staging = staging_of(client)
    assert is_still(staging, handle.save_id, flatten_state_dict(kept)[0])
    assert is_still(staging, handle.save_id, flatten_state_dict(state())[0]), "its bytes count, not its tensors"


@pytest.mark.parametrize("what", CHANGES)
def test_what_changed_is_not(staged, what):
    client, handle, kept = staged
    CHANGES[what](kept)
    assert not is_still(staging_of(client), handle.save_id, flatten_state_dict(kept)[0])


def test_nothing_is_when_the_slot_is_another_saves(staged):
    client, handle, kept = staged
    for step in range(2, 100):  # which free slot a save takes is its client's affair
        saved(CkptdWriter(client), kept, step)
        if not is_still(staging_of(client), handle.save_id, flatten_state_dict(kept)[0]):
            return
    pytest.fail("98 saves have taken another slot than the first one's")


def test_files_are_compared_byte_by_byte(join):
    client, weights = join(), torch.arange(6.0)
    handle = client.save_files({"a.pt": TorchFile({"w": weights}), "b": b"text"}, 1)
    assert client.are_still(handle, {"a.pt": TorchFile({"w": torch.arange(6.0)})})
    assert not client.are_still(handle, {"a.pt": TorchFile({"w": weights}), "b": b"test"})
    assert not client.are_still(handle, {"c": b"text"})
    weights.data[3] = 0.0
    assert not client.are_still(handle, {"a.pt": TorchFile({"w": weights})})
