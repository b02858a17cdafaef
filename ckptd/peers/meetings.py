"""Tickets of sessions: daemons that show one are accepted; those that this daemon shows to others.

A ticket and the session's name make a key pair that all daemons of the session can make, and no other. A daemon that
the coordinator does not know yet connects under this key, encrypted as all connections are, and says who it is.
"""

import contextlib
import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import zmq
from zmq.utils import z85

from ckptd.peers.keys import KeyPair
from ckptd.peers.packets import Envelope, Packet, Present, decode_body, encode_body, wrap
from ckptd.peers.sockets import dial
from ckptd.shared.base.errors import ProtocolError
from ckptd.shared.base.ids import JobKey
from ckptd.shared.protocol.topology import Peer, Rendezvous

_MAX_OF_JOB = 16  # sessions that wait to join at a time
_AGAIN_S = 1.0  # after the ticket was shown, doubled each time, up to
_AGAIN_MAX_S = 8.0
_BACK_S = 3.0  # a link that was up comes up again without a ticket, unless the other daemon has lost its arena
_HWM = 4

Key = tuple[JobKey, str]  # job, session


def session_keys(job: JobKey, session: str, ticket: bytes) -> KeyPair:
    """The key pair of a session's ticket."""
    name = msgspec.msgpack.encode([job.store, job.job, session])
    secret = z85.encode(hashlib.blake2b(name, key=ticket, digest_size=32, person=b"ckptd meeting").digest())
    return KeyPair(zmq.curve_public(secret).decode(), secret.decode())


@dataclass(slots=True)
class Meeting:
    """A session whose daemons are accepted here by its ticket."""

    job: JobKey
    session: str
    came: dict[str, str] = field(default_factory=dict)  # node -> key
    twin: str = ""  # a second daemon of one name, in words

    def accepted(self, envelope: Envelope) -> Peer | None:
        """The daemon that shows the ticket; None: the packet is none, or another daemon of that name has come."""
        try:
            body = decode_body(envelope.packet.body)
        except ProtocolError:
            return None
        if not isinstance(body, Present) or (body.job, body.session) != (self.job, self.session):
            return None
        peer = body.peer
        if peer.node != envelope.sender:
            return None
        if self.came.setdefault(peer.node, peer.key) == peer.key:
            return peer
        self.twin = (
            f"a second daemon calls itself node {peer.node!r}, at {peer.endpoint}: give each daemon a name of its own "
            "(CKPTD_NODE); if it has lost its arena, reconnect the job"
        )
        return None


class _Shown:
    """A ticket that this daemon shows to the one that coordinates the session."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", keys: KeyPair, to: Peer, frame: bytes) -> None:
        self._context, self._keys, self._frame = context, keys, frame
        self.to = to
        self.again_at, self._wait_s = 0.0, _AGAIN_S
        self._socket: zmq.Socket[bytes] | None = None

    def show(self, now: float) -> None:
        """Connects, if it has not, and sends who this daemon is. Does not block."""
        self.again_at, self._wait_s = now + self._wait_s, min(2 * self._wait_s, _AGAIN_MAX_S)
        with contextlib.suppress(zmq.ZMQError, ValueError):  # no descriptor is left, or no endpoint: later
            if self._socket is None:
                self._socket = dial(self._context, self.to, self._keys, hwm=_HWM, waits=True)
            self._socket.send(self._frame, zmq.NOBLOCK)

    def rest(self) -> None:
        """The other daemon knows this one: nothing is due until the link to it is down."""
        self.again_at, self._wait_s = math.inf, _AGAIN_S
        self.close()

    def lost(self, now: float) -> None:
        """The link is down."""
        self.again_at = min(self.again_at, now + _BACK_S)

    def close(self) -> None:
        """Gives the socket back."""
        if self._socket is not None:
            self._socket.close(0)
        self._socket = None


class Meetings:
    """Owns its sockets. Nothing blocks."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        self._context = context
        self._here: dict[str, Meeting] = {}  # by public key
        self._keys: dict[Key, str] = {}
        self._shown: dict[Key, _Shown] = {}

    def expect(self, job: JobKey, session: str, ticket: bytes) -> str:
        """Accepts daemons with this ticket from here on. Returns its public key."""
        public = session_keys(job, session, ticket).public
        if self._keys.get((job, session)) != public:
            self.end(job, session)
            for old in [key for key in self._keys if key[0] == job][: 1 - _MAX_OF_JOB]:
                self.end(*old)
            self._keys[job, session], self._here[public] = public, Meeting(job, session)
        return public

    def of(self, public: str) -> Meeting | None:
        """The session whose ticket this key is of."""
        return self._here.get(public)

    def show(self, job: JobKey, session: str, rendezvous: Rendezvous, own: Peer) -> None:
        """Shows the ticket to the daemon of the rendezvous, until it knows this one."""
        keys = session_keys(job, session, rendezvous.ticket)
        body = encode_body(Present(job, session, own))
        frame = wrap(Packet(0, 0, 0, hello=True, body=body), own.node, rendezvous.peer.node, own.endpoint)
        self.end(job, session)
        self._shown[job, session] = _Shown(self._context, keys, rendezvous.peer, frame)

    def tick(self, now: float, answers: Callable[[JobKey, str], object]) -> None:
        """Shows the tickets that are due, but not to daemons that answer. answers: None for one that does not."""
        for (job, _), shown in self._shown.items():
            if now < shown.again_at:
                continue
            if answers(job, shown.to.node) is not None:
                shown.rest()
            else:
                shown.show(now)

    def lost(self, node: str, now: float) -> None:
        """The node does not answer any more."""
        for shown in self._shown.values():
            if shown.to.node == node:
                shown.lost(now)

    def next_deadline(self) -> float | None:
        """When tick has something to do."""
        due = min((shown.again_at for shown in self._shown.values()), default=math.inf)
        return None if due == math.inf else due

    def end(self, job: JobKey, session: str) -> None:
        """The session's ticket is good for nothing any more."""
        public = self._keys.pop((job, session), None)
        if public is not None:
            self._here.pop(public, None)
        shown = self._shown.pop((job, session), None)
        if shown is not None:
            shown.close()

    def forget(self, job: JobKey) -> None:
        """The job is over here."""
        for key in [key for key in (*self._keys, *self._shown) if key[0] == job]:
            self.end(*key)

    def problems(self) -> list[str]:
        """Daemons that were not accepted, and what to do."""
        return [meeting.twin for meeting in self._here.values() if meeting.twin]

    def close(self) -> None:
        """Gives all sockets back."""
        for shown in self._shown.values():
            shown.close()
        self._shown.clear()
