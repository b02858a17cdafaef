"""Starts ranks: trainings under DeepSpeed that leave a checkpoint behind, and programs that read one."""

import json
import os

from safetensors.torch import load_file, save_file

from tests.frameworks.launch import HERE, run

EXPECTED = "expected.safetensors"
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
    environ = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join((ROOT, os.path.join(ROOT, "client")))}
    said, ends = run(ranks, script, args, environ, TIMEOUT_S)
    failed = [text[-4000:] for text, end in zip(said, ends, strict=True) if end]
    assert not failed, failed[0]
    return said[0]
