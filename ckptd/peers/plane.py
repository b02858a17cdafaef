"""The sockets to daemons of other nodes: one that receives from all, one to each of them that there is a link to."""

import math
import time
from collections.abc import Callable, Container

import zmq

from ckptd.core import events as ev
from ckptd.core.actions import ToNode
from ckptd.peers.bulk_access import Guest
from ckptd.peers.identity import Identity
from ckptd.peers.keep_alive import KeepAlive
from ckptd.peers.link import KEEPALIVES, Link
from ckptd.peers.links import ROUND_S
from ckptd.peers.meetings import Meetings
from ckptd.peers.outbox import Outbox
from ckptd.peers.packets import Packet, decode_envelope, sentence, wrap
from ckptd.peers.relayed_links import RelayedLinks
from ckptd.peers.remote import Remote
from ckptd.peers.sockets import listen
from ckptd.peers.watches import Watches
from ckptd.peers.zap import Authenticator
from ckptd.shared.base.errors import ProtocolError
from ckptd.shared.base.ids import JobKey
from ckptd.shared.protocol.topology import Peer, Rendezvous

_RECEIVE_MOST = 256  # per round of the loop
_MAX_SOCKETS = 1 << 15


class PeerPlane(RelayedLinks):
    """Owns its sockets. ``receive`` and ``tick`` return what has happened; no call is made from within another."""

    def __init__(self, identity: Identity, *, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(identity.node, timeout_s=timeout_s, clock=clock)
        self._identity = identity
        self._polled_at = -math.inf  # when this turn began: what had arrived by then was found by it
        self._outbox = Outbox(super().carry, clock)
        self._keep_alive = KeepAlive(self._send_signs_of_life, timeout_s / KEEPALIVES)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, _MAX_SOCKETS)
        self._watches = Watches(self._context)
        self._zap, self.meetings = Authenticator(self._context), Meetings(self._context)
        try:
            self._router, endpoint = listen(self._context, identity)
        except BaseException:
            self._zap.close()
            self._context.destroy(0)
            raise
        identity.keep_port(int(endpoint.rpartition(":")[2]))
        self.peer = Peer(identity.node, identity.arena, endpoint, identity.keys.public, identity.domain)

    def _make_remote(self, peer: Peer, link: Link) -> Remote:
        self._keep_alive.start()
        return Remote(self._context, self._watches, peer, self._identity.keys, link)

    def _admit(self, key: str) -> None:
        self._zap.admit(key)

    def _lost(self, node: str, now: float) -> None:
        super()._lost(node, now)
        self.meetings.lost(node, now)

    def _up(self, remote: Remote, now: float, *, fresh: bool) -> None:
        self._outbox.drop(remote.peer.node)
        super()._up(remote, now, fresh=fresh)

    def _down(self, remote: Remote, now: float) -> None:
        self._outbox.drop(remote.peer.node)
        super()._down(remote, now)

    def _is_known(self, key: str) -> bool:
        return self._book.knows(key) or self.meetings.of(key) is not None

    def meet_at(self, job: JobKey, session: str, rendezvous: Rendezvous) -> None:
        """Meets the session's daemons: here, each that has its ticket; else at the one that the rendezvous names."""
        if rendezvous.peer.node == self._node:
            self._zap.admit(self.meetings.expect(job, session, rendezvous.ticket))
        else:
            self.meet(job, [rendezvous.peer])
            self.meetings.show(job, session, rendezvous, self.peer)

    def forget(self, job: JobKey) -> None:
        """The job is over here: notifies its peers, and drops those of no other job."""
        self._outbox.send_more(math.inf)
        self.meetings.forget(job)
        super().forget(job)

    def carry(self, action: ToNode) -> None:
        """As ``PeerLinks`` has it; in a long turn, soon."""
        self._outbox.carry(action)

    # --- loop

    @property
    def pollables(self) -> list[zmq.Socket[bytes]]:
        """For a zmq.Poller, to be read by ``receive``."""
        return [self._router, self._zap.pollable]

    def turn_begins(self) -> None:
        """The loop is at work from now on: should that take long, a thread sends signs of life."""
        self._polled_at = self._clock()
        self._keep_alive.begins(time.monotonic())
        self._outbox.begins()

    def turn_ends(self) -> None:
        """The loop waits again."""
        self.send_bundles()
        self._keep_alive.ends()

    def receive(self, ready: Container[object] | None = None) -> list[ev.Event]:
        """What waits, at most so much that the loop continues. ready: pollables in which the turn found something."""
        now = self._clock()
        if ready is None or self._zap.pollable in ready:
            self._zap.serve(self._is_known, now)
        if ready is not None and self._router not in ready:
            self._listened_at = self._polled_at
            return self.take_events()
        for _ in range(_RECEIVE_MOST):
            try:
                frames = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                self._listened_at = now
                break
            remote = self._take(frames, now)
            if remote is not None:
                self._flush(remote)  # at once, so that what a bundle costs counts
            if self._clock() >= now + ROUND_S:
                break
        return self.take_events()

    def _take(self, frames: "list[zmq.Frame]", now: float) -> Remote | None:
        """The remote whose link took the packet; None when it was dropped."""
        frame = frames[-1]
        key = str(frame.get("User-Id"))
        try:
            envelope = decode_envelope(frame.bytes)
        except ProtocolError as error:
            self.refused["malformed"] += 1
            for (_, known), suspect in self._remotes.items():
                if known == key:
                    suspect.trouble = sentence(error)
            return None
        if (meeting := self.meetings.of(key)) is not None:
            peer = meeting.accepted(envelope)
            self.refused["sender"] += peer is None
            self.meet(meeting.job, [peer] if peer is not None else [])
            return None
        return self._take_packet((envelope.sender, key), envelope, now)

    def tick(self) -> list[ev.Event]:
        """What is due."""
        self.meetings.tick(self._clock(), self._up_for)
        self._outbox.send_more()
        return super().tick()

    def next_deadline(self) -> float | None:
        """When ``tick`` must be called at the latest; None: there is nobody to talk to."""
        waits = 0.0 if self._outbox else None
        times = [due for due in (super().next_deadline(), self.meetings.next_deadline(), waits) if due is not None]
        return min(times, default=None)

    def close(self) -> None:
        """Gives all sockets back. Blocks for a moment, if last words are on their way."""
        self._keep_alive.close()
        self._outbox.send_more(math.inf)
        self.send_bundles()
        for remote in self._remotes.values():
            remote.close()
        self._remotes.clear()
        self.meetings.close()
        self._router.close(0)
        self._zap.close()
        self._context.term()

    def _transmit(self, remote: Remote, packet: Packet) -> bool:
        return remote.transmit(wrap(packet, self._node, remote.peer.node, self.peer.endpoint, remote.path.number))

    def _send_signs_of_life(self) -> None:
        """In a thread of its own, in the middle of a long turn."""
        for remote, packet in self._signs_of_life():
            self._transmit(remote, packet)

    # --- bulk

    def offer_bulk(self, port: int) -> None:
        """From here on peers receive this port of the same host for byte ranges."""
        self._offers.port = port
        for remote in self._remotes.values():
            if remote.link.up:
                self._say(remote, self._offers.renew(remote))
                self._flush(remote)

    def bulk_address(self, job: JobKey, node: str) -> tuple[str, int, str, bytes] | None:
        """Where and how to fetch the job's bytes from the node; None while it is down. From any thread.

        Host, port, link id, secret. Two daemons may call themselves the same, each in jobs of its own.
        """
        return self._offers.address(self._remote_of(job, node))

    def bulk_guest(self, link_id: str) -> Guest | None:
        """Who comes under this link id; None: nobody, or a link that is over. From any thread."""
        return self._offers.guests.get(link_id)

    # --- status

    def problems(self) -> list[str]:
        """What is wrong between daemons, and what to do, a line each. Nobody need do anything about former nodes."""
        now = self._clock()
        current = [one for one in self._remotes.values() if len(self._book.former(one.node_key)) < len(one.jobs)]
        lines = [problem for remote in current if remote.shared.needed and (problem := remote.problem(now))]
        lines += [*self.meetings.problems(), *self._zap.problems(self._is_known, now)]
        if self._identity.problem and self._remotes:
            lines.append(self._identity.problem)
        return lines
