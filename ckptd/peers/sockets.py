"""The socket for packets of other daemons: CURVE, bound at the address of the identity."""

import zmq

from ckptd.peers.identity import Identity
from ckptd.peers.packets import MAX_PACKET_NBYTES
from ckptd.shared.base.errors import ConfigError

_HWM = 64  # packets of one peer that wait unread
_HANDSHAKE_MS = 3000
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


def _ports(identity: Identity) -> list[str]:
    """What to try, in order: the one that was set and no other, else the one that peers may know, else any."""
    if identity.port:
        return [str(identity.port)]
    return [str(identity.kept_port), "*"] if identity.kept_port else ["*"]
