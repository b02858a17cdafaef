import subprocess

import pytest

from tests.cluster import Node

_DROP = """
import gc, sys
import torch, ckptd_client

client = ckptd_client.connect(job="dropped")
client.save({"w": torch.ones(4)}, 0).wait("staged", 60)
del client
gc.collect()
print("went on", flush=True)
"""


@pytest.mark.faults
def test_a_client_that_is_dropped_without_close_holds_none_up(tmp_path):
    with Node(str(tmp_path)) as node:
        node.start()
        rank = node.run(_DROP)
        try:
            out, err = rank.communicate(timeout=120)
        except subprocess.TimeoutExpired:
            pytest.fail("the garbage collector waits for ever")
        assert out.split() == [b"went", b"on"], err
        assert rank.returncode == 0
