"""Ports that are free, and stay so until a process of a test listens at them."""

import errno
import itertools
import os
import random
import re
import socket

_FIRST, _STOP = 10_000, 32_768  # below those that the kernel gives to connections and to port 0
_WORKERS = 8  # of pytest, each of which has a part of its own
_PART = (_STOP - _FIRST) // _WORKERS


def _ports():
    worker = int(re.sub(r"\D", "", os.environ.get("PYTEST_XDIST_WORKER", "")) or 0) % _WORKERS
    begin = random.SystemRandom().randrange(_PART)  # processes of one worker do not begin alike
    for number in itertools.count(begin):
        yield _FIRST + worker * _PART + number % _PART


_candidates = _ports()


def free_port() -> int:
    """A port at which no process listens on 127.0.0.1, and which the kernel gives to no connection."""
    while True:
        port = next(_candidates)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                continue
            return port


def free_ports(count: int) -> list[int]:
    """As many different ones."""
    return [free_port() for _ in range(count)]
