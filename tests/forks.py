"""Processes forked from a server that has torch and the client, so that they start fast."""

import ctypes
import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from typing import Any

from tests.cluster import CODE

_PR_SET_PDEATHSIG = 1

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(
    [
        "torch",
        "torch.distributed.checkpoint",
        "torch.distributed.checkpoint.state_dict",
        "torch.distributed.fsdp",
        "torch.distributed.tensor.parallel",
        "torch.utils.data",
        "msgpack",
        "numpy",
        "pytest",
        "ckptd_client",
        "ckptd_client.dcp",
    ]
)


def start(target: Callable[..., None], *args: Any) -> BaseProcess:
    """A process that runs target(*args). It should begin() first."""
    _ensure_server()
    process = context.Process(target=target, args=args)
    process.start()
    return process


def begin(variables: dict[str, str]) -> None:
    """To be called first by the process: it ends with its parent, and has these variables and no other of CKPTD_."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for name in [name for name in os.environ if name.startswith("CKPTD_")]:
        del os.environ[name]
    os.environ.update(variables)


def _ensure_server() -> None:
    """The server runs, and has the client of this tree: it looks where PYTHONPATH says, not where the tests look."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = CODE
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
