"""A writer of DCP's that is given a path, as DCP's own is: store and job in one."""

import os

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from ckptd_client import UsageError
from ckptd_client.dcp import CkptdReader, CkptdSavePlanner, CkptdWriter


def test_a_path_is_store_and_job(lone_group, node, job):
    path = os.path.join(node.store, job)
    writer = CkptdWriter(path, wait="durable", arena=node.arena, start=False)
    try:
        save(
            {"w": torch.arange(5.0)}, checkpoint_id=f"{path}/step-7", storage_writer=writer, planner=CkptdSavePlanner()
        )
    finally:
        writer.close()
    assert (writer.client.job, writer.handle.step) == (job, 7)
    found = {"w": torch.zeros(5)}
    load(found, storage_reader=CkptdReader(os.path.join(path, "latest")))
    assert torch.equal(found["w"], torch.arange(5.0))


@pytest.mark.parametrize(
    ("path", "settings", "text"),
    [
        ("/", {}, "STORE/JOB"),
        ("", {}, "STORE/JOB"),
        ("/a/b", {"job": "c"}, "names both"),
        (7, {}, "or a path, not int"),
    ],
)
def test_what_is_no_jobs_directory_is_refused(path, settings, text):
    with pytest.raises(UsageError, match=text):
        CkptdWriter(path, **settings)
