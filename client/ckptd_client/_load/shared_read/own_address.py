"""Where other nodes of a load reach this one, when no daemon knows it."""

import fcntl
import ipaddress
import logging
import os
import socket
from typing import Final

from ckptd.shared.base.errors import ConfigError
from ckptd.shared.bulk.own_host import RESOLVE_S, resolve, told_host

log = logging.getLogger("ckptd_client")
_SIOCGIFADDR: Final = 0x8915
_ADDRESS: Final = "CKPTD_PEER_ADDRESS"
_OFF: Final = "off"  # no port


def own_address() -> str:
    """This node's address for others: CKPTD_PEER_ADDRESS, else the one towards MASTER_ADDR. Empty: none, or "off".

    Blocks for the resolver, up to 5 s; nothing is sent. One that others cannot use is logged by a node's first rank.
    """
    said, master = os.environ.get(_ADDRESS, ""), os.environ.get("MASTER_ADDR", "")
    if said == _OFF or not (said or master):
        return ""
    try:
        return _told(said) if said else _towards(master)
    except (ConfigError, OSError) as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            text = "ckptd: warning: this node reads without other nodes: %s; set %s to %s, or to off"
            log.warning(text, str(error).partition("\n")[0], _ADDRESS, "an address of this node, or an interface")
        return ""


def _told(said: str) -> str:
    host = told_host(said, _ADDRESS)
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return _address_of(host)


def _towards(master: str) -> str:
    address = resolve(master, RESOLVE_S)
    if address is None:
        raise ConfigError(f"MASTER_ADDR = {master!r} cannot be resolved")
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as towards:
        towards.connect((address, 9))
        return str(towards.getsockname()[0])


def _address_of(interface: str) -> str:
    """Its IPv4 address. Raises ConfigError where it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, interface.encode().ljust(40, b"\0"))
        except OSError as error:
            raise ConfigError(f"{_ADDRESS} = {interface!r} has no IPv4 address: {error.strerror}") from None
    return socket.inet_ntoa(answer[20:24])
