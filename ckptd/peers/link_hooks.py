"""What links leave to the class that has the sockets, and to the one that knows their paths."""

import abc

from ckptd.peers.link import Link
from ckptd.peers.packets import Bundle, Packet
from ckptd.peers.remote import Remote
from ckptd.shared.protocol.topology import Peer


class LinkHooks(abc.ABC):
    """Nothing blocks; all but ``_transmit`` belongs to the loop's thread."""

    @abc.abstractmethod
    def _make_remote(self, peer: Peer, link: Link) -> Remote:
        """A way to the peer, not connected yet."""

    @abc.abstractmethod
    def _transmit(self, remote: Remote, packet: Packet) -> bool:
        """Sends a packet; False: it is dropped, there is no connection or no room."""

    @abc.abstractmethod
    def _deliver(self, remote: Remote, packet: Packet, waits: int = 0) -> bool:
        """As ``_transmit``, on whichever path the packets of the remote's link go. waits: as a letter has it."""

    @abc.abstractmethod
    def _heard(self, remote: Remote, packet: Packet, path: int, now: float) -> None:
        """The remote's link took a packet that came directly."""

    @abc.abstractmethod
    def _take_bundle(self, remote: Remote, bundle: Bundle) -> None:
        """Packets of, or to, other nodes have come over a link."""

    @abc.abstractmethod
    def _admit(self, key: str) -> None:
        """A daemon of this key may connect from now on."""

    @abc.abstractmethod
    def _lost(self, node: str, now: float) -> None:
        """The node does not answer, or has left a job."""
