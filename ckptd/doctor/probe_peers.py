"""What `ckptd doctor` says about this node as others reach it: its address, its ports, its key file."""

import ipaddress
import os
import socket

from ckptd.doctor.network import interfaces, judge_network
from ckptd.doctor.rules import Finding, Verdict
from ckptd.peers.identity import find_host, node_name
from ckptd.peers.keys import read_keys
from ckptd.shared.base.errors import ConfigError
from ckptd.shared.files import locks
from ckptd.shared.format.arena_paths import LOCK
from ckptd.system.config import Config


def examine_peers(config: Config) -> list[Finding]:
    """Findings in reading order. Blocks for the resolver, up to 5 s. Binds ports for a moment, sends nothing."""
    findings = [_address(config)]
    ports = {"peer port": config.peer_port, "bulk port": config.bulk_port}
    if findings[0].verdict is not Verdict.BAD:
        findings += [_port(config, name, port) for name, port in ports.items() if port]
    if config.peer_port and not config.bulk_port:
        text = "any; redundancy fetches bytes over a second port, which a firewall may stop"
        findings.append(
            Finding("bulk port", Verdict.WARN, text, "set bulk_port too, and let other nodes through to it")
        )
    if config.peer_port and config.peer_port == config.bulk_port:
        findings[-1] = Finding("bulk port", Verdict.BAD, "the same as peer_port", "set bulk_port to another port")
    if not config.peer_port and not config.bulk_port:
        text = "any that is free; where a firewall stands between nodes, set peer_port and bulk_port"
        findings.append(Finding("ports", Verdict.OK, text))
    findings += _network(config)
    findings.append(_keys(config.key_file) if config.key_file else Finding("keys", Verdict.OK, "the arena's own"))
    return findings


def _address(config: Config) -> Finding:
    name, node = "peer address", config.node or node_name(socket.gethostname())
    try:
        host, problem = find_host(config.peer_address)
    except ConfigError as error:
        return Finding(name, Verdict.BAD, error.message, f"set peer_address to {error.hint}")
    if problem:
        fix = "set peer_address to an address or interface that other nodes reach; a job on one node needs none"
        return Finding(name, Verdict.WARN, problem.partition(": set ")[0], fix)
    return Finding(name, Verdict.OK, f"node {node} is reached at {host}")


def _network(config: Config) -> list[Finding]:
    """Nothing where the address is wrong, which is said, or leads to no other node, as that of loopback."""
    try:
        host, problem = find_host(config.peer_address)
    except ConfigError:
        return []
    return [] if problem or _is_loopback(host) else [judge_network(host, interfaces())]


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # an interface


def _port(config: Config, name: str, port: int) -> Finding:
    lock = os.path.join(config.arena, LOCK)
    if os.path.exists(lock) and locks.holder(lock) is not None:
        return Finding(name, Verdict.OK, f"{port}, of the daemon that runs")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            return Finding(
                name,
                Verdict.BAD,
                f"{port}: {error.strerror}",
                f"set {name.replace(' ', '_')} to a free port, or 0 for any",
            )
    return Finding(name, Verdict.OK, f"{port} is free; other nodes must be let through to it")


def _keys(path: str) -> Finding:
    try:
        keys = read_keys(path)
    except ConfigError as error:
        return Finding("keys", Verdict.BAD, error.message, error.hint)
    return Finding("keys", Verdict.OK, f"{path}, public key {keys.public}")
