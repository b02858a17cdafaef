"""What makes saves less safe, or of less use, than they look: told once, by rank 0 and in the status."""

import itertools
import logging
import os
import re
import sys
import time

import pytest
import torch

from tests.cluster import CODE, Node, wait_for


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
    client.save({"w": torch.ones(2)}, 1).wait("durable", 60)
    client.load({"w": torch.ones(2)})
    assert len(told("protects nothing")) == 1


def test_a_daemon_that_is_configured_so(join, told, tmp_path):
    with Node(str(tmp_path)) as node:
        node.start(CKPTD_REDUNDANCY="double")
        join(on=node).close()
    assert len(told("redundancy double protects nothing")) == 1


@pytest.mark.parametrize("how", [{}, {"redundancy": "none"}], ids=["default", "none"])
def test_a_redundancy_that_none_asked_for(join, node, job, told, how):
    join(**how)
    wait_for(lambda: node.job(job))
    assert told("protects nothing") == []
    assert node.job(job).degraded == []


def test_a_store_that_is_slower_than_the_saves(join, job, told, tmp_path):
    with Node(str(tmp_path)) as node:
        node.start(CKPTD_DRAIN_BANDWIDTH=str(1 << 20))
        client = join(on=node)
        state, deadline = {"w": torch.zeros(1 << 18)}, time.monotonic() + 30  # a second of the store's each
        for step in itertools.count(1):
            client.save(state, step)
            time.sleep(0.2)
            if told("slower than the saves"):
                break
            assert time.monotonic() < deadline
        for more in range(step + 1, step + 10):
            client.save(state, more)
            time.sleep(0.2)
        (text,) = told("slower than the saves")
        measured = re.search(
            r"a drain takes (?:more than )?([0-9.]+) s, a save that is due comes every ([0-9.]+) s", text
        )
        assert 0.7 < float(measured[1]) < 15, text
        assert 0.15 < float(measured[2]) < float(measured[1]), text
        assert re.search(r"connect\(drain_every='[0-9]+s'\)", text)
        assert [text.removeprefix("ckptd: ")] == [e for e in node.job(job).errors if "slower" in e]
        shown = " ".join(node.complete(sys.executable, "-m", "ckptd", "status", timeout_s=30).split())
        assert re.search(r"the store takes \S+ per save, you save each \S+: [0-9]+ saves never became durable", shown)
        assert "the store is slower than the saves: a drain takes" not in shown, "said twice"
        client.close()


def test_left_out_metadata_is_reported_though_training_calls_nothing(join, job, told, tmp_path):
    """Of a worker that takes three boxes for many."""
    (tmp_path / "store").mkdir()
    (tmp_path / "sitecustomize.py").write_text(
        "import ckptd.shared.torchfile.dcp_metadata as made\nmade.MAX_BOXES = 3\n"
    )
    with Node(str(tmp_path / "store")) as node:
        node.start(PYTHONPATH=os.pathsep.join((str(tmp_path), CODE)))
        client = join(on=node)
        client.save({f"w{i}": torch.ones(2) for i in range(4)}, 1)
        began = time.monotonic()
        wait_for(lambda: told("has no .metadata"))
        assert time.monotonic() - began < 5, "within seconds"
        client.save({f"w{i}": torch.ones(2) for i in range(4)}, 2).wait("durable", 60)
        (text,) = told("has no .metadata")
        assert "step 1 has no .metadata: its tensors are in more than 3 boxes; plain dcp.load" in text
        assert [text.removeprefix("ckptd: ")] == [e for e in node.job(job).errors if ".metadata" in e]
        (final,) = [entry for entry in os.scandir(tmp_path / "store" / job) if entry.name.startswith("step-000000001")]
        assert ".metadata" not in os.listdir(final.path)
        client.close()
