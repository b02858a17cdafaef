"""What makes saves less safe, or of less use, than they look: told once, by rank 0 and in the status."""

import logging

import pytest
import torch

from tests.cluster import Node, wait_for


@pytest.fixture(name="told")
def fixture_told(caplog):
    """What the client library warned of since, as far as it has this in it."""
    caplog.set_level(logging.WARNING, "ckptd_client")
    return lambda text: [record.getMessage() for record in caplog.records if text in record.getMessage()]


@pytest.mark.parametrize("scheme", ["xor", "double"])
def test_a_redundancy_that_protects_nothing(join, node, job, told, scheme):
    nodes = {"xor": "2 nodes", "double": "3 nodes"}[scheme]
    client = join(redundancy=scheme)
    (text,) = told("protects nothing")
    assert f"redundancy {scheme} protects nothing: all ranks run on one node" in text
    assert f"run the job on {nodes} or more, or connect(redundancy='none')" in text
    assert node.job(job).degraded == [text.removeprefix("ckptd: ")]
    client.save({"w": torch.ones(2)}, 1).wait("durable", 20)
    client.load({"w": torch.ones(2)})
    assert len(told("protects nothing")) == 1


def test_a_daemon_that_is_configured_so(join, told, tmp_path):
    with Node(str(tmp_path)) as node:
        node.start(CKPTD_REDUNDANCY="double")
        join(on=node).close()
    assert len(told("redundancy double protects nothing")) == 1


@pytest.mark.parametrize("how", [{}, {"redundancy": "none"}], ids=["default", "none"])
def test_a_redundancy_that_nobody_asked_for(join, node, job, told, how):
    join(**how)
    wait_for(lambda: node.job(job))
    assert told("protects nothing") == []
    assert node.job(job).degraded == []
