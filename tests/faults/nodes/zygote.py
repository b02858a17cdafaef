"""A rank over there: obeys the calls that come over its socket. Forked from the server of tests/pythons.py."""

import ctypes
import importlib
import json
import os
import signal
import socket
import sys
import time
import traceback
from typing import Any

PACKET_NBYTES = 1 << 20
PROGRAM = "import torch; from tests.faults.nodes.zygote import main; main()"
_PR_SET_PDEATHSIG = 1
_IDLE_S = 0.02


def main() -> None:
    """``python -c PROGRAM FD ORDER``: calls come in JSON packets, until the socket is closed."""
    import torch  # noqa: PLC0415 - so that a reader of this module's names needs no torch

    torch.set_num_threads(1)
    orders, order = socket.socket(fileno=int(sys.argv[1])), json.loads(sys.argv[2])
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        module, _, kind = order["trainer"].partition(":")
        trainer = getattr(importlib.import_module(module), kind)
        _obey(trainer(order["rank"], order["world"], order["nbytes"], order["meeting"]), orders)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _obey(trainer: Any, orders: socket.socket) -> None:
    orders.settimeout(_IDLE_S)
    while True:
        try:
            said = orders.recv(PACKET_NBYTES)
        except TimeoutError:
            trainer.watch()
            continue
        if not said:
            os._exit(0)
        name, args, named = json.loads(said)
        began = time.monotonic()
        try:
            answer = [True, getattr(trainer, name)(*args, **named)]
        except Exception as error:
            answer = [False, [type(error).__name__, str(error)]]
        orders.send(json.dumps([*answer, time.monotonic() - began]).encode())
