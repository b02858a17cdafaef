"""Whether the daemons of a job can reach each other, as far as their addresses show. Pure."""

import ipaddress
from collections.abc import Sequence

from ckptd.shared.base.errors import ConfigError
from ckptd.shared.protocol.topology import Peer

_HINT = "set peer_address (CKPTD_PEER_ADDRESS) of that node's daemon to its address in the cluster's network"
_NAMED = ipaddress.ip_address("192.0.2.1")  # in place of any name but localhost: the peer that connects resolves it
_LOCAL = ipaddress.ip_address("127.0.0.1")


def check_endpoints(peers: Sequence[Peer], hosts: Sequence[str]) -> None:
    """Raises ConfigError for a daemon that others cannot reach. hosts: of the peers. A lone node needs no address."""
    if len(peers) == 1:
        return
    seen: dict[str, str] = {}
    several = len(set(hosts)) > 1
    for peer, host in zip(peers, hosts, strict=True):
        address = _address(peer.endpoint)
        who = f"the daemon of node {peer.node!r}"
        if address is None or address.is_unspecified:
            shown = peer.endpoint or "nowhere"
            raise ConfigError(f"{who} is reached at {shown} by the job's other nodes", hint=_HINT)
        if several and address.is_loopback:
            stranger = next(other for other in hosts if other != host)
            text = f"{who} is reached at {peer.endpoint}, which leads from host {stranger} to {stranger} itself"
            raise ConfigError(text, hint=_HINT)
        twin = seen.setdefault(peer.endpoint, peer.node)
        if twin != peer.node:
            raise ConfigError(f"{who} and that of {twin!r} are both reached at {peer.endpoint}", hint=_HINT)


def host_of(endpoint: str) -> str:
    """The host in an endpoint; empty without one."""
    return endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")


def _address(endpoint: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    host = host_of(endpoint)
    if not host:
        return None
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return _LOCAL if host == "localhost" or host.endswith(".localhost") else _NAMED
