"""The interfaces of this node and which of them the daemon uses: is there a faster one? Facts, then the rule."""

import contextlib
import fcntl
import glob
import ipaddress
import os
import re
import socket
import struct

import msgspec

from ckptd.doctor.rules import Finding, Verdict

_SIOCGIFADDR = 0x8915  # <linux/sockios.h>
_ADDRESS_AT = 20  # in struct ifreq: the name, then a struct sockaddr_in up to its address
_IF_INET6 = "/proc/net/if_inet6"
_LOOPBACK_TYPE = "772"
_GIGABIT = 1000
_RATE_RE = re.compile(r"([0-9.]+) Gb/sec")


class Interface(msgspec.Struct, frozen=True, kw_only=True):
    """One that is up. mbit_s: None where the kernel does not say; addresses: as numbers."""

    name: str
    mbit_s: int | None
    addresses: tuple[str, ...]


def interfaces(sys_root: str = "/sys") -> list[Interface]:
    """All that are up and carry data of other nodes: real ones, and bonds of these; by name."""
    found = []
    base = os.path.join(sys_root, "class/net")
    for name in sorted(os.listdir(base)) if os.path.isdir(base) else []:
        at = os.path.join(base, name)
        real = os.path.exists(os.path.join(at, "device")) or os.path.isdir(os.path.join(at, "bonding"))
        up = _text(at, "operstate") in {"up", "unknown"} and _text(at, "type") != _LOOPBACK_TYPE
        if real and up:
            found.append(Interface(name=name, mbit_s=_mbit_s(at), addresses=addresses_of(name)))
    return found


def addresses_of(name: str) -> tuple[str, ...]:
    """Of an interface of this network namespace: its first IPv4 address, and those of IPv6 that others reach."""
    found = []
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        asked = struct.pack("256s", name.encode()[:15])
        answer = fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, asked)
        found.append(socket.inet_ntoa(answer[_ADDRESS_AT : _ADDRESS_AT + 4]))
    with contextlib.suppress(OSError), open(_IF_INET6, encoding="ascii") as file:
        for digits, *_, last in map(str.split, file):
            address = ipaddress.IPv6Address(bytes.fromhex(digits))
            if last == name and not address.is_link_local:
                found.append(str(address))
    return tuple(found)


def _text(at: str, name: str) -> str:
    with contextlib.suppress(OSError), open(os.path.join(at, name), encoding="ascii", errors="replace") as file:
        return file.read().strip()
    return ""


def _mbit_s(at: str) -> int | None:
    """The rate of the link. InfiniBand has its own place for it."""
    with contextlib.suppress(ValueError):
        if (speed := int(_text(at, "speed"))) > 0:
            return speed
    rates = [_text(port, "rate") for port in glob.glob(os.path.join(at, "device/infiniband/*/ports/*"))]
    known = [float(match[1]) for rate in rates if (match := _RATE_RE.match(rate))]
    return int(max(known) * _GIGABIT) if known else None


def judge_network(host: str, found: list[Interface]) -> Finding:
    """host: an address or an interface, as the daemon binds."""
    name = "network"
    used = next((one for one in found if host == one.name or _is_of(host, one)), None)
    if used is None or used.mbit_s is None:
        why = f"{used.name} does not say its speed" if used is not None else f"{host} is of no interface that is known"
        return Finding(name, Verdict.OK, why)
    others = [one for one in found if one.addresses and one.mbit_s is not None and one.mbit_s > used.mbit_s]
    if not others:
        return Finding(name, Verdict.OK, f"{used.name}, {_speed(used.mbit_s)}: no faster interface is up")
    fastest = max(others, key=lambda one: (one.mbit_s or 0, one.name))
    detail = (
        f"peers use {used.name} ({_speed(used.mbit_s)}), and {fastest.name} is up with {_speed(fastest.mbit_s or 0)}"
    )
    fix = f"CKPTD_PEER_ADDRESS={fastest.name} on all nodes, if they reach each other there; then restart the daemon"
    return Finding(name, Verdict.WARN, detail, fix)


def _is_of(host: str, one: Interface) -> bool:
    try:
        return ipaddress.ip_address(host) in {ipaddress.ip_address(address) for address in one.addresses}
    except ValueError:
        return False


def _speed(mbit_s: int) -> str:
    return f"{mbit_s / _GIGABIT:g} Gbit/s"
