"""Starts a script of this directory on several ranks of a node, as torchrun would."""

import os
import signal
import subprocess
import sys
import uuid

from tests.interop.launch import free_port

HERE = os.path.dirname(__file__)
TIMEOUT_S = 240


def on_ranks(node, ranks, script, *args, killed=False, **environ):
    """What the ranks print. killed: each ends itself with SIGKILL, and none otherwise."""
    shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    shared |= {"LOCAL_WORLD_SIZE": str(ranks), "PYTHONWARNINGS": "ignore"}
    shared |= {"TORCHELASTIC_RUN_ID": uuid.uuid4().hex, "GROUP_RANK": "0"} | environ
    command = [sys.executable, os.path.join(HERE, script), *args]
    begun = []
    for rank in range(ranks):
        here = node.environ(**shared, RANK=str(rank), LOCAL_RANK=str(rank))
        begun.append(subprocess.Popen(command, env=here, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    node.children += begun  # ended with the node if this test does not get to it
    said = [process.communicate(timeout=TIMEOUT_S)[0] for process in begun]
    text = "\n".join(said)
    expected = -signal.SIGKILL if killed else 0
    assert [process.returncode for process in begun] == [expected] * ranks, text
    return text
