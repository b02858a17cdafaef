"""A node is lost with the only copy of its part of all that the job had."""

import pytest

from tests.faults.nodes.clusters import Cluster, a_cluster

pytestmark = [pytest.mark.faults, pytest.mark.timeout(240), pytest.mark.xdist_group("nodes-two")]


@pytest.fixture(name="slow", scope="module")
def fixture_slow(zygote):
    """a, b, c, whose drains take hours."""
    with a_cluster(zygote, "abc", CKPTD_DRAIN_BANDWIDTH="100") as cluster:
        yield cluster


def test_a_job_whose_only_checkpoint_was_staged_on_a_lost_node_starts_from_nothing(slow: Cluster):
    ranks = slow.ranks("ab", "begun")
    ranks.connect(redundancy="none")
    ranks.call("load")
    ranks.save(10, "staged")
    ranks.kill()
    slow.replace("b")
    ranks = slow.ranks("ab", "begun")
    ranks.connect(redundancy="none")
    assert ranks.call("load") == [None, None]
    ranks.save(20, "staged")
    ranks.kill()
    ranks = slow.ranks("ab", "begun")
    ranks.connect(redundancy="none")
    assert {found["step"] for found in ranks.load()} == {20}
    ranks.kill()
