"""What each rank of test_together.py runs: a checkpoint of replicas, read from the store by all ranks of a node.

together_ranks.py save    a durable checkpoint that replicas saved in slices
together_ranks.py load    what the ranks read of the store, printed; the state compared to the bit
together_ranks.py read_from    the same with load_from
together_ranks.py dcp    the same with DCP's reader
together_ranks.py dcp_path    the same with DCP's reader of the directory, without a client
together_ranks.py late    the same, and rank 1 comes after the others have given it up
together_ranks.py lost    the same, and rank 1 is killed when the others wait for its blocks
"""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import load as load_dcp

import ckptd_client
from ckptd_client._load.shared_read import meeting, node_group
from ckptd_client.dcp import CkptdReader
from tests.unit.client.same import difference

ELEMENTS = 24 << 20  # 96 MiB: six blocks of a file alone, so more than one from each rank

SAVED = 4  # ranks


def state():
    values = torch.arange(ELEMENTS, dtype=torch.float32)
    return {"w": values.view(-1, 256), "rank": torch.tensor(dist.get_rank())}


def connect():
    return ckptd_client.connect("together", start=False, replicated=["w"])


def save():
    with connect() as client:
        client.save(state(), 1)
        client.wait("durable", 60)


def read_nbytes():
    with open("/proc/self/io", encoding="ascii") as file:
        return int(file.readline().split()[1])


def load(before=lambda: None):
    expected, found = state(), {"w": torch.zeros(ELEMENTS // 256, 256), "rank": torch.tensor(-1)}
    if dist.get_rank() >= SAVED:
        expected["rank"] = torch.tensor(0)  # of the lowest that saved
    client = connect()
    before()
    start = read_nbytes()
    restored = client.load(found)
    print(f"read {read_nbytes() - start} bytes")
    assert restored.tier == "pfs", restored
    assert not difference(expected, found), difference(expected, found)
    client.close()


def read_from():
    """Not through the daemons; state: as if another job's."""
    expected, found = state(), {"w": torch.zeros(ELEMENTS // 256, 256)}
    with connect() as client:
        start = read_nbytes()
        client.load_from(f"{os.environ['CKPTD_STORE']}/together/latest", found, together=True)
        print(f"read {read_nbytes() - start} bytes")
        assert not difference({"w": expected["w"]}, found)


def dcp():
    """By DCP's reader."""
    expected, found = state(), {"w": torch.zeros(ELEMENTS // 256, 256)}
    with connect() as client:
        start = read_nbytes()
        reader = CkptdReader(client)
        load_dcp(found, storage_reader=reader)
        print(f"read {read_nbytes() - start} bytes")
        assert reader.tier == "pfs", reader.tier
        assert not difference({"w": expected["w"]}, found)


def dcp_path():
    """By DCP's reader of a directory: nothing but torch.distributed brings the ranks together."""
    expected, found = state(), {"w": torch.zeros(ELEMENTS // 256, 256)}
    start = read_nbytes()
    load_dcp(found, storage_reader=CkptdReader(f"{os.environ['CKPTD_STORE']}/together/latest"))
    print(f"read {read_nbytes() - start} bytes")
    assert not difference({"w": expected["w"]}, found)


def late():
    def dawdle():
        if dist.get_rank() == 1:
            real = meeting.NodeReaders.enter
            meeting.NodeReaders.enter = lambda *words: (time.sleep(2), real(*words))[1]
        node_group._JOIN_S = 1.0

    load(dawdle)


def lost():
    def die(*_):
        os.kill(os.getpid(), signal.SIGKILL)

    def before():
        node_group._PATIENCE_S = 2.0
        if dist.get_rank() == 1:
            node_group.NodeGroup.fill = die

    found = {"w": torch.zeros(ELEMENTS // 256, 256), "rank": torch.tensor(-1)}
    client = connect()
    before()
    try:
        client.load(found)
    except ckptd_client.CkptdError as error:
        print(f"told: {error}")
    print(f"equal {bool(torch.equal(state()['w'], found['w']))}", flush=True)
    os._exit(0)  # gloo would wait for the rank that is gone


if __name__ == "__main__":
    dist.init_process_group("gloo")
    globals()[sys.argv[1]]()
    dist.barrier()
    dist.destroy_process_group()
