"""Where a user says that this node is reached: one rule for the daemon's setting and for the client's variable."""

import contextlib
import ipaddress
import socket
import threading
from typing import Final

from ckptd.shared.base.errors import ConfigError

RESOLVE_S: Final = 5.0
_HINT: Final = "a host name or address of this node, or an interface such as ib0"


def told_host(said: str, name: str) -> str:
    """The number of a host, or an interface of this node. name: of the setting. Blocks for the resolver, up to 5 s.

    Raises ConfigError for what means nothing here.
    """
    if said in {interface for _, interface in socket.if_nameindex()}:
        return said
    address = resolve(said, RESOLVE_S)
    if address is None:
        raise ConfigError(f"{name} = {said!r} cannot be resolved", hint=_HINT)
    if ipaddress.ip_address(address).is_unspecified:
        raise ConfigError(f"{name} = {said!r} is no address that others could connect to", hint=_HINT)
    return address


def resolve(name: str, seconds: float) -> str | None:
    """The name's first address, IPv4 before IPv6; None when there is none in time: a resolver cannot be broken off."""
    found: list[str] = []

    def ask() -> None:
        with contextlib.suppress(OSError, UnicodeError):
            answers = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
            answers.sort(key=lambda answer: answer[0] != socket.AF_INET)
            found.extend(str(a[4][0]) for a in answers if "%" not in str(a[4][0]))  # none that needs an interface

    thread = threading.Thread(target=ask, name="resolve", daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else None
