"""A daemon dies while ranks of another number pull what they need from the memory of nodes: the load ends right."""

import glob
import re
from typing import NamedTuple

import pytest

from tests.cluster import wait_for
from tests.faults.nodes.clusters import MB, Cluster, Ranks, a_cluster
from tests.faults.nodes.relay import Flip, Stall
from tests.faults.ranks import RankError
from tests.long_form import in_long

pytestmark = [pytest.mark.faults, pytest.mark.timeout(240), pytest.mark.xdist_group("nodes-pulled")]

SOURCE = "c"  # has what rank 2 saved, and no rank of the next start
HOMES = "bad"  # of that: each rank pulls its own segment from another node, the third one from the source
PEER_TIMEOUT_S = 6.0  # longer than the start of a daemon: a node that is silent for so long ends the load
PULLED_NBYTES = 200_000  # what has come from the source when its daemon, or another, dies


class Death(NamedTuple):
    """Whose daemon dies, what follows, in a job with which redundancy, and where ranks read then."""

    node: str
    then: str  # back: another one at once, on its arena; away: none; lost: another one, without its memory
    redundancy: str
    tiers: set[str]

    def __str__(self) -> str:
        return f"{self.node}-{self.then}-{self.redundancy}"


DEATHS = [
    Death("d", "back", "none", {"peer"}),  # pulls
    Death(SOURCE, "away", "xor", {"rebuilt"}),
    *in_long(
        Death("b", "back", "none", {"peer"}),  # pulls, and is the coordinator's
        Death(SOURCE, "back", "xor", {"peer", "rebuilt"}),  # as it is back before a rank looks for it again, or not
        Death(SOURCE, "lost", "xor", {"rebuilt"}),
        Death(SOURCE, "lost", "none", {"pfs"}),
    ),
]


@pytest.fixture(name="four", scope="module")
def fixture_four(zygote):
    """a, b, c, d; what is pulled from c passes a relay."""
    with a_cluster(zygote, relayed=SOURCE, CKPTD_PEER_TIMEOUT_S=str(PEER_TIMEOUT_S)) as cluster:
        yield cluster


def save(ranks: Ranks, step: int, redundancy: str) -> None:
    ranks.save(step, *(["protected"] if redundancy != "none" else []), "durable")


def saved(four: Cluster, job: str, redundancy: str) -> Ranks:
    """Ranks that have connected, to load what four others saved."""
    ranks = four.ranks("abcd", job, sizes=[MB])
    ranks.connect(redundancy=redundancy)
    ranks.call("load")
    save(ranks, 10, redundancy)
    ranks.kill()
    ranks = four.ranks(HOMES, job, sizes=[MB])
    ranks.connect(redundancy=redundancy)
    return ranks


def pulling(four: Cluster, job: str, redundancy: str) -> Ranks:
    """The same in their load: some bytes have come from the source, and no more come."""
    ranks, bulk = saved(four, job, redundancy), four.relays[SOURCE].bulk
    bulk.from_daemon = Stall(bulk, PULLED_NBYTES)
    ranks.start("load")
    wait_for(lambda: bulk.held)
    assert not any(rank.done for rank in ranks.all if rank.node is four.nodes["d"]), "it has all that it wanted"
    return ranks


def partial_segments(four: Cluster) -> list[str]:
    """What was pulled, in all arenas."""
    return [path for node in four.nodes.values() for path in glob.glob(f"{node.arena}/jobs/*/*.part")]


@pytest.mark.parametrize("death", DEATHS, ids=str)
def test_a_daemon_dies_while_ranks_pull(four: Cluster, death: Death):
    ranks = pulling(four, f"pull-{death}", death.redundancy)
    assert partial_segments(four)
    four.replace(death.node) if death.then == "lost" else four.nodes[death.node].kill()
    go_on(four, death.node)
    if death.then == "back":
        four.start(death.node)
    found = ranks.loaded()
    assert {f["step"] for f in found} == {10}, found
    assert {f["tier"] for f in found} <= death.tiers, found
    wait_for(lambda: not partial_segments(four))
    if death.then == "away":
        four.start(death.node)
    end(four, ranks, death.redundancy)


def test_a_flipped_bit_on_the_wire_is_in_no_state(four: Cluster):
    job = "pull-flip"
    ranks = saved(four, job, "xor")
    flip = four.relays[SOURCE].bulk.from_daemon = Flip(PULLED_NBYTES)
    ranks.start("load")
    found = ranks.loaded()
    assert flip.done
    assert {(f["step"], f["tier"]) for f in found} == {(10, "rebuilt")}, found
    notes = "; ".join(note for f in found for note in f["notes"])
    assert re.search(f"node {SOURCE}: bytes of rank 2.* were damaged on the wire", notes), notes
    four.relays[SOURCE].bulk.from_daemon = None
    end(four, ranks, "xor")


@pytest.mark.parametrize("node", in_long("d"))
def test_a_daemon_that_pulls_stays_away(four: Cluster, node: str):
    """The others are told to start again, and the next start loads."""
    ranks = pulling(four, "pull-away", "none")
    four.nodes[node].kill()
    go_on(four, node)
    for rank in [rank for rank in ranks.all if rank.node is not four.nodes[node]]:
        with pytest.raises(RankError, match=f"node {node} does not answer"):
            rank.result()
    ranks.kill()
    wait_for(lambda: [path for path in partial_segments(four) if not path.startswith(four.nodes[node].arena)] == [])
    four.start(node)
    ranks = four.ranks(HOMES, "pull-away", sizes=[MB])
    ranks.connect(redundancy="none")
    assert {f["step"] for f in ranks.load()} == {10}
    wait_for(lambda: not partial_segments(four))
    end(four, ranks, "none")


def go_on(four: Cluster, dead: str) -> None:
    """The source sends again, if it lives: what the relay had of one that died is gone too."""
    bulk = four.relays[SOURCE].bulk
    if dead == SOURCE:
        bulk.cut()
    bulk.held, bulk.from_daemon = False, None


def end(four: Cluster, ranks: Ranks, redundancy: str) -> None:
    """The job goes on, ends, and leaves nothing in memory."""
    save(ranks, 20, redundancy)
    four.end(ranks)
    wait_for(lambda: not any(glob.glob(f"{node.arena}/jobs/*") for node in four.nodes.values()))
