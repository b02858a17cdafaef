"""The links of played nodes to real daemons: the product's own, over one socket that receives for all of them.

All members share a key pair, as sites may have it; each has connections and an address of its own.
"""

import time
from collections.abc import Callable

import zmq

from bench.large.plan import Plan
from ckptd.core import actions as act
from ckptd.core import events as ev
from ckptd.peers.keep_alive import KeepAlive
from ckptd.peers.keys import KeyPair, make_keys
from ckptd.peers.link import KEEPALIVES, Link
from ckptd.peers.meetings import Meetings
from ckptd.peers.packets import Answered, Ask, Envelope, Packet, decode_envelope, wrap
from ckptd.peers.relayed_links import RelayedLinks
from ckptd.peers.remote import Remote
from ckptd.peers.watches import Watches
from ckptd.shared.protocol.topology import Peer

_READS = 512
_LOOK_S = 0.05  # between two looks at what is due
_MAX_SOCKETS = 1 << 16


class MemberLinks(RelayedLinks):
    """Of one member to real daemons, and to the leader of its group."""

    def __init__(self, wire: "Wire", node: str, timeout_s: float) -> None:
        super().__init__(node, timeout_s=timeout_s, clock=time.monotonic)
        self._wire = wire
        self.meetings = Meetings(wire.context)

    @property
    def _listened_at(self) -> float:  # type: ignore[override]
        return self._wire.listened_at

    def _make_remote(self, peer: Peer, link: Link) -> Remote:
        return Remote(self._wire.context, self._wire.watches, peer, self._wire.keys, link)

    def _transmit(self, remote: Remote, packet: Packet) -> bool:
        return remote.transmit(wrap(packet, self._node, remote.peer.node, "", remote.path.number))

    def _admit(self, key: str) -> None:
        pass

    def _lost(self, node: str, now: float) -> None:
        super()._lost(node, now)
        self.meetings.lost(node, now)

    def take(self, sender: Peer, envelope: Envelope, now: float) -> None:
        """A packet of another daemon."""
        remote = self._take_packet((sender.node, sender.key), envelope, now)
        if remote is not None:
            self._flush(remote)

    @property
    def has_bundles(self) -> bool:
        """Whether some wait."""
        return bool(self._bundles)

    def is_due(self, now: float) -> bool:
        """Whether ``look`` has something to do."""
        times = (self.next_deadline(), self.meetings.next_deadline())
        return any(due is not None and due <= now for due in times)

    def look(self, now: float) -> list[ev.Event]:
        """What is due."""
        self.meetings.tick(now, self._up_for)
        return self.tick()

    def send_signs_of_life(self) -> None:
        """From a thread."""
        for remote, packet in self._signs_of_life():
            self._transmit(remote, packet)

    def close(self) -> None:
        """The member's process is gone."""
        self.meetings.close()
        for remote in self._remotes.values():
            remote.close()
        self._remotes.clear()


class Wire:
    """``take`` receives what happens on a link: the member, and an event for its core."""

    def __init__(self, plan: Plan, take: Callable[[str, ev.Event], None], answer: Callable[[str], bytes]) -> None:
        self._plan = plan
        self._take = take
        self._answer = answer
        self.keys: KeyPair = make_keys()
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(2)
        self.context.set(zmq.MAX_SOCKETS, _MAX_SOCKETS)
        self.watches = Watches(self.context)
        self.router = _listen(self.context, self.keys)
        self._port = str(self.router.getsockopt_string(zmq.LAST_ENDPOINT)).rpartition(":")[2]
        self.daemons = {peer.node: peer for peer in plan.daemons}
        self.links: dict[str, MemberLinks] = {}
        self.listened_at = time.monotonic()
        self._look_at = 0.0
        self.downs = 0
        self.keep_alive = KeepAlive(self._send_signs_of_life, plan.timeout_s / KEEPALIVES)
        self.keep_alive.start()

    def add(self, member: str) -> None:
        """A member without links."""
        self.links[member] = MemberLinks(self, member, self._plan.timeout_s)

    def keep_links(self, member: str, action: act.KeepLinks) -> None:
        """To real daemons, and to a leader, which learns of the member as its topology would have it."""
        links, job = self.links[member], action.job
        for _, leader in action.relays if action.nodes is not None else ():
            if leader in self.links:
                links.meet(job, [self.peer(leader)])
                self.links[leader].meet(job, [self.peer(member)])
        links.keep_links(job, action.nodes, action.relays)

    def lose(self, member: str) -> None:
        """Its process is gone."""
        self.links.pop(member).close()

    def peer(self, member: str) -> Peer:
        """As the member's daemon describes itself."""
        number = int(member.rpartition("-")[2])
        address = f"127.{1 + number // 62500}.{number // 250 % 250}.{1 + number % 250}"  # all lead to the one socket
        return Peer(member, "crowd", f"tcp://{address}:{self._port}", self.keys.public)

    def turn(self) -> None:
        """Receives what waits and sends what is due."""
        now = time.monotonic()
        for _ in range(_READS):
            try:
                frames = self.router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                self.listened_at = now
                break
            self._dispatch(frames[-1], now)
        for links in self.links.values():
            if links.has_bundles:
                links.send_bundles()
        if now >= self._look_at:
            self._look_at = now + _LOOK_S
            for member, links in [item for item in self.links.items() if item[1].is_due(now)]:
                self._hand_on(member, links, links.look(now))

    def _dispatch(self, frame: bytes, now: float) -> None:
        envelope = decode_envelope(frame)
        links, sender = self.links.get(envelope.receiver), self.daemons.get(envelope.sender)
        if sender is None and envelope.sender in self.links:
            sender = self.peer(envelope.sender)
        if links is not None and sender is not None:
            links.take(sender, envelope, now)
            self._hand_on(envelope.receiver, links, links.take_events())

    def _hand_on(self, member: str, links: MemberLinks, events: list[ev.Event]) -> None:
        for event in events:
            if isinstance(event, ev.PeerUp | ev.PeerDown) and event.node not in self.daemons:
                continue  # members reach each other in this process; between them there are packets for others alone
            self.downs += isinstance(event, ev.PeerDown) and not event.rests
            self._take(member, event)
        for mail in links.take_mail():
            if isinstance(mail.body, Ask):
                links.write(mail.body.job, mail.node, Answered(mail.body.id, self._answer(member)))

    def _send_signs_of_life(self) -> None:
        for links in list(self.links.values()):
            links.send_signs_of_life()


def _listen(context: "zmq.Context[zmq.Socket[bytes]]", keys: KeyPair) -> "zmq.Socket[bytes]":
    router = context.socket(zmq.ROUTER)
    router.linger = 0
    router.backlog = 4096
    router.curve_server = True
    router.curve_publickey, router.curve_secretkey = keys.public.encode(), keys.secret.encode()
    router.bind("tcp://0.0.0.0:*")
    return router
