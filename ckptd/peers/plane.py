"""The daemons of other nodes: one socket to receive from all, one to each of them, a link with each."""

import logging
import math
import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable

import zmq

from ckptd.core import events as ev
from ckptd.core.actions import ToNode
from ckptd.peers.bulk_access import Guest, Offers
from ckptd.peers.identity import Identity
from ckptd.peers.keep_alive import KeepAlive
from ckptd.peers.link import KEEPALIVES, Down, Got, Link, Up
from ckptd.peers.meetings import Meetings
from ckptd.peers.packets import (
    Ask,
    Body,
    BodyOnce,
    Bulk,
    Join,
    Leave,
    Mail,
    Message,
    Packet,
    Present,
    StepsAsked,
    decode_body,
    decode_envelope,
    encode_body,
    sentence,
    unknown_message,
    wrap,
)
from ckptd.peers.remote import Remote
from ckptd.peers.sockets import listen
from ckptd.peers.turns import Turns
from ckptd.peers.views import PeerView, Received
from ckptd.peers.zap import Authenticator
from ckptd.shared.base.errors import ProtocolError, UnknownMessageError
from ckptd.shared.base.ids import JobKey
from ckptd.shared.base.log_line import line
from ckptd.shared.protocol import node_messages
from ckptd.shared.protocol.topology import Peer, Rendezvous, Topology

log = logging.getLogger("ckptd")
_CONNECT_MOST = 32  # per round of the loop: each takes most of a millisecond
_RECEIVE_MOST = 256  # per round of the loop
_MOST_S = 0.01  # of a round, for either
_PATIENCE_S = 600.0  # with a silent peer that the job's present topology does not name
_MAX_SOCKETS = 1 << 15


class PeerPlane:
    """Owns its sockets. Nothing blocks; all but ``bulk_address`` and ``bulk_guest`` belongs to the loop's thread.

    What happens is returned as events by ``receive`` and ``tick``, never from within another call.
    """

    _listened_at = math.inf  # all that had arrived by then was received

    def __init__(self, identity: Identity, *, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._identity = identity
        self._node = identity.node
        self._timeout_s = timeout_s
        self._clock = clock
        self._instance = _random()
        self._remotes: dict[tuple[str, str], Remote] = {}  # by node and key
        self._jobs: dict[JobKey, dict[str, Remote]] = {}  # by node
        self._unconnected: deque[Remote] = deque()
        self._topologies: dict[JobKey, frozenset[str]] = {}  # nodes of the present one
        self._keys: Counter[str] = Counter()  # of remotes: sites may give one to many
        self._events, self._mail = list[ev.Event](), list[Received]()
        self._turns, self._offers, self._once = Turns(), Offers(), BodyOnce()
        self._keep_alive = KeepAlive(self._send_signs_of_life, timeout_s / KEEPALIVES)
        self.refused: Counter[str] = Counter()  # what was dropped, by reason
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, _MAX_SOCKETS)
        self._zap, self.meetings = Authenticator(self._context), Meetings(self._context)
        self._is_known = lambda key: key in self._keys or self.meetings.of(key) is not None
        try:
            self._router, endpoint = listen(self._context, identity)
        except BaseException:
            self._zap.close()
            self._context.destroy(0)
            raise
        identity.keep_port(int(endpoint.rpartition(":")[2]))
        self.peer = Peer(identity.node, identity.arena, endpoint, identity.keys.public, identity.domain)

    # --- whom to talk to

    def meet(self, job: JobKey, peers: Iterable[Peer]) -> None:
        """Accepts these daemons for the job, beside those it has. One per node: a new key replaces the old."""
        nodes = self._jobs.setdefault(job, {})
        for peer in peers:
            if peer.node == self._node:
                continue
            remote = self._remote(peer)
            before = nodes.get(peer.node)
            if before is not remote:
                if before is not None:
                    self._part(before, job)
                nodes[peer.node] = remote
                remote.jobs.add(job)
                self._offers.refresh(remote)
                self._say(remote, Join(job))
                self._events += remote.shared.announce() if remote.link.up else []
            elif peer.endpoint != remote.named_at:
                remote.named_at = peer.endpoint
                remote.move(peer.endpoint)
            self._flush(remote)

    def keep(self, job: JobKey, topology: Topology) -> None:
        """Meets its peers. Those of earlier topologies stay, for what they still hold, until they are long silent."""
        self._topologies[job] = frozenset(topology.nodes)
        self.meet(job, topology.peers)

    def meet_at(self, job: JobKey, session: str, rendezvous: Rendezvous) -> None:
        """Meets the session's daemons: here, each that has its ticket; else at the one that the rendezvous names."""
        if rendezvous.peer.node == self._node:
            self._zap.admit(self.meetings.expect(job, session, rendezvous.ticket))
        else:
            self.meet(job, [rendezvous.peer])
            self.meetings.show(job, session, rendezvous, self.peer)

    def _former(self, remote: Remote) -> list[JobKey]:
        """Jobs that have moved on to other nodes, and keep this one for what it still holds."""
        node = remote.peer.node
        return sorted(job for job in remote.jobs if node not in self._topologies.get(job, (node,)))

    def _part_from_former(self, remote: Remote) -> None:
        for job in self._former(remote):
            del self._jobs[job][remote.peer.node]
            self._part(remote, job)

    def forget(self, job: JobKey) -> None:
        """The job is over here: notifies its peers, and drops those of no other job."""
        self._topologies.pop(job, None)
        self.meetings.forget(job)
        for remote in self._jobs.pop(job, {}).values():
            self._part(remote, job, tell=False)

    def send(self, job: JobKey, node: str, message: ev.Message) -> bool:
        """Queues the message; False: the node is not up for the job. Raises ProtocolError when it is too large."""
        remote = self._up_for(job, node)
        if remote is None:
            return False
        sent = remote.link.send(self._once.of(message))
        self._flush(remote)
        return sent

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
        remote = self._jobs.get(job, {}).get(node)
        return remote if remote is not None and job in remote.shared.told else None

    def take_mail(self) -> list[Received]:
        """Questions and answers that ``receive`` found since the last call."""
        mail, self._mail = self._mail, []
        return mail

    def carry(self, action: ToNode) -> None:
        """Sends to the node, or to all others of the job. One that is not up gets nothing; it is resent later."""
        nodes = [action.node] if action.node is not None else list(self._jobs.get(action.job, {}))
        for node in nodes:
            try:
                self.send(action.job, node, action.message)
            except ProtocolError as error:
                log.error(line("message lost", job=action.job.job, node=node, error=error))  # noqa: TRY400 - the message says it all

    def _remote(self, peer: Peer) -> Remote:
        place = (peer.node, peer.key)
        if place not in self._remotes:
            link = Link(instance=self._instance, timeout_s=self._timeout_s, new_end=_random)
            remote = Remote(self._context, peer, self._identity.keys, link)
            remote.down_since = self._clock()
            self._remotes[place] = remote
            self._keys[peer.key] += 1
            self._zap.admit(peer.key)
            self._unconnected.append(remote)
            self._keep_alive.start()
        return self._remotes[place]

    def _part(self, remote: Remote, job: JobKey, *, tell: bool = True) -> None:
        self._say(remote, Leave(job))
        self._flush(remote)
        self._events += remote.shared.parted(job, tell=tell)
        self._offers.refresh(remote)
        if not remote.jobs:
            place = (remote.peer.node, remote.peer.key)
            del self._remotes[place]
            self._keys -= Counter([remote.peer.key])
            self._offers.withdraw(remote)
            remote.close()

    # --- loop

    @property
    def pollables(self) -> list[zmq.Socket[bytes]]:
        """For a zmq.Poller, to be read by ``receive``."""
        return [self._router, self._zap.pollable]

    def turn_begins(self) -> None:
        """The loop is at work from now on: should that take long, a thread sends signs of life."""
        self._keep_alive.begins(time.monotonic())

    def turn_ends(self) -> None:
        """The loop waits again."""
        self._keep_alive.ends()

    def receive(self) -> list[ev.Event]:
        """What waits, at most so much that the loop continues."""
        now = self._clock()
        self._zap.serve(self._is_known, now)
        touched: dict[int, Remote] = {}
        for _ in range(_RECEIVE_MOST):
            try:
                frames = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                self._listened_at = now
                break
            remote = self._take(frames, now)
            if remote is not None:
                touched[id(remote)] = remote
            if self._clock() >= now + _MOST_S:
                break
        for remote in touched.values():
            self._flush(remote)
        return self._take_events()

    def tick(self) -> list[ev.Event]:
        """What is due: resends, signs of life, peers that fell silent."""
        now = self._clock()
        for _ in range(min(_CONNECT_MOST, len(self._unconnected))):
            remote = self._unconnected.popleft()
            if remote.jobs:  # else it was dropped meanwhile
                remote.connect()
                self._flush(remote)
            if self._clock() >= now + _MOST_S:
                break
        self.meetings.tick(now, self._up_for)
        for remote in self._turns.take(now):
            if not remote.jobs:
                continue
            self._flush(remote)
            remote.look(now)
            self._events += remote.shared.overdue(now)
            if remote.down_since is not None and now >= remote.down_since + _PATIENCE_S:
                self._part_from_former(remote)
        return self._take_events()

    def next_deadline(self) -> float | None:
        """When ``tick`` must be called at the latest; None: there is nobody to talk to."""
        if self._events or self._unconnected:
            return 0.0
        shown = self.meetings.next_deadline()
        return self._turns.next if shown is None else min(shown, self._turns.next or shown)

    def close(self) -> None:
        """Gives all sockets back. Blocks for a moment, if last words are on their way."""
        self._keep_alive.close()
        for remote in self._remotes.values():
            remote.close()
        self._remotes.clear()
        self._jobs.clear()
        self.meetings.close()
        self._router.close(0)
        self._zap.close()
        self._context.term()

    def _take_events(self) -> list[ev.Event]:
        events, self._events = self._events, []
        return events

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
        remote = self._remotes.get((envelope.sender, key))
        if remote is None or envelope.receiver != self._node:
            self.refused["sender" if remote is None else "receiver"] += 1
            return None
        if envelope.endpoint and envelope.endpoint != remote.peer.endpoint:
            remote.move(envelope.endpoint)
        remote.trouble, remote.release = "", envelope.release
        remote.link.receive(envelope.packet, now)
        return remote

    def _flush(self, remote: Remote) -> None:
        """Does what the link has to tell, then sends what it has to send, until neither is left."""
        now = self._clock()
        while True:
            for packet in remote.link.step(now, min(now, self._listened_at)):
                self._transmit(remote, packet)
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
        by = remote.link.next_deadline()
        self._turns.see_to(remote, min(by, remote.shared.awaited_until) if remote.shared.awaited else by)

    def _transmit(self, remote: Remote, packet: Packet) -> None:
        remote.transmit(wrap(packet, self._node, remote.peer.node, self.peer.endpoint))

    def _send_signs_of_life(self) -> None:
        """In a thread of its own, in the middle of a long turn."""
        for remote in list(self._remotes.values()):
            packet = remote.link.keepalive
            if packet is not None:
                self._transmit(remote, packet)

    # --- what the link reports

    def _up(self, remote: Remote, now: float, *, fresh: bool) -> None:
        remote.down_since, remote.left = None, False
        remote.foreign = "" if fresh else remote.foreign
        remote.shared.connected(now, fresh=fresh)
        self._offers.withdraw(remote)
        self._say(remote, self._offers.renew(remote))
        for job in sorted(remote.jobs):
            self._say(remote, Join(job))

    def _down(self, remote: Remote, now: float) -> None:
        remote.down_since = now
        self._offers.withdraw(remote)
        self._events += remote.shared.disconnected()
        self.meetings.lost(remote.peer.node, now)
        self._unconnected.append(remote)  # what fills the old connection is of no use any more

    def _got(self, remote: Remote, raw: bytes) -> None:
        try:
            body = decode_body(raw)
            match body:
                case Join(job=job):
                    self._events += remote.shared.joined(job)
                case Leave(job=job):
                    self._events += remote.shared.left(job)
                    remote.left = not remote.shared.theirs
                    self.meetings.lost(remote.peer.node, self._clock())
                case Present():
                    self.refused["sender"] += 1  # over a link, where no ticket is needed
                case Bulk():
                    self._offers.take(remote, body)
                case Message(message=message):
                    self._message(remote, node_messages.decode(message))
                case Ask(job=job) | StepsAsked(job=job) if job not in remote.jobs:
                    self.refused["job"] += 1
                case _:
                    self._mail.append(Received(remote.peer.node, body))
        except UnknownMessageError as error:
            self.refused["unknown"] += 1
            remote.foreign = sentence(unknown_message(error.kind, remote.peer.node, remote.release))
        except ProtocolError as error:
            self.refused["malformed"] += 1
            remote.trouble = error.message

    def _message(self, remote: Remote, message: ev.Message) -> None:
        of_job = not isinstance(message, ev.Report) or message.event.job == message.job
        peer = remote.peer
        if isinstance(message, ev.Report) and isinstance(message.event, ev.NodeAttached):
            peer = message.event.peer
        if message.job not in remote.jobs or not of_job:
            self.refused["job"] += 1
        elif (peer.node, peer.key) != (remote.peer.node, remote.peer.key) or message.node != remote.peer.node:
            self.refused["sender"] += 1
        else:
            self._events.append(message)

    def _say(self, remote: Remote, body: Body) -> bool:
        return remote.link.send(encode_body(body))

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
        return self._offers.address(self._jobs.get(job, {}).get(node))

    def bulk_guest(self, link_id: str) -> Guest | None:
        """Who comes under this link id; None: nobody, or a link that is over. From any thread."""
        return self._offers.guests.get(link_id)

    # --- status

    def problems(self) -> list[str]:
        """What is wrong between daemons, and what to do, a line each. Nobody need do anything about former nodes."""
        now = self._clock()
        current = [one for one in self._remotes.values() if len(self._former(one)) < len(one.jobs)]
        lines = [problem for remote in current if (problem := remote.problem(now))]
        lines += [*self.meetings.problems(), *self._zap.problems(self._is_known, now)]
        if self._identity.problem and self._remotes:
            lines.append(self._identity.problem)
        return lines

    def views(self) -> list[PeerView]:
        """All peers, by node."""
        return [
            PeerView(
                remote.peer.node, remote.peer.endpoint, remote.link.up, remote.link.queued, tuple(sorted(remote.jobs))
            )
            for _, remote in sorted(self._remotes.items(), key=lambda item: item[0])
        ]


def _random() -> int:
    return secrets.randbits(61) + 1
