"""Processes forked from a server that has torch, so that they start fast."""

import ctypes
import multiprocessing
import os
import signal

_PR_SET_PDEATHSIG = 1

context = multiprocessing.get_context("forkserver")
# Ours are imported by each process: the server does not look where the tests import from.
context.set_forkserver_preload(
    [
        "torch",
        "torch.distributed.checkpoint",
        "torch.distributed.checkpoint.state_dict",
        "torch.distributed.fsdp",
        "torch.distributed.tensor.parallel",
        "torch.utils.data",
        "msgspec",
        "msgpack",
        "numpy",
        "xxhash",
        "zmq",
    ]
)


def begin(variables: dict[str, str]) -> None:
    """To be called first by the process: it ends with its parent, and has these variables and no other of CKPTD_."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for name in [name for name in os.environ if name.startswith("CKPTD_")]:
        del os.environ[name]
    os.environ.update(variables)
