"""What the daemon says of itself to the ranks that gather the topology.

A stand-in, to be replaced by the peer plane: no socket listens at the endpoint, and arena and key are of this process.
"""

import functools
import os
import uuid

import zmq

from ckptd.protocol.messages import NodeInfo
from ckptd.protocol.topology import Peer, Scheme


@functools.cache
def _peer() -> Peer:
    address = os.environ.get("CKPTD_PEER_ADDRESS", "")
    return Peer(
        node=os.environ.get("CKPTD_NODE") or os.uname().nodename,
        arena=uuid.uuid4().hex,
        endpoint=f"tcp://{address}:{os.getpid() % 60000 + 1}" if address else "",
        key=zmq.curve_keypair()[0].decode(),
        domain=os.environ.get("CKPTD_DOMAIN", ""),
    )


def answer(seq: int) -> NodeInfo:
    """The answer to AskNode."""
    scheme = Scheme(os.environ.get("CKPTD_REDUNDANCY", "none"))
    return NodeInfo(reply_to=seq, peer=_peer(), scheme=scheme, set_size=int(os.environ.get("CKPTD_SET_SIZE", "8")))
