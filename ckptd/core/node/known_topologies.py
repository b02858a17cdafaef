"""The topologies that a node knows: that of its session, which it asks for by digest, and those that others ask for.

The first member of a redundancy set asks the coordinator, the others ask that member. Pure.
"""

from collections.abc import Iterable

from ckptd.core import events as ev
from ckptd.core.actions import Action, KeepTopology, MeetPeers, Note, ToNode
from ckptd.core.links import Links
from ckptd.core.placement import Placement, of_peers
from ckptd.shared.base.errors import ProtocolError
from ckptd.shared.base.ids import JobKey
from ckptd.shared.protocol.topology import Peer, Place, Topology

PATIENCE_S = 10.0  # with the node that was asked; then the coordinator is asked, which has what it made
_MAX_ASKED = 16  # topologies that others ask for and that are not here; of each, one word of each node


class KnownTopologies:
    """``present``: of the session, once it is here; ``outside``: nodes that the job ran on before."""

    def __init__(self, job: JobKey, node: str, links: Links) -> None:
        self._job, self._node, self._links = job, node, links
        self.session = ""  # of which ``present`` is the topology, also after a restart
        self.place: Place | None = None
        self.present: Topology | None = None
        self.outside: tuple[Peer, ...] = ()
        self.since = 0  # the epoch in which the job first came to this arena
        self._epoch = 0
        self._known: dict[bytes, Topology] = {}  # for this node and for others
        self._wanted: set[bytes] = set()
        self._outside_digest = b""
        self._coordinator = node
        self._asked = ""  # the node that is to send what is wanted
        self._until: float | None = None  # it is waited for; None: not known before the next tick
        self._askers: dict[bytes, dict[str, None]] = {}

    @property
    def digest(self) -> bytes:
        """Of the session's topology, here or on its way."""
        return self.place.digest if self.place is not None else b""

    @property
    def nodes(self) -> tuple[str, ...]:
        """Those of the session that are known."""
        if self.present is not None:
            return self.present.nodes
        return tuple(peer.node for peer in self.place.members) if self.place is not None else ()

    def digest_for(self, session: str) -> bytes:
        """Of that session's topology, if it is here."""
        return self.present.digest if self.present is not None and session == self.session else b""

    def has(self, place: Place | None) -> bool:
        """Whether this place is known; None: nothing else than what is known."""
        return place is None or place == self.place

    def opened(self, order: ev.SessionOpened, former: tuple[str, ...]) -> list[Action]:
        """The session is the job now: asks for what of it is not here."""
        if order.place is not None:
            self.place = order.place
        elif order.session != self.session:  # its coordinator does not know its nodes yet
            self.place = None
        self.session, self._epoch, self._coordinator = order.session, order.epoch, order.node
        self._outside_digest = order.outside
        self.present = self._known.get(self.digest)
        self.outside = self._known[order.outside].peers if order.outside in self._known else ()
        self._known = {digest: t for digest, t in self._known.items() if digest in (self.digest, order.outside)}
        self._wanted = {digest for digest in (self.digest, order.outside) if digest} - self._known.keys()
        self._asked = ""
        members = self.place.members if self.place is not None and self.present is None else ()
        return [*self._meet(members), *self._keep(former), *self._ask()]

    def kept(self, event: ev.TopologyKept) -> list[Action]:
        """What an earlier process of this daemon knew."""
        self.session, self.present, self.outside = event.session, event.topology, event.outside
        self.since, self._epoch, self._coordinator = event.since, event.epoch, event.topology.coordinator
        kept = (event.topology, of_peers(event.outside))
        self._known |= {topology.digest: topology for topology in kept if topology is not None}
        self.place = Placement(event.topology).place(self._node)
        return self._meet((*event.topology.peers, *event.outside))

    def _meet(self, peers: Iterable[Peer]) -> list[Action]:
        others = tuple(peer for peer in peers if peer.node != self._node)
        return [MeetPeers(job=self._job, peers=others)] if others else []

    def _keep(self, former: tuple[str, ...]) -> list[Action]:
        if self.present is None:
            return []
        self.since = self.since or self._epoch
        keep = KeepTopology(
            job=self._job,
            session=self.session,
            topology=self.present,
            epoch=self._epoch,
            since=self.since,
            outside=self.outside,
            former=former,
        )
        return [*self._meet((*self.present.peers, *self.outside)), keep]

    # --- by digest

    def _ask(self, *, late: bool = False) -> list[Action]:
        """Asks one node for what is missing: the first of the set, which all of them ask, or the coordinator.

        late: one was asked, and has sent nothing.
        """
        if not self._wanted or self._asked:
            return []
        first = self.place.members[0].node if self.place is not None and self.place.members else self._node
        able = first != self._node and first not in self._links.down and not late
        self._asked, self._until = first if able else self._coordinator, None
        return [self._to(self._asked, digest) for digest in sorted(self._wanted)]

    def _to(self, node: str, digest: bytes) -> Action:
        return ToNode(job=self._job, node=node, message=ev.TopologyAsked(job=self._job, node=self._node, digest=digest))

    def asked_by(self, event: ev.TopologyAsked) -> list[Action]:
        """Answered at once, or as soon as it is here."""
        if event.digest in self._known:
            return [self._answer(event.node, self._known[event.digest])]
        if event.node != self._node:
            self._askers.setdefault(event.digest, {})[event.node] = None
            while len(self._askers) > _MAX_ASKED:
                del self._askers[next(iter(self._askers))]
        return []

    def _answer(self, node: str, topology: Topology) -> Action:
        message = ev.TopologyReported(job=self._job, node=self._node, packed=topology.packed)
        return ToNode(job=self._job, node=node, message=message)

    def reported(self, event: ev.TopologyReported, former: tuple[str, ...]) -> list[Action]:
        """Takes what was asked for, and what the coordinator on this node has made. Another digest is refused."""
        digest = event.packed.digest
        if digest not in self._wanted and event.node != self._node:
            return []
        try:
            topology = self._known.get(digest) or Topology.unpacked(event.packed)
        except ProtocolError as error:
            return [Note(job=self._job, text=f"node {event.node} sent no topology: {error.message}")]
        self._known[digest] = topology
        answers = [self._answer(node, topology) for node in self._askers.pop(digest, {})]
        if digest not in self._wanted:
            return answers
        self._wanted.discard(digest)
        if digest == self.digest:
            self.present = topology
        if digest == self._outside_digest:
            self.outside = topology.peers
        return [*self._keep(former), *answers]

    def peer_up(self, node: str) -> list[Action]:
        """Earlier messages to it may be lost."""
        if node == self._asked:
            self._asked = ""
        return self._ask()

    def peer_down(self, node: str) -> list[Action]:
        """It answers nothing."""
        if node == self._asked:
            self._asked = ""
        return self._ask()

    def next_deadline(self) -> float | None:
        """When to call tick; in the past: at once."""
        if not self._wanted or not self._asked:
            return None
        return self._until if self._until is not None else float("-inf")

    def tick(self, now: float) -> list[Action]:
        """Asks again for what has not come."""
        if not self._wanted or not self._asked:
            return []
        if self._until is None:
            self._until = now + PATIENCE_S
        if now < self._until:
            return []
        self._asked = ""
        actions, self._until = self._ask(late=True), now + PATIENCE_S
        return actions
