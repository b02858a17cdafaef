"""What a status of a large job costs the loop of its coordinator's daemon: ranks and other nodes wait meanwhile."""

import time

import msgspec
import pytest

from ckptd.core.coordinator.save_record import Record
from ckptd.core.coordinator.save_states import State
from ckptd.core.jobs import Catalogue
from ckptd.core.placement import Placement
from ckptd.core.policy import Policy
from ckptd.daemon import status
from ckptd.shared.base.ids import JobKey, SaveId
from ckptd.shared.format.schemes import Scheme
from ckptd.shared.protocol.topology import Peer, Topology
from tests.runs import RUN

pytestmark = pytest.mark.seconds

KEY = JobKey("/store", "job")
NODES, RANKS = 10_000, 8
LONG_TURN_S = 0.05


def a_large_job(*, drains=True, saves=40):
    """Its coordinator has seen so many saves, of which the newest is being drained and another one staged."""
    peers = tuple(Peer(f"n{number:05d}", "arena", "tcp://10.0.0.1:4000", "k" * 40) for number in range(NODES))
    homes = tuple(rank // RANKS for rank in range(NODES * RANKS))
    topology = Topology(peers, homes, Scheme.XOR, 8)
    catalogue = Catalogue("n00000", Policy())
    job = catalogue.jobs[KEY] = catalogue._job(KEY)
    job.node.membership.coordinator = "n00000"
    sessions, facts = job.coordinator.sessions, job.coordinator.facts
    sessions.placement, sessions.world_size = Placement(topology), NODES * RANKS
    job.coordinator.parity.topology = topology
    facts.links.up |= {peer.node for peer in peers[:-5]}
    at = {rank: {f"n{rank // RANKS:05d}"} for rank in range(NODES * RANKS)}
    for number in range(saves):
        save = SaveId(1, number + 1, 10 * number, RUN)
        record = Record(save, NODES * RANKS, 0.0, state=State.KEPT, staged=True, protected=True)
        record.delivered = dict.fromkeys(at, 1 << 30)
        record.changes = number
        record.held = at
        facts.records[save] = record
    if drains:
        record = facts.records[SaveId(1, saves - 1, 10 * (saves - 2), RUN)]
        record.state, facts.active = State.DRAINING, record.save
        record.drainers = {f"n{node:05d}": tuple(range(RANKS * node, RANKS * node + RANKS)) for node in range(NODES)}
        record.writes = dict.fromkeys(record.drainers, RANKS << 30)
        record.voters = set(list(record.drainers)[: NODES // 2])
        record = facts.records[SaveId(1, saves, 10 * (saves - 1), RUN)]
        record.state, record.staged = State.STAGING, False
        record.delivered = dict.fromkeys(range(0, NODES * RANKS, 2), 1 << 30)
    return catalogue


@pytest.mark.parametrize("drains", [False, True])
def test_a_status_of_ten_thousand_nodes_is_no_long_turn(drains):
    catalogue = a_large_job(drains=drains)
    took = []
    for _ in range(7):
        began = time.thread_time()
        (found,) = status.jobs(catalogue.jobs, 1.0, {})
        msgspec.msgpack.encode(found)
        took.append(time.thread_time() - began)
    assert len(found.nodes) == NODES
    print("status", drains, [round(1000 * one) for one in took])
    assert min(took) < LONG_TURN_S, took
