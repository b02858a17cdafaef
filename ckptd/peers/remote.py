"""Another daemon as this one sees it: its link, the socket to it, and the jobs that both belong to."""

import contextlib
import math
import threading

import msgspec
import zmq

from ckptd.peers.keys import KeyPair
from ckptd.peers.link import Link
from ckptd.peers.packets import Bulk
from ckptd.peers.path import Path
from ckptd.peers.shared_jobs import SharedJobs
from ckptd.peers.sockets import dial
from ckptd.peers.views import PeerView
from ckptd.peers.watches import Watch, Watches
from ckptd.shared.base.ids import JobKey
from ckptd.shared.protocol.topology import Peer

_HWM = 256  # packets; beyond it one is dropped, and missed when the other end receives a later one
_LAST_WORDS_MS = 500
_LOOK_S = 1.0  # down for longer than this, it is a problem
_WATCH_S = 3.0  # and its socket is watched, to learn why: not in the first seconds, in which all nodes come at once
_AGAIN_S = 5.0  # after a socket to it could not be made


class Remote:
    """Owns the socket. Nothing here blocks."""

    def __init__(
        self, context: "zmq.Context[zmq.Socket[bytes]]", watches: Watches, peer: Peer, keys: KeyPair, link: Link
    ) -> None:
        self._context = context
        self._watches = watches
        self._keys = keys
        self._socket: zmq.Socket[bytes] | None = None
        self._using = threading.Lock()  # the socket, between the loop and the thread that sends signs of life
        self._watch: Watch | None = None
        self._refused = False
        self.peer = peer
        self.link = link
        self.down_since: float | None = None
        self.shared = SharedJobs(peer.node, link.timeout_s)
        self.offer: Bulk | None = None  # made to it, for the present connection
        self.bulk: Bulk | None = None  # it made
        self.path = Path(link.timeout_s)
        self.asleep = False  # no connection is wanted: a leader passes its packets on
        self.woken_at = 0.0
        self.redial_at: float | None = None  # a connection in place of the one that is down
        self.closed = False  # its link is over
        self.due = math.inf  # when its plane looks at it, at the latest
        self.left = False  # it left the last job: its silence is no problem
        self.trouble = ""  # its last message that could not be processed
        self.release = ""  # of its ckptd, from its last packet
        self.foreign = ""  # a message of this process that only another release of ckptd knows
        self._obstacle = ""  # why there is no socket to it, for now
        self._tried_at = 0.0

    @property
    def node_key(self) -> tuple[str, str]:
        """Node and key."""
        return self.peer.node, self.peer.key

    @property
    def jobs(self) -> set[JobKey]:
        """That this daemon shares with it."""
        return self.shared.ours

    @property
    def connects(self) -> bool:
        """Whether nothing is the matter with its connection: ``look`` has nothing to do."""
        return not self._obstacle and self._watch is None

    def connect(self) -> None:
        """A new connection; what waits on the old one is dropped. To be called again after an endpoint changed.

        Without one (no descriptor is left, the key is none) it is down, and tried again in ``look``.
        """
        self._disconnect(0)
        self.asleep = False
        if not self.peer.endpoint:
            return
        self._obstacle = ""
        try:
            self._socket = dial(self._context, self.peer, self._keys, hwm=_HWM, waits=False)
        except (zmq.ZMQError, ValueError) as error:
            self._obstacle = f"no connection can be made: {error}"

    def move(self, endpoint: str) -> None:
        """It is reached elsewhere now."""
        if endpoint != self.peer.endpoint:
            self.peer = msgspec.structs.replace(self.peer, endpoint=endpoint)
            if not self.asleep:
                self.connect()

    def sleep(self) -> None:
        """Gives the connection back until ``connect``; what was sent goes out in the background."""
        self._disconnect(_LAST_WORDS_MS)
        self.asleep, self.redial_at = True, None

    def transmit(self, frame: bytes) -> bool:
        """Hands a packet to ZeroMQ; False: it is dropped, there is no connection or no room. From any thread."""
        with self._using, contextlib.suppress(zmq.ZMQError):
            if self._socket is not None:
                self._socket.send(frame, zmq.NOBLOCK)
                return True
        return False

    def close(self) -> None:
        """Last words go out in the background."""
        self._disconnect(_LAST_WORDS_MS)

    def _disconnect(self, linger_ms: int) -> None:
        self._unwatch()
        with self._using:
            if self._socket is not None:
                self._socket.close(linger_ms)
            self._socket = None

    @property
    def view(self) -> PeerView:
        """For status."""
        jobs = tuple(sorted(self.jobs))
        return PeerView(self.peer.node, self.peer.endpoint, self.link.up, self.link.queued, jobs)

    # --- why it does not answer

    def look(self, now: float) -> None:
        """While it is down, follows what becomes of the attempts to connect."""
        if self._obstacle and not self.asleep and now >= self._tried_at + _AGAIN_S:
            self._tried_at = now
            self.connect()
        if self.link.up or self.down_since is None or now < self.down_since + _WATCH_S or self._socket is None:
            self._unwatch()
            return
        if self._watch is None:
            self._watch = self._watches.begin(self._socket)
        self._refused = self._watch is not None and self._watch.refused()

    def _unwatch(self) -> None:
        if self._watch is not None:
            self._watch.end()
        self._watch = None

    def problem(self, now: float) -> str:
        """Why it cannot be spoken to, and what to do; empty when it can."""
        if self.foreign:
            return self.foreign
        if self.link.up or self.left or self.down_since is None or now < self.down_since + _LOOK_S:
            return ""
        who = f"daemon of node {self.peer.node} at {self.peer.endpoint or 'no address'}"
        seconds = f"for {now - self.down_since:.0f} s"
        if self.trouble or self._obstacle:
            return f"{who}: {self.trouble or self._obstacle}"
        if not self.peer.endpoint:
            return f"{who} cannot be reached: set peer_address there, restart it, and reconnect the job"
        if self._refused:
            return (
                f"{who} refuses this daemon's key, or has another key than the ranks named, {seconds}: "
                "if its arena was lost or its key_file changed, reconnect the job; else something else answers there"
            )
        return f"{who} does not answer {seconds}: is it running, and its port open to this node?"
