"""Every way to shard, restored on other ranks and in other layouts from memory alone.

That is from the arena of one node, from the arenas of peers, and rebuilt from parity after nodes were lost. The store
has none of these saves, and every rank says where it read. Each kind of state goes one of these ways; FAULTS=long
has all go each, adds worlds, and two nodes lost at once.
"""

import os

import pytest

from ckptd.shared.base.ids import parse_dirname
from tests.cluster import Node
from tests.faults.nodes.clusters import a_cluster
from tests.interop.launch import on_homes, on_ranks
from tests.long_form import LONG, in_long

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]

SCRIPT = "memory_ranks.py"
KINDS = ("tp", "hsdp", "ddp", "boxes", "stock", "shares")
OF_ONE_NODE = KINDS if LONG else ("hsdp", "ddp")
OF_PEERS = KINDS if LONG else ("tp", "boxes")
OF_PARITY = KINDS if LONG else ("stock", "shares")
PEER_TIMEOUT_S = 10


def load(homes, folder, job, layout, tiers, *, kinds):
    """A rank on each of these nodes; tiers: of the ranks, or of all alike."""
    told = tiers if isinstance(tiers, list) else [tiers] * len(homes)
    on_homes(homes, SCRIPT, "load", folder, job, layout, ",".join(told), ",".join(kinds))


def check_store(store):
    """The first save of each job is there, and nothing else ever was."""
    names = [name for job in os.scandir(store) if job.is_dir() for name in os.listdir(job)]
    assert {step for step, _ in filter(None, map(parse_dirname, names))} == {1}, names


@pytest.fixture(name="cluster")
def fixture_cluster(request):
    # A busy machine takes long to answer: a node that seems lost meanwhile would be no fault of what is shown here.
    with a_cluster(
        None, CKPTD_REDUNDANCY=getattr(request, "param", "xor"), CKPTD_PEER_TIMEOUT_S=str(PEER_TIMEOUT_S)
    ) as cluster:
        yield cluster


def saved(cluster, tag, kinds):
    """Rank r of four on the r-th node, in a job of each kind. The folder that the ranks share."""
    on_homes(list(cluster.nodes.values()), SCRIPT, "save", cluster.directory, "protected", tag, ",".join(kinds))
    return cluster.directory


def test_on_one_node_from_its_arena(tmp_path):
    folder = str(tmp_path)
    with Node(folder) as node:
        node.start()
        on_ranks(node, 4, SCRIPT, "save", folder, "staged", "a", ",".join(OF_ONE_NODE))
        more = in_long((4, "fsdp"), (2, "hsdp"), (3, "fsdp"), (6, "tp"))
        for ranks, layout in [(2, "ddp"), (1, "fsdp"), *more]:
            load([node] * ranks, folder, "a", layout, "arena", kinds=OF_ONE_NODE)
        check_store(folder)


def test_from_peers_and_from_parity(cluster):
    """Ranks in another order and another layout; on fewer nodes after one was lost; then on a new one too, and more."""
    folder = saved(cluster, "moved", OF_PEERS)
    saved(cluster, "lost", OF_PARITY)
    load([cluster.nodes[name] for name in "badc"], folder, "moved", "fsdp", "peer", kinds=OF_PEERS)
    cluster.lose("c")
    load([cluster.nodes[name] for name in "abd"], folder, "lost", "fsdp", "rebuilt", kinds=OF_PARITY)
    cluster.add("e")
    kinds = KINDS if LONG else ("shares",)
    load([cluster.nodes[name] for name in "eabde"], folder, "lost", "fsdp", "peer", kinds=kinds)
    check_store(cluster.store)


@pytest.mark.skipif(not LONG, reason="FAULTS=long")
@pytest.mark.parametrize("cluster", ["double"], indirect=True)
@pytest.mark.parametrize(("homes", "layout"), [("ab", "hsdp"), ("a", "fsdp"), ("abef", "tp"), ("bbaaef", "fsdp")])
def test_after_the_loss_of_two_nodes(cluster, homes, layout):
    folder = saved(cluster, "two", KINDS)
    for name, fresh in zip("cd", "ef", strict=True):
        cluster.replace(name, fresh)
    as_saved = "|arena|peer" if len(homes) == 4 else ""  # a kind that lies as it was saved has parts that were not lost
    load([cluster.nodes[name] for name in homes], folder, "two", layout, f"rebuilt{as_saved}", kinds=KINDS)
    check_store(cluster.store)
