"""Starts a script of this directory on several ranks."""

import os
import subprocess
import sys

from tests.cluster import ROOT

HERE = os.path.dirname(__file__)


def torchrun(node, ranks, script, *args):
    """What the script (a name in this directory, or a path) prints under torchrun, beside the node's daemon."""
    path = os.path.join(HERE, script)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), path, *args],
        env=node.environ(PYTHONWARNINGS="ignore"),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
