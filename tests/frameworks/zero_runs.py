"""Starts ranks: trainings under DeepSpeed that leave a checkpoint behind, and programs that read one."""

import json
import os
import socket
import subprocess
import sys

from safetensors.torch import load_file, save_file

EXPECTED = "expected.safetensors"
HERE = os.path.dirname(__file__)
ROOT = os.path.dirname(os.path.dirname(HERE))
TIMEOUT_S = 300


def train(out, ranks, stage, dtype, **more):
    """Leaves a checkpoint in out, beside it expected.safetensors and 16bit.pt. more: of DeepSpeed's configuration."""
    on_ranks(ranks, "zero_ranks.py", out, stage, dtype, json.dumps(more))
    return out


def train_pipeline(out):
    """The same of four ranks, two for each stage of a pipeline; no 16bit.pt."""
    on_ranks(4, "pipe_ranks.py", out)
    parts = [os.path.join(out, f"expected-{stage}.safetensors") for stage in ("last", "first")]
    save_file({name: t for part in parts for name, t in load_file(part).items()}, os.path.join(out, EXPECTED))
    for part in parts:
        os.unlink(part)
    return out


def on_ranks(ranks, script, *args):
    """What rank 0 prints. A rank that fails is raised with its words."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    shared["PYTHONPATH"] = os.pathsep.join((ROOT, os.path.join(ROOT, "client")))
    begun = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", os.path.join(HERE, script), *map(str, args)],
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        told = [process.communicate(timeout=TIMEOUT_S)[0] for process in begun]
    finally:
        for process in begun:
            process.kill()
            process.wait()
    failed = [text[-4000:] for process, text in zip(begun, told, strict=True) if process.returncode]
    assert not failed, failed[0]
    return told[0]
