"""Starts a script of this directory on several ranks of a node, as torchrun would."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import uuid

from tests.ports import free_port

HERE = os.path.dirname(__file__)
TIMEOUT_S = 240


def on_ranks(node, ranks, script, *args, killed=False, **environ):
    """What the ranks print. killed: each ends itself with SIGKILL, and none otherwise."""
    shared = {"TORCHELASTIC_RUN_ID": uuid.uuid4().hex, "GROUP_RANK": "0"} | environ
    said, ends = run(ranks, script, args, node.environ(**shared))
    text = "\n".join(said)
    assert ends == [-signal.SIGKILL if killed else 0] * ranks, text
    return text


def run(ranks, script, args, environ, timeout_s=TIMEOUT_S):
    """What each rank prints, and how each has ended. None outlives it."""
    shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    shared |= {"LOCAL_WORLD_SIZE": str(ranks), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, os.path.join(HERE, script), *map(str, args)]
    with contextlib.ExitStack() as stack:
        # Files, not pipes: a rank would wait for its full pipe to be read, and those that are read first for that rank.
        said = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(ranks)]
        begun = []
        for rank, file in enumerate(said):
            own = environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            begun.append(subprocess.Popen(command, env=own, stdout=file, stderr=subprocess.STDOUT))
            stack.callback(_end, begun[-1])
        for process in begun:
            process.wait(timeout_s)
        return [_content(file) for file in said], [process.returncode for process in begun]


def _end(process):
    process.kill()
    process.wait()


def _content(file):
    file.seek(0)
    return file.read()
