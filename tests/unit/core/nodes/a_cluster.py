"""The cores of several daemons on one table: every effect succeeds at once, unless a test holds it back."""

from collections import deque
from collections.abc import Container
from dataclasses import dataclass, field
from math import inf

from msgspec.structs import replace

from ckptd.core import actions as act
from ckptd.core import events as ev
from ckptd.core.beside import Beside
from ckptd.core.coordinator.state_table import Table
from ckptd.core.jobs import Catalogue
from ckptd.core.policy import Policy
from ckptd.shared.base.ids import JobKey, SaveId
from ckptd.shared.format.manifest import ParityRecord
from ckptd.shared.format.replica_attestations import Attestation
from ckptd.shared.format.schemes import Scheme
from ckptd.shared.protocol import node_messages
from ckptd.shared.protocol.messages import LoadFrom, Progress, Refused, SegmentsHere, Tier
from ckptd.shared.protocol.parity_types import ParityChunk
from ckptd.shared.protocol.segments import Wanted
from ckptd.shared.protocol.topology import Peer, Rendezvous, Topology
from tests.runs import RUN, SET, STORE_ID
from tests.seals import a_seal, attestations_in, attestations_of

Table.strict = True  # a step that no table of the core has is an error
Beside.strict = True  # so is a bug that costs no save its orders
_MOMENT_S = 0.2
KEY = JobKey("/store", "job")
ONE, TWO, THREE = (SaveId(1, n, 10 * n, RUN) for n in (1, 2, 3))


@dataclass
class FakeSlot:
    """What a slot file says of itself."""

    rank: int
    capacity: int
    save: SaveId | None = None
    world: int = 1
    digested: bool = False


@dataclass
class Store:
    """The PFS, always well."""

    numbers: int = 0
    clock: int = 0  # 0: it gives numbers; else it is silent, and this is what the clock shows
    votes: dict[SaveId, dict[str, tuple[int, ...]]] = field(default_factory=dict)
    committed: dict[SaveId, int] = field(default_factory=dict)
    parity: dict[SaveId, set[str]] = field(default_factory=dict)  # nodes whose votes name theirs
    run: bytes = RUN  # what the daemons draw
    records: tuple[ev.Recorded, ...] = ()  # as a scan finds them
    silent: bool = False  # scans are not answered


class ANode:
    """One arena and the daemon that serves it."""

    def __init__(self, cluster: "ACluster", name: str, arena: str) -> None:
        self.cluster, self.name, self.arena = cluster, name, arena
        self.slots: dict[str, FakeSlot] = {}
        self.chunks: dict[tuple[SaveId, int], ParityChunk] = {}
        self.kept: ev.TopologyKept | None = None
        self.tickets: set[bytes] = set()  # of sessions that this daemon coordinates
        self.shown: dict[str, Rendezvous] = {}  # by session, to the daemons that do
        self.number = 0  # kept
        self.met: set[str] = set()
        self.wanted: frozenset[str] | None = frozenset()  # nodes it keeps a link to; None: to all
        self.called: set[str] = set()  # and those that it has sent a message to
        self.notes: list[str] = []
        self.records: list[act.KeepEntry] = []
        self.pulled: dict[tuple[SaveId, int], str] = {}  # from which node, until it is given back
        self.serial = 0
        self.drained: dict[SaveId, tuple[str, ...]] = {}
        self.told: list[tuple[int, object]] = []
        self.life = 0
        self.catalogue = Catalogue(name, cluster.policy)

    @property
    def job(self):
        """Both halves."""
        return self.catalogue.jobs[KEY]

    @property
    def peer(self) -> Peer:
        """As ranks gather it."""
        return Peer(self.name, self.arena, f"tcp://{self.name}:5000", "k" * 40)

    def restart(self) -> None:
        """Another daemon on the same arena."""
        self.cluster.links = {pair for pair in self.cluster.links if self.name not in pair}
        self.life += 1
        self.met, self.tickets, self.shown = set(), set(), {}
        self.wanted, self.called = frozenset(), set()
        self.catalogue = Catalogue(self.name, self.cluster.policy)
        if self.number:
            self.cluster.say(self, ev.NumberKept(job=KEY, number=self.number))
        if self.kept is not None:
            self.cluster.say(self, self.kept)
        for name, slot in sorted(self.slots.items()):
            attestations = self.cluster.attestations(slot.world, slot.rank) if slot.save else ()
            seal = (
                a_seal(KEY, slot.save, slot.rank, slot.world, attestations=attestations)
                if slot.save and slot.digested
                else None
            )
            self.cluster.say(
                self,
                ev.SlotAdopted(
                    job=KEY, rank=slot.rank, slot=name, capacity=slot.capacity, world_size=slot.world,
                    save=slot.save, nbytes=10 if slot.save else 0, seal=seal, attestations=attestations,
                ),
            )  # fmt: skip
        for chunk in self.chunks.values():
            self.cluster.say(self, ev.ChunkAdopted(job=KEY, chunk=chunk))
        for rank, home in enumerate(self.cluster.homes):
            if home == self.name and self.cluster.alive:
                session = self.cluster.sid
                self.cluster.say(self, ev.RankFound(job=KEY, rank=rank, session=session, pid=1, host=home))
        if KEY in self.catalogue.jobs:
            for action in self.catalogue.adopted(KEY, self.cluster.now):
                self.cluster.perform(self, action)
        self.cluster.settle()


class ACluster:
    """Nodes, links and a store; ``held`` names action types that are kept in ``waiting`` instead of carried out."""

    def __init__(self, names: str = "abcd", *, scheme: Scheme = Scheme.XOR, set_size: int = 4, **policy: float) -> None:
        self.policy = Policy(**policy)
        self.scheme, self.set_size = scheme, set_size
        self.now = 0.0
        self.store = Store()
        self.links: set[frozenset[str]] = set()
        self.cut: set[frozenset[str]] = set()
        self.held: set[type] = set()
        self.waiting: list[tuple[ANode, act.Action]] = []
        self._queue: deque[tuple[ANode, ev.Event]] = deque()
        self.nodes: dict[str, ANode] = {}
        self._seq = 0
        self.session = 0
        self.homes: list[str] = []
        self.alive = False  # the ranks of the present session
        self.attached: dict[int, ev.RankAttached] = {}
        self.failing: set[str] = set()  # nodes that cannot encode
        self.tiers: dict[int, Tier] = {}
        self.full = False  # no arena has room for what ranks want to pull
        self.damaged: set[tuple[str, int]] = set()  # node and rank: its slot there, as who pulls from it finds
        self.here: dict[int, dict[int, str]] = {}  # what each rank was told of in a load: files, by rank that saved
        self.replicas = 0  # sets of ranks that save slices of what each set holds
        self.sets: tuple[tuple[int, ...], ...] = ()  # or these, which need not have all ranks
        for name in names:
            self.add(name)

    def attestations(self, world: int, rank: int) -> tuple[Attestation, ...]:
        """What one of so many ranks attests."""
        if self.sets:
            return attestations_in(self.sets, rank)
        return attestations_of(world, rank, self.replicas) if self.replicas else ()

    def add(self, name: str) -> ANode:
        """A new machine, with an empty arena."""
        self.nodes[name] = ANode(self, name, f"{name}{len(self.links)}-{self._seq}-{self.session}")
        return self.nodes[name]

    def lose(self, name: str) -> None:
        """The machine is gone, with all that lay on it."""
        del self.nodes[name]
        for pair in [pair for pair in self.links if name in pair]:
            self.links.discard(pair)
            (other,) = pair - {name}
            if other in self.nodes:
                self.say(self.nodes[other], ev.PeerDown(job=KEY, node=name))
        self.settle()

    # --- ranks

    def connect(self, homes: str, *, world: int | None = None, expect: bool = True) -> None:
        """A new session: rank r runs on node homes[r]. expect: it is let in, and asks for slots."""
        self.session += 1
        self.homes, self.alive = list(homes), True
        rendezvous = Rendezvous(
            self.nodes[homes[0]].peer, self.sid.encode().ljust(32, b"."), self.scheme, self.set_size
        )
        self.attached = {}
        for rank, name in enumerate(homes):
            self.attached[rank] = ev.RankAttached(
                job=KEY, request=self.seq(), session=self.sid, rank=rank, world_size=world or len(homes),
                host=name, pid=1, rendezvous=rendezvous, here=self.nodes[name].peer,
            )  # fmt: skip
            self.say(self.nodes[name], self.attached[rank])
        self.settle()
        if not expect:
            return
        self.ask_slots()

    def ask_slots(self) -> None:
        """All ranks, once they are let in."""
        for rank in range(len(self.homes)):
            self._ask_slots(rank)
        self.settle()

    def ask_slots_of(self, rank: int) -> None:
        """One rank alone."""
        self._ask_slots(rank)
        self.settle()

    def _ask_slots(self, rank: int) -> None:
        asked = ev.SlotsAsked(job=KEY, rank=rank, session=self.sid, request=self.seq(), capacity=99)
        self.say(self.node(rank), asked)

    def return_ranks(self, name: str, incarnation: int = 0) -> None:
        """Ranks of a node attach to its new daemon. incarnation: theirs since a load, if there was one."""
        ranks = [r for r, home in enumerate(self.homes) if home == name]
        for rank in ranks:
            back = replace(self.attached[rank], request=self.seq(), incarnation=incarnation or self.session, run=RUN)
            self.say(self.nodes[name], back)
        self.settle()
        for rank in ranks:
            self._ask_slots(rank)
        self.settle()

    @property
    def refusals(self) -> list[str]:
        """Why ranks of the present session were not let in."""
        seqs = {event.request for event in self.attached.values()}
        said = [m for node in self.nodes.values() for _, m in node.told]
        return [m.message for m in said if isinstance(m, Refused) and m.reply_to in seqs]

    def cut_off(self, name: str) -> None:
        """The node reaches nobody."""
        for other in sorted(set(self.nodes) - {name}):
            pair = frozenset((name, other))
            self.cut.add(pair)
            if pair in self.links:
                self.links.discard(pair)
                self.say(self.nodes[name], ev.PeerDown(job=KEY, node=other))
                self.say(self.nodes[other], ev.PeerDown(job=KEY, node=name))
        self.settle()

    def heal(self, name: str) -> None:
        """It reaches all again."""
        self.cut = {pair for pair in self.cut if name not in pair}
        self.settle()

    @property
    def sid(self) -> str:
        """Of the present session."""
        return f"s{self.session}"

    def seq(self) -> int:
        """A request number."""
        self._seq += 1
        return self._seq

    def node(self, rank: int) -> ANode:
        """Where the rank runs."""
        return self.nodes[self.homes[rank]]

    def end_ranks(self) -> None:
        """All ranks of the session die."""
        self.alive = False
        for rank, name in enumerate(self.homes):
            if name in self.nodes:
                self.say(self.nodes[name], ev.RankGone(job=KEY, rank=rank, session=self.sid))
        self.settle()

    def stage(self, save: SaveId, ranks: range | list[int] | None = None, *, drain: bool = False) -> None:
        """The ranks hand their segments over. drain: and want the save durable."""
        for rank in ranks if ranks is not None else range(len(self.homes)):
            node = self.node(rank)
            name = next(s.name for s in node.job.node.slots.of_rank(rank) if s.granted)
            node.slots[name].save, node.slots[name].world = save, len(self.homes)
            node.slots[name].digested = False
            self.say(
                node,
                ev.SegmentStaged(
                    job=KEY, rank=rank, session=self.sid, request=self.seq(), world_size=len(self.homes), slot=name,
                    save=save, nbytes=10, attestations=self.attestations(len(self.homes), rank), drain=drain,
                ),
            )  # fmt: skip
        self.settle()

    def ask(self, run: bytes | None = None, step: int | None = None) -> dict[int, int]:
        """All ranks ask for the newest, of a run or a step if one is named; the request of each."""
        seqs = {rank: self.seq() for rank in range(len(self.homes))}
        for rank, seq in seqs.items():
            asked = ev.LoadAsked(job=KEY, rank=rank, session=self.sid, request=seq, run=run, step=step)
            self.say(self.node(rank), asked)
        self.settle()
        return seqs

    def load(
        self, damaged: Container[tuple[int, Tier]] = (), run: bytes | None = None, step: int | None = None
    ) -> list[object]:
        """All ranks load; the answers that end it. ``tiers``: where each rank read. damaged: what they cannot read."""
        seqs = self.ask(run, step)
        self.tiers, self.here = {}, {}
        answers = {rank: self.answer(rank, seqs[rank]) for rank in seqs}
        while all(isinstance(a, LoadFrom) and a.save is not None and not a.agreed for a in answers.values()):
            lacks = {rank: self.want(rank, answer) for rank, answer in answers.items()}
            for rank, answer in answers.items():
                self.tiers[rank] = answer.tier
                seqs[rank] = self.seq()
                self.say(
                    self.node(rank),
                    ev.LoadReported(
                        job=KEY,
                        rank=rank,
                        session=self.sid,
                        request=seqs[rank],
                        save=answer.save,
                        tier=answer.tier,
                        problem=lacks[rank][0] or ("a block does not match" if (rank, answer.tier) in damaged else ""),
                        lacks=lacks[rank][1],
                    ),
                )
            self.settle()
            answers = {rank: self.answer(rank, seqs[rank]) for rank in seqs}
        return [answers[rank] for rank in sorted(answers)]

    def want(self, rank: int, order: LoadFrom) -> tuple[str, tuple[int, ...]]:
        """The rank has all segments here, if it is sent to do that; why not, and whose it lacks."""
        if not order.saved_by or order.save is None:
            return "", ()
        seq, wanted = self.seq(), tuple(Wanted(old) for old in range(order.saved_by))
        asked = ev.SegmentsWanted(job=KEY, rank=rank, session=self.sid, request=seq, save=order.save, wanted=wanted)
        self.say(self.node(rank), asked)
        self.settle()
        here = self.answer(rank, seq)
        assert isinstance(here, SegmentsHere), here
        self.here[rank] = {one.rank: one.name for one in here.files}
        return here.refused or "".join(one.problem for one in here.lacks), tuple(one.rank for one in here.lacks)

    def drop(self, save: SaveId) -> None:
        """All ranks have read what they had of it."""
        for rank in self.here:
            gone = ev.SegmentsDropped(job=KEY, rank=rank, session=self.sid, request=self.seq(), save=save)
            self.say(self.node(rank), gone)
        self.settle()

    def answer(self, rank: int, seq: int) -> object:
        """The reply to a request, None when there was none."""
        said = [m for r, m in self.node(rank).told if r == rank and getattr(m, "reply_to", None) == seq]
        return said[-1] if said else None

    def milestones(self, rank: int, save: SaveId) -> list[str]:
        """What the rank was told of the save, in order."""
        news = [m for r, m in self.node(rank).told if r == rank and isinstance(m, Progress) and m.save == save]
        return [str(word) for m in news for word in (m.milestone, m.end) if word is not None]

    # --- the world

    def say(self, node: ANode, event: ev.Event) -> None:
        """Queues an event for a node."""
        self._queue.append((node, event))

    def settle(self) -> None:
        """Runs until nothing is left to do."""
        while True:
            while self._queue:
                node, event = self._queue.popleft()
                if self.nodes.get(node.name) is not node:
                    continue
                for action in node.catalogue.handle(event, self.now):
                    self.perform(node, action)
                node.catalogue.check()
            if not self._meet() and not self._report():
                return

    def _report(self) -> bool:
        """Ranks that have come to a node are reported together, a moment later."""
        due = {node.name: at for node in self.nodes.values() if (at := _due(node)) is not None}
        if due:
            self.now = max(self.now, min(due.values()))
        began = [
            n for n in self.nodes.values() if KEY in n.catalogue.jobs and n.job.node.delivery.next_deadline() == -inf
        ]
        for node in [*began, *(self.nodes[name] for name, at in due.items() if at <= self.now)]:
            for action in node.catalogue.tick(self.now):
                self.perform(node, action)
        return bool(due)

    def tick(self, seconds: float) -> None:
        """Time passes; what waits for a moment only is reported first."""
        for step in (min(seconds, _MOMENT_S), max(0.0, seconds - _MOMENT_S)):
            self.now += step
            for node in list(self.nodes.values()):
                for action in node.catalogue.tick(self.now):
                    self.perform(node, action)
            self.settle()

    def _meet(self) -> bool:
        """Links come up between daemons that both know of each other."""
        new = False
        for a in self.nodes.values():
            for rendezvous in a.shown.values():
                other = self.nodes.get(rendezvous.peer.node)
                reached = other is not None and frozenset((a.name, other.name)) not in self.cut
                if other is not None and reached and rendezvous.ticket in other.tickets:
                    other.met.add(a.name)
        for a in self.nodes.values():
            for b in self.nodes.values():
                pair = frozenset((a.name, b.name))
                known = a is not b and b.name in a.met and a.name in b.met
                if known and pair not in self.links | self.cut and (_wants(a, b) or _wants(b, a)):
                    self.links.add(pair)
                    self.say(a, ev.PeerUp(job=KEY, node=b.name))
                    self.say(b, ev.PeerUp(job=KEY, node=a.name))
                    new = True
        return new

    def release(self) -> None:
        """Carries out what was held back."""
        self.held, waiting, self.waiting = set(), self.waiting, []
        for node, action in waiting:
            self.perform(node, action)
        self.settle()

    def fail(self) -> None:
        """Drains and encodes that were held back end badly, where their nodes still are."""
        self.held, waiting, self.waiting = set(), self.waiting, []
        for node, action in waiting:
            match action:
                case act.Drain(save=save):
                    self._end(node, ev.Drained(job=KEY, save=save, problem="broken off"))
                case act.Encode(chunk=chunk):
                    self._end(node, ev.Encoded(job=KEY, save=chunk.save, epoch=chunk.epoch, problem="broken off"))
        self.settle()

    def _end(self, node: ANode, event: ev.Event) -> None:
        if self.nodes.get(node.name) is node:
            self.say(node, event)

    def perform(self, node: ANode, action: act.Action) -> None:  # noqa: C901, PLR0912, PLR0915
        """Carries an action out."""
        if type(action) in self.held:
            self.waiting.append((node, action))
            return
        match action:
            case act.ToRank():
                node.told.append((action.rank, action.message))
            case act.ToNode(node=to):
                if frozenset((node.name, to)) in self.links:
                    self.say(self.nodes[to], node_messages.decode(node_messages.encode(action.message)))
                else:
                    node.called.add(str(to))
            case act.KeepLinks(nodes=nodes):
                node.wanted = None if nodes is None else frozenset(nodes)
            case act.Note(text=text):
                node.notes.append(text)
            case act.KeepEntry():
                node.records.append(action)
            case act.MeetPeers(peers=peers):
                node.met |= {p.node for p in peers}
            case act.KeepTopology():
                node.met |= {p.node for p in action.topology.peers}
                node.kept = ev.TopologyKept(
                    job=KEY, session=action.session, topology=Topology.unpacked(action.topology.packed),
                    epoch=action.epoch, since=action.since, outside=action.outside, former=action.former,
                )  # fmt: skip
            case act.Meet(rendezvous=rendezvous) if rendezvous.peer.node == node.name:
                node.tickets.add(rendezvous.ticket)
            case act.Meet(rendezvous=rendezvous):
                node.met.add(rendezvous.peer.node)
                node.shown[action.session] = rendezvous
            case act.EndMeeting(session=session):
                node.shown.pop(session, None)
            case act.AllocateSlots(rank=rank, count=count, capacity=capacity):
                self.say(node, ev.SlotsFit(job=KEY, rank=rank))
                for _ in range(count):
                    self.say(node, ev.SlotReady(job=KEY, rank=rank, slot=self._slot(node, rank), capacity=capacity))
            case act.FreeSlot(slot=slot):
                node.slots[slot].save = None
            case act.UnlinkSlot(slot=slot):
                node.slots.pop(slot, None)
            case act.TakeDigests(slot=slot, save=save):
                if node.slots[slot].save == save:
                    node.slots[slot].digested = True
                    world = node.slots[slot].world
                    rank = node.slots[slot].rank
                    seal = a_seal(KEY, save, rank, world, attestations=self.attestations(world, rank))
                    self.say(node, ev.DigestsSealed(job=KEY, slot=slot, save=save, seal=seal))
            case act.KeepNumber(number=number):
                node.number = number
            case act.ForgetJob():
                node.kept = None
            case act.TakeIncarnation(session=session) if self.store.clock:
                self.say(
                    node, ev.IncarnationTaken(job=KEY, session=session, run=RUN, number=self.store.clock, problem="EIO")
                )
            case act.TakeIncarnation(at_least=at_least, session=session):
                self.store.numbers = max(self.store.numbers + 1, at_least)
                self.say(
                    node,
                    ev.IncarnationTaken(
                        job=KEY, session=session, number=self.store.numbers, run=self.store.run, store_id=STORE_ID
                    ),
                )
            case act.ScanStore(after=after) if self.store.silent:
                self.say(node, ev.StoreScanned(job=KEY, after=after, problem="EIO"))
            case act.ScanStore(after=after, claim=claim):
                found = tuple(ev.OnStore(s, w, 10 * w, s.dirname) for s, w in self.store.committed.items())
                partials = tuple(
                    ev.Partial(s, sum(len(r) for r in votes.values()) >= len(self.homes))
                    for s, votes in self.store.votes.items()
                    if s not in self.store.committed
                )
                self.say(
                    node,
                    ev.StoreScanned(
                        job=KEY,
                        store_id=STORE_ID,
                        after=after,
                        committed=found,
                        partials=partials,
                        records=self.store.records,
                        claimed=claim.incarnation if claim is not None else 0,
                    ),
                )
            case act.Drain(save=save, slots=slots):
                assert all(node.slots[slot].save == save for slot in slots)
                node.drained[save] = slots
                self.say(node, ev.Drained(job=KEY, save=save))
            case act.DrainParity(save=save, epoch=epoch):
                there = (save, epoch) in node.chunks
                record = ParityRecord(SET, "0" * 16 + "-00.parity", 4096, 1, bytes(16)) if there else None
                problem = "" if there else "it is not in the arena any more"
                self.say(node, ev.ParityDrained(job=KEY, save=save, parity=record, problem=problem))
            case act.WriteVote(save=save, slots=slots):
                if action.parity is not None:
                    self.store.parity.setdefault(save, set()).add(node.name)
                ranks = tuple(node.slots[slot].rank for slot in slots)
                self.store.votes.setdefault(save, {})[node.name] = ranks
                self.say(node, ev.VoteWritten(job=KEY, save=save))
            case act.Commit(save=save):
                ranks = [rank for voted in self.store.votes.get(save, {}).values() for rank in voted]
                world = next((s.world for n in self.nodes.values() for s in n.slots.values() if s.save == save), 0)
                if sorted(ranks) == list(range(world)):
                    self.store.committed[save] = world
                    self.say(node, ev.CommitEnded(job=KEY, save=save, nbytes=10 * world))
                else:
                    self.say(node, ev.CommitEnded(job=KEY, save=save, problem=f"votes cover {ranks} of {world}"))
            case act.Encode(chunk=chunk):
                problem = "it fails" if node.name in self.failing else self._unencodable(chunk)
                if not problem:
                    node.chunks[chunk.save, chunk.epoch] = chunk
                self.say(node, ev.Encoded(job=KEY, save=chunk.save, epoch=chunk.epoch, problem=problem))
            case act.DropChunk(save=save, epoch=epoch):
                node.chunks.pop((save, epoch), None)
            case act.FetchSegment(rank=rank):
                self._fetch(node, action)
                self.damaged.discard((node.name, rank))  # what came lies in its place
            case act.PullSegments():
                self._pull(node, action)
            case act.DropPulled(save=save):
                node.pulled = {key: name for key, name in node.pulled.items() if key[0] != save}

    def _pull(self, node: ANode, action: act.PullSegments) -> None:
        said = {name: getattr(action, name) for name in ("job", "rank", "session", "request", "save")}
        if self.full:
            return self.say(node, ev.SegmentsPulled(**said, refused="the arena has no room"))
        files, lacks = [], []
        for holder, seal, _ in action.pulls:
            there = self.nodes[holder].slots.values() if holder in self.nodes else ()
            held = any((slot.save, slot.rank, slot.digested) == (action.save, seal.rank, True) for slot in there)
            if not held or (holder, seal.rank) in self.damaged:
                lacks.append((seal.rank, f"{holder}: a block does not match"))
            else:
                files.append((seal.rank, f"r{seal.rank:05d}-000001.part"))
                node.pulled[action.save, seal.rank] = holder
        return self.say(node, ev.SegmentsPulled(**said, files=tuple(files), lacks=tuple(lacks)))

    def _slot(self, node: ANode, rank: int) -> str:
        node.serial += 1
        name = f"r{rank:05d}-{node.serial:06d}.slot"
        node.slots[name] = FakeSlot(rank, 99)
        return name

    def has(self, name: str, save: SaveId, rank: int) -> bool:
        """Whether the node has the segment, digested."""
        node = self.nodes.get(name)
        return node is not None and any((s.save, s.rank, s.digested) == (save, rank, True) for s in node.slots.values())

    def _unencodable(self, chunk: ParityChunk) -> str:
        for column in chunk.columns:
            for seal in column.seals:
                if not self.has(column.node, chunk.save, seal.rank):
                    return f"{column.node} has no segment of rank {seal.rank}"
        return ""

    def _fetch(self, node: ANode, action: act.FetchSegment) -> None:
        problem = ""
        if action.tier is Tier.PEER:
            problem = "" if self.has(action.holder, action.save, action.rank) else "gone"
        else:
            assert action.chunk is not None
            missing = {
                i
                for i, column in enumerate(action.chunk.columns)
                for seal in column.seals
                if not self.has(dict(action.homes).get(seal.rank, "?"), action.save, seal.rank)
            }
            key = (action.chunk.save, action.chunk.epoch)
            there = {i for i, name in action.chunks if name in self.nodes and key in self.nodes[name].chunks}
            lost = missing | (set(range(len(action.chunk.columns))) - there)
            problem = "" if len(lost) <= action.chunk.scheme.losses else f"members {lost} are lost"
        if problem:
            self.say(
                node,
                ev.SegmentFetched(job=KEY, rank=action.rank, save=action.save, tier=action.tier, problem=problem),
            )
            return
        name = self._slot(node, action.rank)
        assert action.seal is not None
        slot = node.slots[name]
        slot.save, slot.digested, slot.world = action.save, True, action.seal.world_size
        self.say(
            node,
            ev.SegmentFetched(
                job=KEY, rank=action.rank, save=action.save, tier=action.tier, slot=name, capacity=99, seal=action.seal
            ),
        )


def _due(node: ANode) -> float | None:
    """When its ranks are reported."""
    job = node.catalogue.jobs.get(KEY)
    return job.node.membership.reports.next_deadline() if job is not None else None


def _wants(a: ANode, b: ANode) -> bool:
    return a.wanted is None or b.name in a.wanted | a.called


def refused(answers: list[object]) -> list[str]:
    """Messages of those that were refused."""
    return [a.message for a in answers if isinstance(a, Refused)]


def a_protected_job(homes: str = "abcd", scheme: Scheme = Scheme.XOR, **policy: int) -> ACluster:
    cluster = ACluster("abcd", scheme=scheme, **policy)
    cluster.connect(homes)
    cluster.held = {act.Drain}
    cluster.stage(ONE)
    return cluster


def close(cluster: ACluster) -> None:
    cluster.alive = False
    for rank, name in enumerate(cluster.homes):
        left = ev.RankDetached(job=KEY, rank=rank, session=cluster.sid, request=cluster.seq())
        cluster.say(cluster.nodes[name], left)
    cluster.settle()


def nothing_is_left(cluster: ACluster) -> None:
    for node in cluster.nodes.values():
        assert not node.slots
        assert not node.chunks
        assert not node.catalogue.jobs


def saves_at(cluster: ACluster, name: str) -> set[SaveId]:
    return {slot.save for slot in cluster.nodes[name].slots.values() if slot.save is not None}
