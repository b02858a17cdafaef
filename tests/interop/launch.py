"""Starts a script of this directory on several ranks."""

import os
import runpy
import sys
import time
import uuid
import warnings

from tests import forks
from tests.ports import free_port

HERE = os.path.dirname(__file__)
TIMEOUT_S = 200
_LONG_S = 0.05


def torchrun(node, ranks, script, *args):
    """What the script (a path) prints under torchrun, beside the node's daemon."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return node.complete(*launcher, script, *args, timeout_s=TIMEOUT_S, PYTHONWARNINGS="ignore")


def on_ranks(node, ranks, script, *args):
    """What the script (a name in this directory) prints where torchrun would run it. A rank that fails ends all."""
    return on_homes([node] * ranks, script, *args)


def on_nodes(nodes, ranks, script, *args):
    """The same with as many ranks on each node."""
    return on_homes([node for node in nodes for _ in range(ranks // len(nodes))], script, *args)


def on_homes(homes, script, *args):
    """The same with a rank on each of these nodes, in this order."""
    shared = {
        "WORLD_SIZE": str(len(homes)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "TORCHELASTIC_RUN_ID": uuid.uuid4().hex,
        "OMP_NUM_THREADS": "1",
    }
    path = os.path.join(homes[0].temporary, f"{shared['TORCHELASTIC_RUN_ID']}.log")
    begun = []
    for rank, home in enumerate(homes):
        here = {"LOCAL_WORLD_SIZE": str(homes.count(home)), "LOCAL_RANK": str(homes[:rank].count(home))}
        variables = home.environ(**shared, **here, RANK=str(rank))
        begun.append(forks.start(_run, variables, path, os.path.join(HERE, script), args))
    try:
        _await(begun, path)
    finally:
        for process in begun:
            process.kill()
            process.join()
    return _text(path)


def _await(processes, path):
    deadline = time.monotonic() + TIMEOUT_S
    while any(process.is_alive() for process in processes):
        failed = [process.exitcode for process in processes if process.exitcode]
        assert not failed, f"exit status {failed[0]}:\n{_text(path)}"
        assert time.monotonic() < deadline, f"not done in {TIMEOUT_S} s:\n{_text(path)}"
        time.sleep(_LONG_S)
    assert not any(process.exitcode for process in processes), _text(path)


def _text(path):
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()


def _run(variables, path, script, args):
    forks.begin(variables)
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    warnings.simplefilter("ignore")
    import torch  # noqa: PLC0415

    torch.set_num_threads(1)
    sys.argv = [script, *args]
    runpy.run_path(script, run_name="__main__")
    sys.stdout.flush()
