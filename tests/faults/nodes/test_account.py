"""Counts of a job go on at the daemon of another node: it reads the journal that the one before wrote."""

from collections.abc import Iterator
from typing import Any

import pytest

from ckptd.shared.format.integrity import XXH3
from ckptd.shared.protocol import journal as log
from ckptd.shared.protocol.status import JobStatus
from ckptd.shared.stores.kinds import open_files
from ckptd.store.journal import read_journal
from tests.cluster import wait_for
from tests.faults.nodes.clusters import Cluster, a_cluster

pytestmark = [pytest.mark.faults, pytest.mark.timeout(240), pytest.mark.xdist_group("nodes-account")]


@pytest.fixture(name="two")
def fixture_two(zygote: Any) -> Iterator[Cluster]:
    with a_cluster(zygote, "ab", CKPTD_REDUNDANCY="none") as cluster:
        yield cluster


def told(two: Cluster, name: str) -> JobStatus:
    """By the daemon of the node, once it has read the journal."""

    def known() -> bool:
        job = two.job(name)
        return job is not None and job.totals is not None

    wait_for(known)
    found = two.job(name)
    assert found is not None
    return found


def ended(two: Cluster) -> bool:
    found = read_journal(open_files(f"{two.store}/job", XXH3)).entries
    return any(isinstance(entry, log.RunEnded) for entry in found)


def test_counts_go_on_at_the_daemon_of_another_node(two: Cluster):
    ranks = two.ranks("ab", sizes=[64 << 10])
    ranks.connect()
    for step in (10, 20):
        ranks.save(step, "durable")
    before = told(two, "a")
    assert before.ends == {"durable": 2}
    ranks.kill()
    wait_for(lambda: ended(two))
    two.lose("a")
    ranks = two.ranks("bb", sizes=[64 << 10])
    ranks.connect()
    ranks.load()
    ranks.save(30, "durable")
    wait_for(lambda: told(two, "b").ends == {"durable": 3})
    after = told(two, "b")
    assert before.totals is not None
    assert after.totals is not None
    assert after.totals.runs == 2
    assert after.totals.staged_nbytes > before.totals.staged_nbytes
    (staged,) = (one for one in after.histograms if one.what == "staged")
    assert sum(staged.counts) == 3
    assert after.goodput is not None
    assert after.goodput.failures == 1
    two.end(ranks)
