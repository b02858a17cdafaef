"""Ports that nobody has."""

import contextlib
import socket


def free_ports(count: int) -> list[int]:
    """As many different ports of 127.0.0.1; somebody quick may still take one."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [probe.getsockname()[1] for probe in probes]
