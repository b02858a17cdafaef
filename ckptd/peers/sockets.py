"""The sockets between daemons, all CURVE: one that receives from all others, one to each of them."""

import zmq

from ckptd.peers.identity import Identity
from ckptd.peers.keys import KeyPair
from ckptd.peers.packets import MAX_PACKET_NBYTES
from ckptd.shared.base.errors import ConfigError
from ckptd.shared.protocol.topology import Peer

_HWM = 64  # packets of one peer that wait unread
_HANDSHAKE_MS = 3000
_HEARTBEAT_MS = 10000
_RECONNECT_MS = 100
_RECONNECT_MAX_MS = 2000
_BACKLOG = 4096  # connections at once: all peers of a restarted daemon come back together


def listen(context: "zmq.Context[zmq.Socket[bytes]]", identity: Identity) -> tuple["zmq.Socket[bytes]", str]:
    """The socket and its endpoint. Raises ConfigError when address or port cannot be had."""
    made = context.socket(zmq.ROUTER)
    for option, value in (
        (zmq.LINGER, 0),
        (zmq.RCVHWM, _HWM),
        (zmq.BACKLOG, _BACKLOG),
        (zmq.SNDHWM, 1),
        (zmq.MAXMSGSIZE, MAX_PACKET_NBYTES),
        (zmq.IPV6, int(":" in identity.host)),
        (zmq.HANDSHAKE_IVL, _HANDSHAKE_MS),
        (zmq.TCP_KEEPALIVE, 1),
        (zmq.TCP_KEEPALIVE_IDLE, 60),
        (zmq.TCP_KEEPALIVE_INTVL, 10),
        (zmq.TCP_KEEPALIVE_CNT, 6),
        (zmq.CURVE_SERVER, 1),
    ):
        made.setsockopt(option, value)
    made.curve_secretkey = identity.keys.secret.encode()
    made.curve_publickey = identity.keys.public.encode()
    made.zap_domain = b"ckptd"
    host = f"[{identity.host}]" if ":" in identity.host else identity.host
    problem = ""
    for port in _ports(identity):
        try:
            made.bind(f"tcp://{host}:{port}")
            return made, str(made.getsockopt_string(zmq.LAST_ENDPOINT))
        except zmq.ZMQError as error:
            problem = f"{host}:{port}: {error.strerror}"
    made.close()
    raise ConfigError(
        f"cannot listen for other daemons at {problem}",
        hint="set peer_address to an address or interface of this node, and peer_port to a free port or 0",
    )


def dial(
    context: "zmq.Context[zmq.Socket[bytes]]", to: Peer, keys: KeyPair, *, hwm: int, waits: bool
) -> "zmq.Socket[bytes]":
    """A socket that connects to the daemon, again when it must. Does not block.

    hwm: packets that have not left; waits: so many are kept until there is a connection, else none is taken before.
    Raises ZMQError or ValueError when no descriptor is left, or endpoint or key is none.
    """
    made = context.socket(zmq.DEALER)
    try:
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.SNDHWM, hwm),
            (zmq.RCVHWM, 1),
            (zmq.MAXMSGSIZE, 1024),  # it has nothing to say here
            (zmq.IMMEDIATE, int(not waits)),
            (zmq.IPV6, 1),
            (zmq.HANDSHAKE_IVL, _HANDSHAKE_MS),
            (zmq.HEARTBEAT_IVL, _HEARTBEAT_MS),  # finds a connection whose other end is gone without a close
            (zmq.HEARTBEAT_TIMEOUT, 2 * _HEARTBEAT_MS),
            (zmq.CONNECT_TIMEOUT, _HANDSHAKE_MS),
            (zmq.RECONNECT_IVL, _RECONNECT_MS),
            (zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS),
        ):
            made.setsockopt(option, value)
        made.curve_serverkey = to.key.encode()
        made.curve_publickey, made.curve_secretkey = keys.public.encode(), keys.secret.encode()
        made.connect(to.endpoint)
    except (zmq.ZMQError, ValueError):
        made.close(0)
        raise
    return made


def _ports(identity: Identity) -> list[str]:
    """What to try, in order: the one that was set and no other, else the one that peers may know, else any."""
    if identity.port:
        return [str(identity.port)]
    return [str(identity.kept_port), "*"] if identity.kept_port else ["*"]
