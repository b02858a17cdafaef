"""A process that has imported torch and the client, and forks ranks from then on: each is there within a moment.

python zygote.py FD          FD: a SEQPACKET socket. An order comes with the rank's socket; the answer is its pid.
"""

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
_PR_SET_PDEATHSIG = 1
_IDLE_S = 0.02
_READY = b"ready"


def serve(control: socket.socket) -> None:
    """Forks a rank per order, until the test ends."""
    import torch  # noqa: PLC0415 - so that a reader of this module's names needs no torch
    import torch.distributed  # noqa: PLC0415

    import ckptd_client  # noqa: F401, PLC0415
    from tests.faults.nodes import trainer  # noqa: F401, PLC0415

    torch.set_num_threads(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _die_with_parent()
    control.send(_READY)
    while True:
        data, fds, _, _ = socket.recv_fds(control, PACKET_NBYTES, 1)
        if not data:
            os._exit(0)
        pid = os.fork()
        if pid == 0:
            control.close()
            _be_a_rank(json.loads(data), socket.socket(fileno=fds[0]))
        os.close(fds[0])
        control.send(str(pid).encode())


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _be_a_rank(order: dict[str, Any], orders: socket.socket) -> None:
    """Obeys calls, one JSON packet each, until the socket is closed."""
    try:
        _die_with_parent()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for name in [name for name in os.environ if name.startswith("CKPTD_")]:
            del os.environ[name]
        os.environ.update(order["environ"])
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


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
