"""The links to daemons of other nodes: which there are, what goes over them, what the core learns. No sockets.

A link is made when this daemon has use for it, or the other one has, and rests when neither has.
"""

import logging
import math
import random
import secrets
from collections import Counter, deque
from collections.abc import Callable, Iterable

from ckptd.core import events as ev
from ckptd.core.actions import ToNode
from ckptd.peers.address_book import AddressBook, NodeKey
from ckptd.peers.bulk_access import Offers
from ckptd.peers.group import waits_of
from ckptd.peers.link import Down, Got, Link, Up
from ckptd.peers.packets import (
    Ask,
    Body,
    BodyOnce,
    Bulk,
    Envelope,
    Forward,
    Forwarded,
    Join,
    Leave,
    Mail,
    Message,
    Present,
    Rest,
    StepsAsked,
    decode_body,
    encode_body,
    sentence,
    unknown_message,
)
from ckptd.peers.remote import Remote
from ckptd.peers.shared_jobs import LINGER_S
from ckptd.peers.signs import Signs
from ckptd.peers.turns import Turns
from ckptd.peers.views import PeerView, Received
from ckptd.shared.base.errors import ProtocolError, UnknownMessageError
from ckptd.shared.base.ids import JobKey
from ckptd.shared.base.log_line import line
from ckptd.shared.protocol import node_messages
from ckptd.shared.protocol.topology import Peer, Topology

log = logging.getLogger("ckptd")
_CONNECT_MOST = 32  # per round of the loop: each takes most of a millisecond
ROUND_S = 0.01  # the most of a round of the loop that connections, or packets, take
_IN_PHASE = 128  # links that send their signs of life together: a turn of some milliseconds
_PHASE_S = 0.0618  # so much later the next ones
_SPREAD_PEER_S = 0.001  # so that all nodes that have lost the same one do not dial it at the same moment
_SPREAD_S = 3.0  # at most
_ASIDE_S = 60.0  # a link that is not kept, after a message
_PATIENCE_S = 600.0  # with a silent peer that the job's present topology does not name


class PeerLinks(Signs):
    """Nothing blocks; all belongs to the loop's thread.

    What happens is kept as events for ``take_events``. ``unconnected``: remotes whose connection is to be made.
    """

    _listened_at = math.inf  # all that had arrived by then was received

    def __init__(self, node: str, *, timeout_s: float, clock: Callable[[], float]) -> None:
        self._node = node
        self._timeout_s = timeout_s
        self._clock = clock
        self._instance = self._new_end()
        self._book = AddressBook(node)
        self._remotes: dict[NodeKey, Remote] = {}  # those with a link
        self.unconnected: deque[Remote] = deque()
        self._events: list[ev.Event] = []
        self._mail: list[Received] = []
        self._turns = Turns()
        self._offers = Offers()
        self._once, self._reader = BodyOnce(), node_messages.Reader()
        self.refused: Counter[str] = Counter()  # what was dropped, by reason

    def _new_end(self) -> int:
        return secrets.randbits(61) + 1

    def _between(self, least: float, most: float) -> float:
        return random.uniform(least, most)  # noqa: S311 - no secret

    # --- peers and links

    def meet(self, job: JobKey, peers: Iterable[Peer]) -> None:
        """Accepts these daemons for the job, beside those it has. One per node: a new key replaces the old."""
        for peer in peers:
            if peer.node == self._node:
                continue
            before = self._book.add(job, peer)
            if before == peer:
                continue
            if before is None or before.key != peer.key:
                self._admit(peer.key)
                if before is not None and (remote := self._remotes.get((before.node, before.key))) is not None:
                    self._part(remote, job)
            if (remote := self._remotes.get((peer.node, peer.key))) is not None:
                remote.move(self._at(peer).endpoint)
                self._share(remote, job)
            if self._book.is_kept(job, peer.node):
                self._need(job, peer)

    def keep(self, job: JobKey, topology: Topology, outside: tuple[Peer, ...] = ()) -> None:
        """Meets its peers, and those that hold something of the job outside of it, until they are long silent."""
        self.meet(job, (*topology.peers, *outside))
        for peer in self._book.present(job, topology, outside):
            if (peer.node, peer.key) not in self._remotes:
                self._book.remove(job, peer.node)
        self._book.settle(job)

    def keep_links(self, job: JobKey, nodes: Iterable[str] | None) -> None:
        """Keeps a link to these nodes of the job from now on; None: to all of them.

        A link lasts as long as one of its ends has use for it.
        """
        before = self._book.kept(job)
        self._book.keep(job, nodes)
        for peer in before:
            remote = self._remotes.get((peer.node, peer.key))
            if remote is not None and not self._book.is_kept(job, peer.node):
                remote.shared.kept_until(job, self._clock() + LINGER_S)
                self._flush(remote)
        for peer in self._book.kept(job):
            self._need(job, peer)

    def _need(self, job: JobKey, peer: Peer, until: float = math.inf) -> None:
        """Has a link to the peer for this job."""
        remote = self._remotes.get((peer.node, peer.key)) or self._link_to(self._at(peer))
        if remote.shared.needs(job, until):
            self._say(remote, Join(job))
        self._flush(remote)

    def _at(self, peer: Peer) -> Peer:
        return self._book.at((peer.node, peer.key)) or peer

    def _link_to(self, peer: Peer) -> Remote:
        phase_s = len(self._remotes) // _IN_PHASE * _PHASE_S
        link = Link(instance=self._instance, timeout_s=self._timeout_s, new_end=self._new_end, phase_s=phase_s)
        node_key = (peer.node, peer.key)
        remote = self._remotes[node_key] = self._make_remote(peer, link)
        remote.down_since = self._clock()
        for job in self._book.jobs(node_key):
            self._share(remote, job)
        self.unconnected.append(remote)
        return remote

    def _share(self, remote: Remote, job: JobKey) -> None:
        if job not in remote.jobs:
            remote.jobs.add(job)
            self._offers.refresh(remote)
            self._join(remote, job)
            self._events += remote.shared.announce() if remote.link.up else []
            self._flush(remote)

    def _join(self, remote: Remote, job: JobKey) -> None:
        self._say(remote, Join(job, needed=remote.shared.is_needed(job)))

    def forget(self, job: JobKey) -> None:
        """The job is over here: notifies its peers, and drops those of no other job."""
        for peer in self._book.forget(job):
            if (remote := self._remotes.get((peer.node, peer.key))) is not None:
                self._part(remote, job, tell=False)

    def _part_from_former(self, remote: Remote) -> None:
        for job in self._book.former(remote.node_key):
            self._book.remove(job, remote.peer.node)
            self._part(remote, job)

    def _part(self, remote: Remote, job: JobKey, *, tell: bool = True) -> None:
        self._say(remote, Leave(job))
        self._flush(remote)
        self._events += remote.shared.parted(job, tell=tell)
        self._offers.refresh(remote)
        if not remote.jobs:
            self._close(remote)

    def _close(self, remote: Remote) -> None:
        if self._remotes.get(remote.node_key) is remote:
            del self._remotes[remote.node_key]
        self._offers.withdraw(remote)
        remote.closed = True
        remote.close()

    # --- messages

    def send(self, job: JobKey, node: str, message: ev.Message) -> bool:
        """Queues the message; False: the node is not up for the job. Raises ProtocolError when it is too large.

        A node without a link gets one for a while: PeerUp says when what was lost can be sent again.
        """
        remote = self._up_for(job, node)
        if not self._book.keeps_all(job):
            self.call(job, node)
        if remote is None:
            return False
        return self._put(remote, self._once.of(message), waits_of(message))

    def _put(self, remote: Remote, body: bytes, waits: int) -> bool:
        """Sends the body at once, or once those before it are sent. False: the link is given up.

        waits: of this body alone, if it leaves at once. What leaves with others does not wait for the group.
        """
        now = self._clock()
        packet = remote.link.send_next(body, now)
        if packet is None:
            sent = remote.link.send(body)
            self._flush(remote)
            return sent
        if not self._deliver(remote, packet, waits):
            remote.link.dropped(now)
        self._turns.see_to(remote, remote.link.next_deadline())
        return True

    def call(self, job: JobKey, node: str) -> bool:
        """Has a link to a node that none is kept to, for a while. False: one is kept, or the node is not known."""
        peer = self._book.peer(job, node)
        if peer is None or self._book.is_kept(job, node):
            return False
        self._need(job, peer, self._clock() + _ASIDE_S)
        return True

    def write(self, job: JobKey, node: str, body: Mail) -> bool:
        """Queues a question or an answer; False: the node is not up for the job, or it is too large."""
        remote = self._up_for(job, node)
        if remote is None:
            return False
        try:
            return self._say(remote, body)
        except ProtocolError:
            return False
        finally:
            self._flush(remote)

    def _up_for(self, job: JobKey, node: str) -> Remote | None:
        remote = self._remote_of(job, node)
        return remote if remote is not None and job in remote.shared.told else None

    def _remote_of(self, job: JobKey, node: str) -> Remote | None:
        peer = self._book.peer(job, node)
        return self._remotes.get((peer.node, peer.key)) if peer is not None else None

    def take_mail(self) -> list[Received]:
        """Questions and answers that ``receive`` found since the last call."""
        mail, self._mail = self._mail, []
        return mail

    def carry(self, action: ToNode) -> None:
        """Sends to the node. One that is not up gets nothing; it is resent later."""
        if action.node is None:
            raise ValueError(f"{type(action.message).__name__} is addressed to no node")
        try:
            self.send(action.job, action.node, action.message)
        except ProtocolError as error:
            log.error(line("message lost", job=action.job.job, node=action.node, error=error))  # noqa: TRY400 - the message says it all

    # --- packets and time

    def _take_packet(self, node_key: NodeKey, envelope: Envelope, now: float) -> Remote | None:
        """The remote that is to be flushed; None: nothing follows. node_key: whose key signed for the packet."""
        remote = self._remotes.get(node_key)
        peer = remote.peer if remote is not None else self._book.at(node_key)
        if peer is None or envelope.receiver != self._node:
            self.refused["sender" if peer is None else "receiver"] += 1
            return None
        if envelope.endpoint and envelope.endpoint != peer.endpoint:
            self._book.moved(node_key, envelope.endpoint)
            peer = self._at(peer)
        if remote is None:
            if not envelope.packet.hello and self._book.rests(node_key, now):
                return None  # the last of the link
            remote = self._link_to(peer)  # the other end has one, even if it broke here
        remote.move(peer.endpoint)
        remote.trouble, remote.release = "", envelope.release
        is_sign = self._takes_sign(remote, envelope, now)
        if not is_sign:
            remote.link.receive(envelope.packet, now)
        self._heard(remote, envelope.packet, envelope.path, now)
        return remote if not is_sign or remote.link.next_deadline() <= now else None

    def tick(self) -> list[ev.Event]:
        """What is due: connections, resends, signs of life, peers that fell silent, links of no use."""
        now = self._clock()
        for _ in range(min(_CONNECT_MOST, len(self.unconnected))):
            remote = self.unconnected.popleft()
            if not remote.closed:
                remote.connect()
                self._flush(remote)
            if self._clock() >= now + ROUND_S:
                break
        for remote in self._turns.take(now):
            if not remote.closed and not self._sends_sign(remote, now):
                self._flush(remote)
                remote.look(now)
                self._look_at(remote, now)
        return self.take_events()

    def _look_at(self, remote: Remote, now: float) -> None:
        """Whether it is late, redialled, or of no use any more."""
        self._events += remote.shared.overdue(now)
        if remote.redial_at is not None and now >= remote.redial_at:
            remote.redial_at = None
            self.unconnected.append(remote)
        for job in remote.shared.expired(now):
            self._join(remote, job)
            self._flush(remote)
        down_s = now - remote.down_since if remote.down_since is not None else 0.0
        if down_s >= _PATIENCE_S:
            self._part_from_former(remote)
        if remote.closed or remote.shared.needed:
            return
        if down_s >= self._timeout_s:
            self._close(remote)
        elif remote.link.up and not remote.link.queued and remote.shared.idle(now):
            self._rest(remote, now)

    def next_deadline(self) -> float | None:
        """When something is due at the latest; None: there is nobody to talk to."""
        return 0.0 if self._events or self.unconnected else self._turns.next

    def take_events(self) -> list[ev.Event]:
        """What has happened since the last call."""
        events, self._events = self._events, []
        return ev.together(events)

    def _flush(self, remote: Remote) -> None:
        """Does what the link has to tell, then sends what it has to send, until neither is left."""
        now = self._clock()
        while True:
            for packet in remote.link.step(now, min(now, self._listened_at)):
                if not self._deliver(remote, packet):
                    remote.link.dropped(now)
            updates = remote.link.take_updates()
            if not updates:
                break
            for item in updates:
                match item:
                    case Up():
                        self._up(remote, now, fresh=item.fresh)
                    case Down():
                        self._down(remote, now)
                    case Got():
                        self._got(remote, item.body)
        if not remote.closed:
            self._turns.see_to(remote, self._due(remote))

    # --- what the link reports

    def _up(self, remote: Remote, now: float, *, fresh: bool) -> None:
        remote.down_since, remote.redial_at, remote.left = None, None, False
        remote.foreign = "" if fresh else remote.foreign
        remote.shared.connected(now, fresh=fresh)
        self._offers.withdraw(remote)
        self._say(remote, self._offers.renew(remote))
        for job in sorted(remote.jobs):
            self._join(remote, job)

    def _down(self, remote: Remote, now: float) -> None:
        remote.down_since = now
        self._offers.withdraw(remote)
        self._lost(remote.peer.node, now)
        self._events += remote.shared.disconnected()
        if remote.shared.needed:  # what fills the old connection is of no use any more
            peers = max(self._book.count(job) for job in remote.shared.needed)
            remote.redial_at = now + self._between(0.0, min(_SPREAD_S, peers * _SPREAD_PEER_S))
        else:
            self._close(remote)  # the next packet of an end that needs it makes another

    def _rest(self, remote: Remote, now: float) -> None:
        """Neither end has use for the link."""
        self._say(remote, Rest())
        for packet in remote.link.step(now):
            self._deliver(remote, packet)
        self._rested(remote)

    def _rested(self, remote: Remote) -> None:
        self._events += remote.shared.rested()
        self._book.rested(remote.node_key, self._clock())
        self._close(remote)
        for job, until in remote.shared.needed.items():  # it was on its way to say so
            self._need(job, remote.peer, until)

    def _got(self, remote: Remote, raw: bytes) -> None:
        try:
            self._take_body(remote, decode_body(raw))
        except UnknownMessageError as error:
            self.refused["unknown"] += 1
            remote.foreign = sentence(unknown_message(error.kind, remote.peer.node, remote.release))
        except ProtocolError as error:
            self.refused["malformed"] += 1
            remote.trouble = error.message

    def _take_body(self, remote: Remote, body: Body) -> None:
        match body:
            case Join(job=job, needed=needed):
                self._events += remote.shared.joined(job, needed=needed)
            case Leave(job=job):
                self._events += remote.shared.left(job)
                remote.left = not remote.shared.theirs
                self._lost(remote.peer.node, self._clock())
            case Rest():
                self._rested(remote)
            case Present():
                self.refused["sender"] += 1  # over a link, where no ticket is needed
            case Bulk():
                self._offers.take(remote, body)
            case Message(message=message):
                self._message(remote, self._reader.decode(message))
            case Forward() | Forwarded():
                self._take_bundle(remote, body)
            case Ask(job=job) | StepsAsked(job=job) if job not in remote.jobs:
                self.refused["job"] += 1
            case _:
                self._mail.append(Received(remote.peer.node, body))

    def _message(self, remote: Remote, message: ev.Message) -> None:
        of_job, peer = True, remote.peer
        if isinstance(message, ev.Report):
            of_job = message.event.job == message.job
            peer = message.event.peer if isinstance(message.event, ev.NodeAttached) else peer
        if message.job not in remote.jobs or not of_job:
            self.refused["job"] += 1
        elif (peer is not remote.peer and (peer.node, peer.key) != remote.node_key) or message.node != remote.peer.node:
            self.refused["sender"] += 1
        else:
            self._events.append(message)

    def _say(self, remote: Remote, body: Body) -> bool:
        return remote.link.send(encode_body(body))

    def views(self) -> list[PeerView]:
        """Peers with a link, by node."""
        return [remote.view for _, remote in sorted(self._remotes.items(), key=lambda item: item[0])]
