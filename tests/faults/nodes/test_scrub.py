"""Bits flip in the memory of one node of four while nobody looks: its daemon has them from the other nodes."""

import pytest

from ckptd.shared.protocol.status import ScrubStatus
from tests.cluster import wait_for
from tests.faults.nodes.clusters import KB, Cluster, a_cluster
from tests.faults.nodes.test_damage import parity_of, slot_of
from tests.flips import flip

pytestmark = [pytest.mark.faults, pytest.mark.timeout(240), pytest.mark.xdist_group("nodes-scrub")]

SIZES = (256 * KB, 512 * KB, 128 * KB, 300 * KB)
SETTINGS = {"CKPTD_SCRUB_MEMORY": "1G", "CKPTD_SCRUB_MEMORY_EVERY_S": "0.3s"}


@pytest.fixture(name="four", scope="module")
def fixture_four(zygote):
    """a, b, c, d."""
    with a_cluster(zygote, **SETTINGS) as cluster:
        yield cluster


def scrub(four: Cluster, name: str, job: str) -> ScrubStatus:
    found = four.job(name, job)
    assert found is not None
    assert found.scrub is not None
    return found.scrub


def test_a_segment_and_parity_are_made_again_from_the_set(four: Cluster):
    ranks = four.ranks("abcd", "scrub", sizes=SIZES)
    ranks.connect(drain_every=1000)
    ranks.call("load")
    ranks.save(10, "protected")
    wait_for(lambda: all(scrub(four, name, "scrub").memory_nbytes for name in "abcd"))
    node = four.nodes["c"]
    path = slot_of(node, 10)
    flip(path, 60_000)
    wait_for(lambda: scrub(four, "c", "scrub").mended == 1)
    assert "made good from the parity of its set" in node.log_text()
    flip(parity_of(node, "scrub"), 5000)
    wait_for(lambda: scrub(four, "c", "scrub").mended == 2)
    assert "made good from the segments of its set" in node.log_text()
    assert [scrub(four, name, "scrub").damaged for name in "abcd"] == [[]] * 4
    ranks.kill()
    four.replace("b")
    ranks = four.ranks("abcd", "scrub", sizes=SIZES)
    ranks.connect(drain_every=1000)
    assert [found["tier"] for found in ranks.load()] == ["arena", "rebuilt", "arena", "arena"], "both are sound"
    four.end(ranks)
