"""Ranks of another world pull what they need from the memory of nodes: to the bit, and little more than they need."""

import re

import pytest

from tests.faults.nodes.clusters import a_cluster
from tests.faults.nodes.test_damage import slot_of
from tests.flips import flip
from tests.interop.launch import on_homes
from tests.interop.off_store import STEP
from tests.interop.pulled_ranks import COLUMNS, ROWS
from tests.long_form import in_long

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]

SCRIPT = "pulled_ranks.py"
PULLED = re.compile(r"\bpulled save=.* nbytes=(\d+)")
TENSORS = 3 * 4  # bytes of an element of `rows` with its two moments in the optimizer


@pytest.fixture(name="cluster")
def fixture_cluster():
    with a_cluster(None, CKPTD_REDUNDANCY="xor", CKPTD_PEER_TIMEOUT_S="10") as cluster:
        cluster.add("e")
        yield cluster


def homes(cluster, names):
    return [cluster.nodes[name] for name in names]


def moved(cluster):
    """Bytes that daemons have pulled so far."""
    return sum(int(number) for node in cluster.nodes.values() for number in PULLED.findall(node.log_text()))


def pieces(extent, ranks):
    """As torch.chunk cuts: start and stop of each rank's rows."""
    size = -(-extent // ranks)
    return [(min(rank * size, extent), min((rank + 1) * size, extent)) for rank in range(ranks)]


def needed(before, after):
    """Bytes of sharded tensors that ranks need of ranks that ran on other nodes: the names of the nodes, by rank."""

    def elements(extent, width):
        old, new = pieces(extent, len(before)), pieces(extent, len(after))
        return width * sum(
            max(0, min(stop, last) - max(start, first))
            for (start, stop), here in zip(new, after, strict=True)
            for (first, last), there in zip(old, before, strict=True)
            if here != there
        )

    return TENSORS * (elements(ROWS, COLUMNS) + elements(1030, 64))


@pytest.mark.parametrize(
    ("before", "after", "few"),
    [
        ("abcd", "abc", "all"),
        ("aabb", "bce", "few"),
        *in_long(("abcd", "dcb", "few"), ("ab", "abcd", "few"), ("abc", "abcde", "all")),
    ],
)
def test_other_ranks_load_to_the_bit_and_pull_what_they_need(cluster, before, after, few):
    folder, job = str(cluster.directory), f"job-{before}-{after}"
    on_homes(homes(cluster, before), SCRIPT, "save", folder, job, "protected")
    on_homes(homes(cluster, after), SCRIPT, "load", folder, job, "peer", few)
    wanted = needed(before, after)
    assert wanted <= moved(cluster) <= 1.05 * wanted, (wanted, moved(cluster))


def test_a_damaged_block_is_rebuilt_from_parity_and_named(cluster):
    folder, job = str(cluster.directory), "damaged"
    on_homes(homes(cluster, "abcd"), SCRIPT, "save", folder, job, "protected")
    flip(slot_of(cluster.nodes["b"], STEP), 60_000)
    said = on_homes(homes(cluster, "acd"), SCRIPT, "load", folder, job, "rebuilt", "all")
    assert re.search(r"rank 1: node b: slot \S+ block 0 does not match its digest", said), said


def test_a_lost_node_is_rebuilt_once_and_what_ranks_need_of_it_is_pulled(cluster):
    folder, job = str(cluster.directory), "lost"
    on_homes(homes(cluster, "abcd"), SCRIPT, "save", folder, job, "protected")
    cluster.lose("c")
    on_homes(homes(cluster, "abd"), SCRIPT, "load", folder, job, "rebuilt", "few")
    wanted = needed("abdd", "abd")  # it is rebuilt where rank 2 runs now
    assert wanted <= moved(cluster) <= 1.05 * wanted, (wanted, moved(cluster))


def test_a_name_that_two_parts_of_a_job_hold_is_sought_in_all_layouts(cluster):
    """One layout names the ranks of its own part alone: the tensor of the other part would not be looked at."""
    folder, job = str(cluster.directory), "parts"
    on_homes(homes(cluster, "abcd"), SCRIPT, "save_parts", folder, job, "staged")
    said = on_homes(homes(cluster, "ab"), SCRIPT, "load_parts", folder, job)
    refused = r"rank \d refused: .*is one tensor on ranks 0 to 1, and another on ranks 2 to 3"
    assert len(re.findall(refused, said)) == 2, said
