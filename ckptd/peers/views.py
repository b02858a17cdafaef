"""What a plane shows of its peers, and what it has received that is not for the core."""

from typing import NamedTuple

from ckptd.peers.packets import Mail
from ckptd.shared.base.ids import JobKey


class PeerView(NamedTuple):
    """A peer, for status."""

    node: str
    endpoint: str
    up: bool
    queued: int
    jobs: tuple[JobKey, ...]


class Received(NamedTuple):
    """A question or an answer of a peer; not for the core."""

    node: str
    body: Mail
