"""Real arenas, real sockets: sets are encoded, lose nodes, and get every byte back."""

import itertools
import os
import tempfile

import pytest

from ckptd.parity.encode import encode
from ckptd.parity.files import code_of, open_parity
from ckptd.parity.rebuild import Place, copy_segment, rebuild_segment
from ckptd.shared.base.errors import PeerError
from ckptd.shared.format.digest import BLOCK_NBYTES
from ckptd.shared.format.schemes import Scheme
from tests.nodes import EPOCH, KEY, SAVE, content, noise, start_set

MIB = 1 << 20


@pytest.fixture
def directory():
    with tempfile.TemporaryDirectory(prefix="ckptd-test-", dir="/dev/shm") as directory:
        yield directory


@pytest.fixture
def make_set(directory):
    made = []

    def make(sizes):
        made.append(start_set(directory, len(sizes)))
        made[0].stage([[noise(f"{i} {k}", n) for k, n in enumerate(own)] for i, own in enumerate(sizes)])
        return made[0]

    yield make
    for one in made:
        one.stop()


def encode_all(nodes, scheme, epoch=EPOCH):
    for index, node in enumerate(nodes.nodes):
        parity_chunk = nodes.parity_chunk(index, scheme, epoch)
        pulled = []
        encode(node.parities, KEY, parity_chunk, nodes.sources(node), pulled.append)
        found = open_parity(node.arena, KEY, SAVE, epoch)
        assert found is not None
        assert found.parity_chunk == parity_chunk
        assert found.nbytes == code_of(parity_chunk).parity_nbytes


def rebuild_all(nodes, scheme, lost, at):
    """Every segment of the lost members, made again on another node, which has lost nothing."""
    parity_chunk = nodes.parity_chunk(next(i for i in range(len(nodes.nodes)) if i not in lost), scheme)
    homes, parity_chunks = dict(nodes.homes(lost)), nodes.parity_chunks(lost)
    for member in lost:
        for seal in nodes.columns[member].seals:
            before = content(nodes.nodes[member].arena, seal.rank)
            fetched = rebuild_segment(
                Place(at.arena, KEY, seal), parity_chunk, homes, parity_chunks, nodes.sources(at), lambda _: None
            )
            assert at.arena.seal_of(KEY, fetched.slot) == seal
            assert content(at.arena, seal.rank) == before
            at.arena.unlink(KEY, fetched.slot)


SIZES = [
    [[300_000], [200_001], [7], [299_999]],
    [[5 * MIB + 3], [], [1, 1, 1]],
    [[100_001, 0, 3], [400_000, 5], [40_000], [1_000_000, 1_000_003], [0]],
    [[0], [0]],
    [[], [], []],
    [[3 * MIB], [3 * MIB]],
    [[BLOCK_NBYTES + 5, BLOCK_NBYTES], [2 * BLOCK_NBYTES + 77], [BLOCK_NBYTES]],
    [[9 * 4096 + 1]] * 8,
]


@pytest.mark.parametrize(
    ("scheme", "sizes"),
    [(scheme, sizes) for scheme in (Scheme.XOR, Scheme.DOUBLE) for sizes in SIZES if len(sizes) > scheme.losses],
    ids=str,
)
def test_every_loss_within_the_scheme_is_rebuilt(make_set, scheme, sizes):
    nodes = make_set(sizes)
    encode_all(nodes, scheme)
    members = range(len(sizes))
    for count in range(1, scheme.losses + 1):
        for lost in itertools.combinations(members, count):
            nodes.down = {f"n{i}" for i in lost}
            survivor = nodes.nodes[next(i for i in members if i not in lost)]
            rebuild_all(nodes, scheme, lost, survivor)


def test_more_losses_are_refused_and_leave_nothing(make_set):
    nodes = make_set([[100_000], [100_000], [100_000], [100_000]])
    encode_all(nodes, Scheme.XOR)
    at, seal = nodes.nodes[3], nodes.columns[0].seals[0]
    before = at.arena.used_nbytes
    with pytest.raises(PeerError, match=r"2 of 4 parts of a group are lost, xor bears 1"):
        rebuild_segment(
            Place(at.arena, KEY, seal), nodes.parity_chunk(3, Scheme.XOR), nodes.homes([0, 1]),
            nodes.parity_chunks([0, 1]), nodes.sources(at), lambda _: None,
        )  # fmt: skip
    assert at.arena.used_nbytes == before


def test_a_segment_is_copied(make_set):
    nodes = make_set([[20 * MIB + 17], [5]])
    at, seal = nodes.nodes[1], nodes.columns[0].seals[0]
    pulled = []
    fetched = copy_segment(Place(at.arena, KEY, seal), "n0", nodes.sources(at), pulled.append)
    assert at.arena.seal_of(KEY, fetched.slot) == seal
    assert content(at.arena, 0) == content(nodes.nodes[0].arena, 0)
    assert sum(pulled) == len(content(at.arena, 0))
    assert os.path.getsize(at.arena.slot_path(KEY, fetched.slot)) == fetched.capacity


def test_segments_that_moved_serve_a_rebuild(make_set):
    """Column 0 lies on two other nodes than the one it was encoded on."""
    nodes = make_set([[300_000, 500_001], [600_000], [700_000]])
    encode_all(nodes, Scheme.XOR)
    homes = dict(nodes.homes([1]))
    for rank, to in ((0, 1), (1, 2)):
        at = nodes.nodes[to]
        copy_segment(Place(at.arena, KEY, nodes.columns[0].seals[rank]), "n0", nodes.sources(at), lambda _: None)
        homes[rank] = f"n{to}"
    seal = nodes.columns[1].seals[0]
    at = nodes.nodes[0]
    rebuild_segment(
        Place(at.arena, KEY, seal), nodes.parity_chunk(0, Scheme.XOR), homes, nodes.parity_chunks([1]),
        nodes.sources(at), lambda _: None,
    )  # fmt: skip
    assert content(at.arena, 2) == content(nodes.nodes[1].arena, 2)
