"""Starts a script of this directory on several ranks of a node, as torchrun would."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
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
    with contextlib.ExitStack() as stack:
        # Files, not pipes: a rank would wait for its full pipe to be read, and those that are read first for that rank.
        said = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(ranks)]
        for rank, file in enumerate(said):
            here = node.environ(**shared, RANK=str(rank), LOCAL_RANK=str(rank))
            begun.append(subprocess.Popen(command, env=here, stdout=file, stderr=subprocess.STDOUT))
        node.children += begun  # ended with the node if this test does not get to it
        for process in begun:
            process.wait(TIMEOUT_S)
        text = "\n".join(map(_content, said))
    expected = -signal.SIGKILL if killed else 0
    assert [process.returncode for process in begun] == [expected] * ranks, text
    return text


def _content(file):
    file.seek(0)
    return file.read()
