"""Where peers serve bytes, and which may fetch them here: an address, a link id and a secret for each connection."""

import secrets
from typing import NamedTuple

from ckptd.peers.packets import Bulk
from ckptd.peers.remote import Remote
from ckptd.shared.base.ids import JobKey
from ckptd.shared.protocol.endpoints import host_of


class Guest(NamedTuple):
    """Who may fetch bytes under a link id: which node, the secret that both know, for which jobs."""

    node: str
    secret: bytes
    jobs: frozenset[JobKey]


class Offers:
    """``address`` and ``guests`` may be used in any thread: whole values are put in and taken out, never changed."""

    def __init__(self) -> None:
        self.port = 0  # where this daemon serves; 0: nowhere yet
        self.guests: dict[str, Guest] = {}  # by link id

    def renew(self, remote: Remote) -> Bulk:
        """An offer to the peer, in place of the one before: a token that somebody saw is worth nothing after it."""
        self._withdraw_guest(remote)
        remote.offer = Bulk(self.port, secrets.token_hex(16), secrets.token_bytes(32))
        self.refresh(remote)
        return remote.offer

    def refresh(self, remote: Remote) -> None:
        """The jobs that the peer shares have changed."""
        if remote.offer is not None:
            self.guests[remote.offer.link_id] = Guest(remote.peer.node, remote.offer.secret, frozenset(remote.jobs))

    def take(self, remote: Remote, bulk: Bulk) -> None:
        """The peer made an offer. Port 0: it serves nothing yet."""
        remote.bulk = bulk

    @staticmethod
    def address(remote: Remote | None) -> tuple[str, int, str, bytes] | None:
        """Host, port, link id and secret; None while there is no offer. From any thread."""
        bulk = remote.bulk if remote is not None else None
        if remote is None or bulk is None or not bulk.port:
            return None
        return host_of(remote.peer.endpoint), bulk.port, bulk.link_id, bulk.secret

    def withdraw(self, remote: Remote) -> None:
        """The connection is over: neither offer holds."""
        self._withdraw_guest(remote)
        remote.bulk = None

    def _withdraw_guest(self, remote: Remote) -> None:
        if remote.offer is not None:
            self.guests.pop(remote.offer.link_id, None)
        remote.offer = None
