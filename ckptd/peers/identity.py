"""Who this daemon is to others: node name, the keys and number of its arena, where it can be reached."""

import ipaddress
import logging
import os
import re
import secrets
import socket
from dataclasses import dataclass
from typing import Annotated

import msgspec

from ckptd.peers.keys import KeyPair, fits, make_keys, read_keys
from ckptd.shared.base.ids import Session
from ckptd.shared.base.log_line import line
from ckptd.shared.bulk.own_host import resolve, told_host
from ckptd.shared.files.records import put_record, record_at
from ckptd.shared.format.arena_paths import IDENTITY
from ckptd.system.config import Config

log = logging.getLogger("ckptd")
LOOPBACK = "127.0.0.1"
_RESOLVE_S = 0.3  # a daemon is ready within half a second, whatever the resolver does
_MAX_NODE_CHARS = 255
_MAX_NBYTES = 4096


class _Record(msgspec.Struct, frozen=True):
    """The file in the arena. It goes with the memory: a node that lost it comes back as another one."""

    arena: Session
    keys: KeyPair
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0


@dataclass(frozen=True, slots=True)
class Identity:
    """What the plane is started with. ``host``: address or interface to bind; ``problem``: why it may be the wrong one.

    ``port`` 0 is any; ``kept_port``: the one that an earlier daemon of this arena had.
    """

    node: str
    domain: str
    arena: str
    keys: KeyPair
    host: str
    port: int
    kept_port: int
    path: str
    problem: str = ""

    def keep_port(self, port: int) -> None:
        """Notes the port for the next daemon of this arena, which its peers then find by themselves.

        A failure is logged.
        """
        if port != self.kept_port:
            try:
                put_record(os.path.dirname(self.path), self.path, _Record(self.arena, self.keys, port))
            except OSError as error:
                log.warning(line("port could not be kept", port=port, path=self.path, error=error))


def identify(config: Config) -> Identity:
    """This daemon. Makes what its arena lacks of it. Raises ConfigError for settings that cannot be."""
    path = os.path.join(config.arena, IDENTITY)
    record = _read(path)
    keys = read_keys(config.key_file) if config.key_file else None
    if record is None or (keys is not None and record.keys != keys):
        record = _Record(record.arena if record else secrets.token_hex(8), keys or make_keys())
        put_record(config.arena, path, record)
    host, problem = find_host(config.peer_address)
    return Identity(
        node=config.node or node_name(socket.gethostname()),
        domain=config.domain,
        arena=record.arena,
        keys=record.keys,
        host=host,
        port=config.peer_port,
        kept_port=record.port,
        path=path,
        problem=problem,
    )


def node_name(hostname: str) -> str:
    """The host's name in the characters that a node's name may have."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", hostname).lstrip("._-")[:_MAX_NODE_CHARS] or "node"


def find_host(setting: str) -> tuple[str, str]:
    """Where to bind, as a number or an interface, and a doubt about it. Blocks for the resolver, up to 5 s if set.

    Raises ConfigError when the setting means nothing here.
    """
    if setting:
        return told_host(setting, "peer_address"), ""
    name = socket.gethostname()
    address = resolve(name, _RESOLVE_S)
    if address is not None and not ipaddress.ip_address(address).is_loopback:
        return address, ""
    what = f"the name {name} does not resolve" if address is None else f"the name {name} is a loopback address here"
    return LOOPBACK, f"{what}, so other nodes cannot reach this daemon: set peer_address"


def _read(path: str) -> _Record | None:
    """None when there is none, or none that is whole: the arena is then another one to its peers."""
    record = record_at(path, _Record, _MAX_NBYTES, "identity is damaged, a new key")
    return record if record is not None and fits(record.keys) else None
