"""This node's part in protecting a job: offers its column to its set, encodes when all columns are known. Pure.

The coordinator orders one save at a time for all sets, so the members of a set always encode the same one.
"""

from collections.abc import Container

from ckptd.core import events as ev
from ckptd.core.actions import Action, DropChunk, Encode, StopEncode, ToNode
from ckptd.core.links import Links
from ckptd.core.node.membership import Membership
from ckptd.core.node.slots import SlotTable
from ckptd.shared.base.ids import JobKey, Run, SaveId
from ckptd.shared.format.schemes import Scheme
from ckptd.shared.protocol.messages import End
from ckptd.shared.protocol.parity_types import DataColumn, ParityChunk
from ckptd.shared.protocol.topology import Place

Key = tuple[SaveId, int]  # save, epoch
_MAX_OFFERED = 4  # saves whose offers are kept before they are ordered here


class Protection:
    """One job's parity on one node."""

    def __init__(self, job: JobKey, node: str, links: Links) -> None:
        self._job = job
        self._node = node
        self._links = links
        self.members: tuple[str, ...] = (node,)
        self.scheme = Scheme.NONE
        self.epoch = 0
        self._protects = False  # the job has more than one node and a scheme, though this node may be in no set
        self.chunks: dict[Key, ParityChunk] = {}  # sealed here
        self.newest: Key | None = None  # the newest save that the coordinator called protected
        self.ordered: Key | None = None
        self.copying: Key | None = None  # to the store: stays until that has ended
        self._running: ParityChunk | None = None
        self._offers: dict[Key, dict[str, DataColumn]] = {}
        self.foreign: frozenset[Run] = (
            frozenset()
        )  # runs that are not the job's: their parity stays until it is given up

    @property
    def is_encoding(self) -> bool:
        """Whether an encode runs here."""
        return self._running is not None

    def make_again(self, key: Key) -> list[Action]:
        """What is sealed is damaged: made again from the same columns, where the newest protected save needs it.

        Nothing where it does not, or another encode runs. The outcome is an Encoded, as of any.
        """
        chunk, ordered = self.chunks.get(key), self.ordered
        if chunk is None or self.is_encoding or key != self.newest or key == self.copying:
            return []
        if ordered is not None and ordered not in self.chunks:
            return []  # a newer one goes first
        self._running = self.chunks.pop(key)
        return [DropChunk(job=self._job, save=key[0], epoch=key[1]), Encode(job=self._job, chunk=chunk)]

    @property
    def wanted(self) -> set[SaveId]:
        """Saves whose slots must stay: being encoded, or needed when a node of the set is lost."""
        return {key[0] for key in self.chunks} | {key[0] for key in (self.ordered, self.newest) if key is not None}

    @property
    def waits(self) -> SaveId | None:
        """The save whose own column is still to be offered."""
        if self.ordered is None or self.ordered in self.chunks:
            return None
        return None if self._node in self._offers.get(self.ordered, {}) else self.ordered[0]

    def chunk_for(self, order: ev.FetchOrdered) -> ParityChunk | None:
        """The chunk here from which the order's segment can be rebuilt, if it is of this set."""
        return self.chunks.get((order.save, order.epoch))

    def has(self, save: SaveId | None) -> bool:
        """Whether a chunk of the save is sealed here, of any epoch."""
        return any(key[0] == save for key in self.chunks)

    def moved(self, place: Place | None, epoch: int) -> list[Action]:
        """The job runs on these nodes now; what is sealed stays until a newer checkpoint is protected."""
        if place is None:
            return []
        members = tuple(peer.node for peer in place.members) or (self._node,)
        if (members, epoch) == (self.members, self.epoch):
            return []  # a restarted daemon receives what it kept: later offers of members stay
        actions = self._stop()
        self.ordered, self.members = None, members
        self._offers = {
            key: {node: column for node, column in offers.items() if node in members or key[1] > epoch}
            for key, offers in self._offers.items()
            if key[1] >= epoch
        }
        self.scheme = place.scheme.among(len(self.members))
        self._protects = place.scheme.among(place.nodes) is not Scheme.NONE
        self.epoch = epoch
        return actions

    def adopt(self, event: ev.ChunkAdopted) -> list[Action]:
        """A whole chunk was found at start. It shows what this node offered, which another may wait for."""
        chunk = event.chunk
        self.chunks[chunk.save, chunk.epoch] = chunk
        self._offers[chunk.save, chunk.epoch] = {column.node: column for column in chunk.columns}
        return []

    def order(self, order: ev.EncodeOrdered) -> list[Action]:
        """The coordinator wants this save encoded, and has given up what it wanted before."""
        key = (order.save, order.epoch)
        if order.epoch != self.epoch or self.scheme is Scheme.NONE:
            return [self._outcome(key, "this node is in no set that could encode it")]
        if key in self.chunks:
            self.ordered = key
            own = self._offers.get(key, {}).get(self._node)
            return [self._outcome(key, ""), *(self._tell(key, own, self.members) if own is not None else [])]
        actions: list[Action] = [] if self.ordered == key else self._stop()
        self.ordered = key
        if self.newest is not None:  # what is newer may be protected too, though this node has not received it
            newest = self.newest
            actions += self._drop_all_but({key, *(held for held in self.chunks if held >= newest)})
        actions += self._encode()
        offered = self._offers.get(key, {})
        silent = [member for member in self.members if member not in self._links.up and member not in offered]
        if silent and self._running is None:
            actions.append(self._outcome(key, f"node {silent[0]} does not answer"))
        return actions

    def offer(self, column: DataColumn) -> list[Action]:
        """This node's column of the save that waits for it."""
        assert self.ordered is not None  # noqa: S101 - the caller looked
        self._remember(self.ordered, column)
        return [*self._tell(self.ordered, column, self.members), *self._encode()]

    def offered(self, offer: ev.ColumnOffered) -> list[Action]:
        """A member's column. The one of a later topology may be here before that topology is."""
        of_now = offer.epoch == self.epoch and offer.node in self.members
        if offer.column.node != offer.node or not (of_now or offer.epoch > self.epoch):
            return []
        self._remember((offer.save, offer.epoch), offer.column)
        return self._encode()

    def peer_up(self, event: ev.PeerUp) -> list[Action]:
        """A member may not have received what was offered."""
        node = event.node
        own = self._offers.get(self.ordered, {}).get(self._node) if self.ordered is not None else None
        if self.ordered is None or own is None or node not in self.members:
            return []
        return self._tell(self.ordered, own, (node,))

    def peer_down(self, event: ev.PeerDown) -> list[Action]:
        """A member whose column is waited for will not offer it soon."""
        node = event.node
        key = self.ordered
        waits = key is not None and key not in self.chunks and self._running is None
        if key is None or not waits or node not in self.members or node in self._offers.get(key, {}):
            return []
        return [self._outcome(key, f"node {node} does not answer")]

    def ended(self, order: ev.SaveEnded) -> list[Action]:
        """Where nothing is protected any more, what was before is held until something newer is durable.

        A node that the job has left keeps its chunks: the coordinator says when they are of no use.
        """
        if self._protects or order.end is not End.DURABLE:
            return []
        older = {key for key in self.chunks if key[0] < order.save}
        self.newest = None if self.newest in older else self.newest
        return self._drop_all_but(set(self.chunks) - older)

    def encoded(self, event: ev.Encoded) -> list[Action]:
        """The encode ended."""
        key, running = (event.save, event.epoch), self._running
        if running is None or (running.save, running.epoch) != key:
            return [] if event.problem else [DropChunk(job=self._job, save=event.save, epoch=event.epoch)]
        self._running = None
        if not event.problem:
            self.chunks[key] = running
        return [self._outcome(key, event.problem)]

    def protected(self, order: ev.SaveProtected) -> list[Action]:
        """Every set has encoded it: what protected older ones can go."""
        key = (order.save, order.epoch)
        self.newest = max(key, self.newest or key)  # a coordinator may say again what was so long ago
        newer = {held for held in self.chunks if held > key}
        return self._drop_all_but({key} | newer | ({self.ordered} if self.ordered and self.ordered > key else set()))

    def copied(self) -> list[Action]:
        """Nothing is being copied any more: what had to stay only for that can go."""
        self.copying = None
        if self.newest is None:
            return []
        newest = self.newest
        kept = {key for key in self.chunks if key >= newest}
        return self._drop_all_but(kept | ({self.ordered} if self.ordered is not None else set()))

    def obsolete(self, order: ev.SavesObsolete) -> list[Action]:
        """The coordinator has weighed what all nodes have: these are of no use."""
        gone = set(order.chunks)
        self.newest = None if self.newest in gone else self.newest
        self.copying = None if self.copying in gone else self.copying  # the thread that copies it sees that it goes
        stopped: list[Action] = []
        if self.ordered is not None and (self.ordered in gone or self.ordered[0] in order.saves):
            self.ordered, stopped = None, self._stop()
        return [*stopped, *self._drop_all_but(set(self.chunks) - gone)]

    def drop_foreign(self, runs: Container[Run]) -> list[Action]:
        """Gives up parity of these runs, which are not the job's."""
        gone = {key for key in self.chunks if key[0].owner in self.foreign and key[0].owner in runs}
        self.foreign = frozenset(run for run in self.foreign if run not in runs)
        return self._drop_all_but(set(self.chunks) - gone)

    def released(self) -> list[Action]:
        """The job is over."""
        self.copying = None
        actions = [*self._stop(), *self._drop_all_but(set())]
        self.newest, self.ordered, self._offers = None, None, {}
        return actions

    def _remember(self, key: Key, column: DataColumn) -> None:
        self._offers.setdefault(key, {})[column.node] = column
        for old in sorted(k for k in self._offers if k != self.ordered)[:-_MAX_OFFERED]:
            del self._offers[old]

    def _tell(self, key: Key, column: DataColumn, nodes: tuple[str, ...]) -> list[Action]:
        offer = ev.ColumnOffered(job=self._job, node=self._node, save=key[0], epoch=key[1], column=column)
        return [ToNode(job=self._job, node=node, message=offer) for node in nodes if node != self._node]

    def _encode(self) -> list[Action]:
        key = self.ordered
        if key is None or key in self.chunks or self._running is not None:
            return []
        offers = self._offers.get(key, {})
        if not set(self.members) <= set(offers):
            return []
        columns = tuple(offers[member] for member in self.members)
        self._running = ParityChunk(key[0], key[1], self.scheme, self.members.index(self._node), columns)
        return [Encode(job=self._job, chunk=self._running)]

    def _stop(self) -> list[Action]:
        running, self._running = self._running, None
        return [] if running is None else [StopEncode(job=self._job, save=running.save, epoch=running.epoch)]

    def _drop_all_but(self, keep: set[Key]) -> list[Action]:
        dropped = [k for k in self.chunks if k not in keep and k != self.copying and k[0].owner not in self.foreign]
        for key in dropped:
            del self.chunks[key]
        return [DropChunk(job=self._job, save=save, epoch=epoch) for save, epoch in dropped]

    def _outcome(self, key: Key, problem: str) -> Action:
        event = ev.Encoded(job=self._job, save=key[0], epoch=key[1], problem=problem)
        return ToNode(job=self._job, message=ev.Report(job=self._job, node=self._node, event=event))


class OwnDataColumn:
    """The seals of this node's segments, once all are digested: offered for the save that ``protection`` waits for."""

    def __init__(
        self, job: JobKey, node: str, slots: SlotTable, membership: Membership, protection: Protection
    ) -> None:
        self._job = job
        self._node = node
        self._slots = slots
        self._membership = membership
        self._protection = protection

    def offer(self, _: object = None) -> list[Action]:
        """This node's column for its set, once every segment of the save has its digests."""
        save, place = self._protection.waits, self._membership.place
        if save is None or place is None:
            return []
        seals = {slot.rank: slot.seal for slot in self._slots.holding(save)}
        ranks = place.ranks
        missing = [rank for rank in ranks if rank not in seals]
        if missing:
            return [self.failed(f"the segment of rank {missing[0]} does not lie at {self._node}")]
        column = DataColumn(self._node, tuple(seal for rank in ranks if (seal := seals[rank]) is not None))
        return self._protection.offer(column) if len(column.seals) == len(ranks) else []

    def failed(self, problem: str) -> Action:
        """Reports to the coordinator why the awaited save cannot be encoded here."""
        save = self._protection.waits
        assert save is not None  # noqa: S101 - the caller looked
        failed = ev.Encoded(job=self._job, save=save, epoch=self._membership.epoch, problem=problem)
        return self._membership.report(failed)
