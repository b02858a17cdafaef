"""Starts a script of this directory on several ranks."""

import os
import sys

HERE = os.path.dirname(__file__)


def torchrun(node, ranks, script, *args):
    """What the script (a name in this directory, or a path) prints under torchrun, beside the node's daemon."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return node.complete(*launcher, os.path.join(HERE, script), *args, timeout_s=200, PYTHONWARNINGS="ignore")
