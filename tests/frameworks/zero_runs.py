"""Starts trainings under DeepSpeed that leave a checkpoint, `expected.safetensors` and `16bit.pt` behind."""

import json
import os
import socket
import subprocess
import sys

SCRIPT = os.path.join(os.path.dirname(__file__), "zero_ranks.py")
TIMEOUT_S = 300


def train(out, ranks, stage, dtype, **more):
    """Leaves a checkpoint in out. more: of DeepSpeed's configuration. A rank that fails is raised with its words."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    begun = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", SCRIPT, str(out), str(stage), dtype, json.dumps(more)],
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        for process in begun:
            told, _ = process.communicate(timeout=TIMEOUT_S)
            assert process.returncode == 0, told[-4000:]
    finally:
        for process in begun:
            process.kill()
            process.wait()
    return out
