"""The nodes that read a checkpoint on the store together: this one's place among them, and its parent's address. Pure.

The places follow from the topology, and, in a load, from the order that sends the ranks to the store. The address comes
from the daemon of the parent: so no message has the addresses of all nodes, and the coordinator has no part in it.
"""

from dataclasses import dataclass
from typing import Any

from ckptd.core import events as ev
from ckptd.core.actions import Action, ToNode
from ckptd.core.node.membership import Membership
from ckptd.core.node.ranks import LocalRanks
from ckptd.shared.base.ids import JobKey
from ckptd.shared.protocol.messages import PlaceKnown, Tier
from ckptd.shared.protocol.read_tree import ExchangeAddress, Place

PATIENCE_S = 10.0  # for a parent, or for this node's own rank
DIAL_S = 2.0  # for a parent that was lost some time ago, and is dialled
_KEPT = 16  # reads
_WAITS = 4  # of a node
_LOAD = "load."
_ALL = "/all"  # after the session


@dataclass(slots=True)
class _RankWaits:
    """For the address of the parent."""

    event: ev.PlaceAsked
    parent: str
    place: Place
    until: float | None = None  # None: not known before the next tick


@dataclass(slots=True)
class _NodeWaits:
    """A child, for the address of this node."""

    event: ev.ExchangeAsked
    until: float | None = None


def read_name(order: ev.LoadOrdered) -> str:
    """Names the read to which an order sends ranks."""
    return f"{_LOAD}{order.incarnation}.{order.attempt}"


def _series(read: str) -> tuple[str, int]:
    """The series of a read, and its number there: reads of all ranks are one, in which ranks may count differently."""
    name, _, number = read.rpartition(".")
    is_counted = name.endswith(_ALL) and number.isdecimal()
    return (name, int(number)) if is_counted else (read, 0)


def _trim(kept: dict[str, Any]) -> None:
    while len(kept) > _KEPT:
        del kept[next(iter(kept))]


class Readers:
    """What ranks ask of their place in a read, and other nodes of this one's address."""

    def __init__(self, job: JobKey, node: str, ranks: LocalRanks, membership: Membership) -> None:
        self._job = job
        self._node = node
        self._ranks = ranks
        self._membership = membership
        self._sent: dict[str, tuple[str, ...]] = {}  # nodes that orders sent to the store, by read, the newest last
        # Of this node, with the number of the read, by series of reads, the newest last.
        self._addresses: dict[str, tuple[int, ExchangeAddress | None]] = {}
        self._ranks_waiting: dict[str, _RankWaits] = {}  # by read
        self._nodes_waiting: dict[tuple[str, str], _NodeWaits] = {}  # by series of reads and node

    def ordered(self, order: ev.LoadOrdered) -> None:
        """Keeps which nodes an order sends to the store."""
        if order.save is not None and not order.agreed:
            self._sent[read_name(order)] = self._sent_by(order)
            _trim(self._sent)

    def others_read(self, order: ev.LoadOrdered) -> bool:
        """Whether the order sends several nodes to the store."""
        return len(self._sent.get(read_name(order), ())) > 1

    def _sent_by(self, order: ev.LoadOrdered) -> tuple[str, ...]:
        """Nodes of which ranks are sent to the store, in the order of their numbers."""
        topology = self._membership.topology
        if topology is None or not order.tiers.others:
            return self._membership.nodes if order.tiers.usual is Tier.PFS else ()
        far = order.tiers.readers(Tier.PFS, len(topology.homes))
        homes = {topology.homes[rank] for rank in far if rank < len(topology.homes)}
        return tuple(peer.node for index, peer in enumerate(topology.peers) if index in homes)

    def asked(self, event: ev.PlaceAsked) -> list[Action]:
        """A rank of this node asks for its place, and says where it serves others; None: it does not take part."""
        read = f"{event.session}/{event.read}"
        series, number = _series(read)
        self._addresses.pop(series, None)
        self._addresses[series] = number, event.exchange
        _trim(self._addresses)
        answers = [
            self._tell(self._nodes_waiting.pop(key).event, event.exchange)
            for key, waiting in [*self._nodes_waiting.items()]
            if key[0] == series and (event.exchange is not None or _series(waiting.event.read)[1] <= number)
        ]
        nodes = self._sent.get(event.read, ()) if event.read.startswith(_LOAD) else self._membership.nodes
        if self._node not in nodes or not nodes[1:] or event.exchange is None:  # no part in it: no use of a parent
            return [*answers, *self._ranks.answer(event, PlaceKnown(reply_to=event.request))]
        place = Place(nodes.index(self._node), len(nodes))
        waiting = _RankWaits(event, nodes[place.parent] if place.parent is not None else "", place)
        if not waiting.parent:
            return [*answers, *self._place(waiting, None)]
        self._ranks_waiting[read] = waiting
        return [*answers, self._ask(read, waiting.parent)]

    def _ask(self, read: str, parent: str) -> Action:
        asked = ev.ExchangeAsked(job=self._job, node=self._node, read=read)
        return ToNode(job=self._job, node=parent, message=asked)

    def _place(self, waiting: _RankWaits, parent: ExchangeAddress | None) -> list[Action]:
        number, count = waiting.place
        answer = PlaceKnown(reply_to=waiting.event.request, number=number, count=count, parent=parent)
        return self._ranks.answer(waiting.event, answer)

    def exchange_asked(self, event: ev.ExchangeAsked) -> list[Action]:
        """A node whose parent this one is asks for the address; answered once this node's rank has come."""
        series, number = _series(event.read)
        newest, address = self._addresses.get(series, (-1, None))
        if number <= newest:
            return [self._tell(event, address)]
        self._nodes_waiting.pop((series, event.node), None)
        self._nodes_waiting[series, event.node] = _NodeWaits(event)
        its = [key for key in self._nodes_waiting if key[1] == event.node]
        return [self._tell(self._nodes_waiting.pop(key).event, None) for key in its[:-_WAITS]]

    def _tell(self, event: ev.ExchangeAsked, address: ExchangeAddress | None) -> Action:
        told = ev.ExchangeTold(job=self._job, node=self._node, read=event.read, address=address)
        return ToNode(job=self._job, node=event.node, message=told)

    def exchange_told(self, event: ev.ExchangeTold) -> list[Action]:
        """The parent's address."""
        waiting = self._ranks_waiting.get(event.read)
        if waiting is None or waiting.parent != event.node:
            return []
        del self._ranks_waiting[event.read]
        return self._place(waiting, event.address)

    def peer_up(self, event: ev.PeerUp) -> list[Action]:
        """What it was asked may be lost."""
        asked = {read: w for read, w in self._ranks_waiting.items() if w.parent == event.node}
        for waiting in asked.values():
            waiting.until = None
        return [self._ask(read, event.node) for read in asked]

    def peer_down(self, event: ev.PeerDown) -> list[Action]:
        """It does not answer: its children read without it."""
        self._nodes_waiting = {key: w for key, w in self._nodes_waiting.items() if key[1] != event.node}
        lost = [read for read, w in self._ranks_waiting.items() if w.parent == event.node]
        return [action for read in lost for action in self._place(self._ranks_waiting.pop(read), None)]

    def next_deadline(self) -> float | None:
        """When to call tick."""
        return min((w.until or 0.0 for w in self._waiting), default=None)

    @property
    def _waiting(self) -> list[_RankWaits | _NodeWaits]:
        return [*self._ranks_waiting.values(), *self._nodes_waiting.values()]

    def tick(self, now: float) -> list[Action]:
        """Ends waits that have lasted too long."""
        for waiting in self._waiting:
            lost = isinstance(waiting, _RankWaits) and waiting.parent in self._membership.down
            patience_s = DIAL_S if lost else PATIENCE_S
            waiting.until = waiting.until if waiting.until is not None else now + patience_s
        late = [key for key, w in self._ranks_waiting.items() if w.until is not None and now >= w.until]
        actions = [action for key in late for action in self._place(self._ranks_waiting.pop(key), None)]
        silent = [key for key, w in self._nodes_waiting.items() if w.until is not None and now >= w.until]
        return actions + [self._tell(self._nodes_waiting.pop(key).event, None) for key in silent]
