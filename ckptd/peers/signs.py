"""The short way of signs of life, which are nearly all packets of an idle job, and of one that gathers.

At a daemon with a thousand links they are most of what its loop does: no more is looked at than one can change.
"""

import abc

from ckptd.peers.link_hooks import LinkHooks
from ckptd.peers.packets import Envelope
from ckptd.peers.remote import Remote
from ckptd.peers.turns import Turns


class Signs(LinkHooks, abc.ABC):
    """When a remote is to be looked at, and whether that was for a sign of life alone."""

    _turns: Turns

    def _due(self, remote: Remote) -> float:
        """When it is to be looked at, at the latest."""
        return min(remote.link.next_deadline(), self._due_beside(remote))

    def _due_beside(self, remote: Remote) -> float:
        """The same for all but its link."""
        by = remote.shared.next_deadline(rests=remote.link.up and not remote.link.queued)
        return by if remote.redial_at is None else min(by, remote.redial_at)

    def _sends_sign(self, remote: Remote, now: float) -> bool:
        """Whether a packet without a body was all that was due. False: nothing is done."""
        others_at, awake = self._due_beside(remote), remote.path.relayed and not remote.asleep
        packet = remote.link.sign_next(now) if others_at > now and remote.connects and not awake else None
        if packet is None:
            return False
        if not self._deliver(remote, packet):
            remote.link.dropped(now)
        self._turns.see_to(remote, min(remote.link.next_deadline(), others_at))
        return True

    @staticmethod
    def _takes_sign(remote: Remote, envelope: Envelope, now: float) -> bool:
        """Whether the link took a packet without a body, on the direct path in force. False: nothing is done."""
        packet, path = envelope.packet, remote.path
        if packet.body or path.number != envelope.path or path.via is not None:
            return False
        return remote.link.take_next(packet, b"", now)
