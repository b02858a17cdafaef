"""What connecting costs: messages of each node, and their bytes, which do not grow with the job."""

from collections import Counter

import pytest
from msgspec.structs import replace

from ckptd.core import actions as act
from ckptd.core import events as ev
from ckptd.core.jobs import Catalogue
from ckptd.core.placement import Placement
from ckptd.core.policy import Policy
from ckptd.shared.format.schemes import Scheme
from ckptd.shared.protocol import node_messages
from ckptd.shared.protocol.topology import Peer, Rendezvous
from tests.runs import RUN, STORE_ID
from tests.unit.core.nodes.a_cluster import KEY, ACluster
from tests.unit.shared.test_columns import a_topology

RANKS = 8
MOST_NBYTES = 2048  # of any message to or from one node, but the topology


class Played:
    """A coordinator's core, and nodes of which only the words are played: real bytes, no links."""

    def __init__(self, nodes):
        self.topology = a_topology(nodes, RANKS)
        self.names = self.topology.nodes
        self.core = Catalogue(self.names[0], Policy())
        self.told = {name: [] for name in self.names}
        self.taking = None
        self.incarnation = 0

    def say(self, event):
        for action in [*self.core.handle(event, 1.0), *self.core.tick(1.0)]:
            match action:
                case act.ToNode(node=node, message=message):
                    self.told[node].append(message)
                case act.TakeIncarnation():
                    self.taking = action

    def report(self, node, fact):
        self.say(ev.Report(job=KEY, node=node, event=fact))

    def attached(self, node, *, members=False):
        """As the node reports its ranks."""
        ranks = self.topology.ranks_of(node)
        world = len(self.topology.homes)
        words = (
            {"members": ranks, "incarnation": self.incarnation, "run": RUN, "digest": self.topology.digest}
            if members
            else {"waiting": tuple(ev.Arrival(rank, world) for rank in ranks)}
        )
        return ev.NodeAttached(
            job=KEY, session="s" * 32, peer=self.topology.peers[self.names.index(node)], world_size=world,
            living=tuple(ev.Living(rank, "s" * 32, 4_000_000 + rank, f"{node}.cluster.example.org") for rank in ranks),
            scheme=Scheme.XOR, **words,
        )  # fmt: skip

    def connect(self):
        """All ranks of all nodes, one message of each; node 0's are the daemon's own."""
        own = self.topology.peers[0]
        rendezvous = Rendezvous(own, b"t" * 32, Scheme.XOR)
        for rank in self.topology.ranks_of(own.node):
            attached = ev.RankAttached(
                job=KEY, request=rank + 1, session="s" * 32, rank=rank, world_size=len(self.topology.homes),
                host=f"{own.node}.cluster.example.org", pid=1, rendezvous=rendezvous, here=own,
            )  # fmt: skip
            self.say(attached)
        for node in self.names[1:]:
            self.report(node, self.attached(node))
        assert self.taking is not None
        self.incarnation = 1
        self.say(ev.IncarnationTaken(job=KEY, session=self.taking.session, number=1, run=RUN, store_id=STORE_ID))
        return self


def nbytes(message):
    return len(node_messages.encode(message))


def test_the_coordinator_makes_the_topology_of_the_nodes():
    played = Played(16).connect()
    assert played.core.jobs[KEY].node.membership.topology == played.topology


@pytest.mark.parametrize("nodes", [16, 64, 1000])
def test_each_node_gets_its_place_in_a_message_that_does_not_grow_with_the_job(nodes):
    played = Played(nodes).connect()
    places = Placement(played.topology)
    for name in played.names[1:]:
        (opened,) = [m for m in played.told[name] if isinstance(m, ev.SessionOpened)]
        assert opened.place == places.place(name)
        assert {peer.node for peer in opened.place.members} >= {name}
        assert nbytes(opened) < MOST_NBYTES
        assert Counter(type(m) for m in played.told[name]).total() <= 1


def test_bytes_at_64_and_4000_nodes_are_equal_up_to_a_constant():
    sizes = {}
    for nodes in (64, 4000):
        topology = a_topology(nodes, RANKS)
        last = topology.nodes[-1]
        opened = ev.SessionOpened(
            job=KEY, node=topology.nodes[0], session="s" * 32, incarnation=1, run=RUN, store_id=STORE_ID,
            ranks=topology.ranks_of(last), place=Placement(topology).place(last), epoch=1,
        )  # fmt: skip
        played = Played.__new__(Played)
        played.topology, played.names, played.incarnation = topology, topology.nodes, 1
        attached = ev.Report(job=KEY, node=last, event=played.attached(last))
        again = ev.Report(job=KEY, node=last, event=played.attached(last, members=True))
        sizes[nodes] = [nbytes(message) for message in (opened, attached, again)]
    for small, large in zip(sizes[64], sizes[4000], strict=True):
        assert abs(small - large) < 128
        assert large < MOST_NBYTES


def test_a_node_with_the_topology_gets_nothing_of_it_when_its_link_comes_up_again():
    played = Played(64).connect()
    node = played.names[9]
    played.told[node].clear()
    played.say(ev.PeerDown(job=KEY, node=node))
    played.say(ev.PeerUp(job=KEY, node=node))
    played.report(node, played.attached(node, members=True))
    (opened,) = [m for m in played.told[node] if isinstance(m, ev.SessionOpened)]
    assert opened.place is None
    assert nbytes(opened) < 512
    assert not [m for m in played.told[node] if isinstance(m, ev.TopologyReported)]


class Counting(ACluster):
    """Counts messages between nodes, by sender and kind."""

    sent: Counter

    def perform(self, node, action):
        match action:
            case act.ToNode(node=to, message=ev.Report(event=event)) if to != node.name:
                self.sent[node.name, type(event).__name__] += 1
            case act.ToNode(node=to, message=message) if to != node.name:
                self.sent[node.name, type(message).__name__] += 1
        super().perform(node, action)


def counting(homes):
    cluster = Counting("abcdefgh", set_size=4)
    cluster.sent = Counter()
    cluster.connect(homes)
    return cluster


def of_node(cluster, name):
    return {kind: count for (node, kind), count in cluster.sent.items() if node == name}


def test_a_node_reports_all_its_ranks_in_one_message_and_asks_once_for_the_topology():
    cluster = counting("aabbccdd" * 4)
    for name in "bcd":
        sent = of_node(cluster, name)
        assert sent.pop("NodeAttached") == 1, "the order that opens the session shows that it has arrived"
        assert sent.pop("TopologyAsked", 0) <= 1
        assert sent.pop("NodeHas") == 1
        assert set(sent) <= {"SlotsAwaited", "TopologyReported"}
    opened = [count for (_, kind), count in cluster.sent.items() if kind == "SessionOpened"]
    assert opened == [3], "one for each node"
    asked = sum(count for (_, kind), count in cluster.sent.items() if kind == "TopologyAsked")
    assert asked == 3


def test_only_the_first_of_a_set_asks_the_coordinator():
    cluster = Counting("abcdefgh", set_size=4)
    cluster.sent = Counter()
    asked = []
    perform = cluster.perform

    def note(node, action):
        if isinstance(action, act.ToNode) and isinstance(action.message, ev.TopologyAsked):
            asked.append((node.name, action.node))
        perform(node, action)

    cluster.perform = note
    cluster.connect("abcdefgh")
    sets = Placement(cluster.nodes["a"].job.node.membership.topology)
    for node, at in asked:
        first = sets.place(node).members[0].node
        assert at == (first if node != first else "a")
    assert {name: cluster.nodes[name].kept.topology.nodes for name in "abcdefgh"} == dict.fromkeys(
        "abcdefgh", tuple("abcdefgh")
    )


@pytest.mark.parametrize("restarts", [False, True])
def test_a_link_that_comes_up_again_costs_a_node_a_few_messages_whatever_its_ranks(restarts):
    cluster = counting("ab" * RANKS)
    cluster.sent.clear()
    if restarts:
        cluster.nodes["a"].restart()
        cluster.return_ranks("a")
    else:
        cluster.cut_off("b")
        cluster.heal("b")
    sent = of_node(cluster, "b")
    assert sent["NodeAttached"] <= 2
    assert sent["NodeHas"] <= 2
    assert set(sent) <= {"NodeAttached", "NodeHas", "SlotsAwaited"}
    assert "TopologyReported" not in of_node(cluster, "a")


def test_the_first_of_a_set_that_is_lost_is_not_waited_for():
    cluster = Counting("abcdefgh", set_size=4)
    cluster.sent = Counter()
    cluster.held = {act.TakeIncarnation}
    cluster.connect("abcdefgh", expect=False)
    sets = Placement(a_of("abcdefgh", cluster))
    firsts = {sets.place(name).members[0].node for name in "abcdefgh"} - {"a"}
    cut = min(firsts)
    mates = [name for name in "abcdefgh" if sets.place(name).members[0].node == cut and name != cut]
    for mate in mates:
        cluster.cut.add(frozenset((mate, cut)))
    cluster.release()
    for mate in mates:
        cluster.say(cluster.nodes[mate], ev.PeerDown(job=KEY, node=cut))
    cluster.settle()
    assert all(cluster.nodes[mate].kept is not None for mate in mates)


def a_of(names, cluster):
    """The topology that the cluster's session will have."""
    waiting = cluster.nodes["a"].job.coordinator.sessions._waiting[cluster.sid]
    assert waiting.placement.topology.nodes == tuple(names)
    return waiting.placement.topology


def test_who_asks_a_daemon_that_does_not_have_it_yet_is_answered_when_it_does():
    """Its coordinator has restarted without it, and makes it again when all nodes have reported their ranks."""
    cluster = counting("aabb")
    topology = cluster.nodes["b"].job.node.membership.topology
    cluster.nodes["a"].kept = None
    cluster.nodes["a"].restart()
    asked = ev.TopologyAsked(job=KEY, node="b", digest=topology.digest)
    cluster.return_ranks("a")
    assert cluster.nodes["a"].job.coordinator.sessions.topology == topology
    cluster.sent.clear()
    known = cluster.nodes["a"].job.node.membership.topologies
    known._known.clear()
    cluster.say(cluster.nodes["a"], asked)
    cluster.settle()
    assert not cluster.sent
    cluster.say(cluster.nodes["a"], ev.TopologyReported(job=KEY, node="a", packed=topology.packed))
    cluster.settle()
    assert cluster.sent == {("a", "TopologyReported"): 1}


def test_a_topology_that_no_coordinator_named_is_not_taken():
    cluster = counting("ab")
    before = cluster.nodes["b"].job.node.membership.topology
    stranger = ev.TopologyReported(job=KEY, node="a", packed=a_topology(3).packed)
    cluster.say(cluster.nodes["b"], stranger)
    cluster.settle()
    topologies = cluster.nodes["b"].job.node.membership.topologies
    assert topologies.present is before
    asked = ev.TopologyAsked(job=KEY, node="a", digest=stranger.packed.digest)
    assert topologies.asked_by(asked) == [], "it is not kept for others either"


# --- who may be a session


def peer_of(node):
    return Peer(node, f"arena-{node}", f"tcp://{node}:1", "k" * 40)


def attached(node, *ranks, world, session="s1"):
    peer = peer_of(node)
    return ev.NodeAttached(
        job=KEY, session=session, peer=peer, waiting=tuple(ev.Arrival(rank, world) for rank in ranks)
    )


def refusals(*events, rank=0, world=4):
    """What the coordinator on node a sends to all, after it has these reports."""
    core, out = Catalogue("a", Policy()), []
    own = ev.RankAttached(
        job=KEY, request=1, session="s1", rank=rank, world_size=world, host="a", pid=1,
        rendezvous=Rendezvous(peer_of("a"), b"t" * 32), here=peer_of("a"),
    )  # fmt: skip
    core.handle(own, 1.0)
    for node, event in events:
        out += core.handle(ev.Report(job=KEY, node=node, event=event), 1.0)
    return [
        (action.node, action.message.ranks, action.message.code, action.message.message)
        for action in out
        if isinstance(action, act.ToNode) and isinstance(action.message, ev.SessionRefused)
    ]


@pytest.mark.parametrize(
    ("first", "second", "says"),
    [
        (attached("b", 1, world=4), attached("c", 1, 2, world=4), "two processes are rank 1 of the job, on node b and"),
        (
            attached("b", 1, world=4),
            attached("c", 2, world=5),
            "rank 2 has connected as one of 5 ranks, others as",
        ),
        (attached("b", 1, world=4), attached("c", 7, world=4), "rank 7 does not exist in a job of 4 ranks"),
    ],
)
def test_ranks_that_cannot_be_one_job_are_refused_on_all_nodes(first, second, says):
    found = refusals(("b", first), ("c", second))
    assert {node for node, *_ in found} == {"b", "c"}, "and on its own, in the same process"
    assert {ranks for _, ranks, *_ in found} == {()}, "all of the session"
    assert {code for *_, code, _ in found} == {"usage"}
    assert all(text.startswith(says) for *_, text in found)


def test_ranks_that_meet_where_rank_0_does_not_run_are_refused():
    found = refusals(("b", attached("b", 0, world=2)), rank=1, world=2)
    assert {text for *_, text in found} == {"rank 0 runs on node b, and its ranks meet at the daemon of node a"}


def test_daemons_that_cannot_reach_each_other_are_refused_on_all_nodes():
    nowhere = replace(attached("b", 1, world=2), peer=replace(peer_of("b"), endpoint=""))
    (found,) = refusals(("b", nowhere), world=2)
    assert found[2:] == ("config", "the daemon of node 'b' is reached at nowhere by the job's other nodes")


def test_a_daemon_that_restarts_while_the_number_is_taken_is_named_as_it_is_now():
    cluster = ACluster("ab")
    cluster.held = {act.TakeIncarnation}
    cluster.connect("ab", expect=False)
    old = cluster.nodes["b"]
    cluster.lose("b")
    moved = cluster.add("b")
    assert moved.peer != old.peer
    cluster.say(moved, replace(cluster.attached[1], here=moved.peer))
    cluster.settle()
    cluster.release()
    assert cluster.nodes["a"].job.coordinator.sessions.topology.peers[1] == moved.peer


def test_a_session_is_let_in_when_every_rank_has_a_node_and_its_missing_ranks_are_named():
    cluster = ACluster("abc")
    cluster.connect("abc", world=4, expect=False)
    assert cluster.nodes["a"].job.coordinator.sessions.session == ""
    cluster.tick(6)
    (notice,) = [m for _, m in cluster.nodes["a"].told]
    assert notice.message == "rank 3 has not come to the daemon of a"
    cluster.tick(30)
    assert set(cluster.refusals) == {"rank 3 has not come to the daemon of a"}
    assert len(cluster.refusals) == 3
