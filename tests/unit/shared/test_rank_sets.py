"""Sets of ranks as runs: small for those of meshes, right for any."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.shared.base.errors import ProtocolError
from ckptd.shared.base.ids import MAX_RANKS, JobKey, SaveId
from ckptd.shared.protocol import node_messages
from ckptd.shared.protocol.messages import Tier
from ckptd.shared.protocol.node_facts import GatherFailure, SegmentsGathered
from ckptd.shared.protocol.node_messages import Report
from ckptd.shared.protocol.node_orders import LoadOrdered
from ckptd.shared.protocol.rank_sets import MAX_RUNS, RankRun, ranks_of, runs_of
from ckptd.shared.protocol.tier_runs import TierRun, Tiers
from tests.runs import RUN

KEY, SAVE = JobKey("/store", "job"), SaveId(1, 1, 10, RUN)


def gathered(*runs):
    fact = SegmentsGathered(
        job=KEY, save=SAVE, attempt=1, failures=tuple(GatherFailure((RankRun(*run),), "") for run in runs)
    )
    return Report(job=KEY, node="b", event=fact)


def sent(*runs):
    others = tuple(TierRun(*run, Tier.PFS) for run in runs)
    return LoadOrdered(job=KEY, node="b", incarnation=1, save=SAVE, tiers=Tiers(Tier.ARENA, others))


@given(st.sets(st.integers(0, 200)))
def test_runs_are_the_ranks(ranks):
    assert ranks_of(runs_of(sorted(ranks)), 201) == ranks


@pytest.mark.parametrize(("shards", "replicas"), [(8, 4), (64, 1_250), (1, 80_000)])
def test_the_sets_of_a_mesh_are_one_run_each(shards, replicas):
    sets = [runs_of(range(shard, shards * replicas, shards)) for shard in range(shards)]
    assert all(len(runs) == 1 for runs in sets)
    assert len(msgspec.msgpack.encode(sets)) <= 16 * shards


def test_ranks_that_the_job_does_not_have_are_in_no_set():
    """A run of a few bytes names a million of them."""
    assert ranks_of((RankRun(0, MAX_RANKS), RankRun(1, MAX_RANKS // 2, 2)), 4) == {0, 1, 2, 3}
    assert Tiers(Tier.ARENA, (TierRun(2, MAX_RANKS - 2, Tier.PFS),)).readers(Tier.PFS, 4) == {2, 3}


@pytest.mark.parametrize("make", [gathered, sent])
def test_a_message_whose_runs_name_more_ranks_than_a_job_can_have_is_refused(make):
    few, all_of_them, beyond = [(0, 8), (8, 8)], (0, MAX_RANKS), (MAX_RANKS - 1, 2)
    assert node_messages.decode(node_messages.encode(make(*few))) == make(*few)
    for runs in ([beyond], [all_of_them] * 2):
        with pytest.raises(ValueError, match="ranks"):
            make(*runs)


def test_a_message_of_more_runs_than_any_job_needs_is_refused():
    raw = msgspec.msgpack.Encoder().encode([[0, 1]] * (MAX_RUNS + 1))
    runs = msgspec.msgpack.decode(raw, type=tuple[RankRun, ...])
    failures = (GatherFailure(runs, ""),)
    with pytest.raises(ValueError, match="runs"):
        SegmentsGathered(job=KEY, save=SAVE, attempt=1, failures=failures)
    SegmentsGathered(job=KEY, save=SAVE, attempt=1, failures=(GatherFailure(runs[1:], ""),))


def test_such_a_message_is_refused_as_bytes_too():
    raw = node_messages.encode(gathered((0, 8)))
    assert raw.count(msgspec.msgpack.encode([0, 8, 1])) == 1
    forged = raw.replace(msgspec.msgpack.encode([0, 8, 1]), msgspec.msgpack.encode([0, 8, MAX_RANKS]))
    with pytest.raises(ProtocolError, match="ranks"):
        node_messages.decode(forged)
