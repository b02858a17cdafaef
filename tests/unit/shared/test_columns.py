"""A topology as bytes: small, the same on all nodes, and refused when a byte of it is another one."""

import random
import time
import zlib

import msgspec
import pytest
from zmq.utils import z85

from ckptd.shared.base.errors import ProtocolError
from ckptd.shared.format.schemes import Scheme
from ckptd.shared.protocol import columns
from ckptd.shared.protocol.topology import Peer, Topology

MOST_NBYTES = 64  # a node


def a_topology(nodes, ranks=8, seed=0):
    """As a cluster has it: random arenas, keys and ports."""
    chance = random.Random(seed)
    peers = tuple(
        Peer(
            f"node{number:05d}", chance.randbytes(16).hex(),
            f"tcp://10.{number >> 12}.{number >> 6 & 63}.{number & 63}:{chance.randrange(30_000, 60_000)}",
            z85.encode(chance.randbytes(32)).decode(), f"rack{number // 32}",
        )
        for number in range(nodes)
    )  # fmt: skip
    return Topology(peers, tuple(rank // ranks for rank in range(nodes * ranks)), Scheme.XOR, 8)


def through(topology):
    """What another process makes of it."""
    raw = msgspec.msgpack.encode(topology.packed)
    return Topology.unpacked(msgspec.msgpack.decode(raw, type=columns.Packed)), len(raw)


@pytest.mark.parametrize("nodes", [64, 1000, 10_000])
def test_it_comes_back_and_takes_64_bytes_a_node(nodes):
    topology = a_topology(nodes)
    found, nbytes = through(topology)
    assert found == topology
    assert nbytes <= MOST_NBYTES * nodes
    assert found.digest == topology.digest


@pytest.mark.parametrize("homes", [(0, 0, 1), (0, 1, 2, 0, 1, 2), (2, 0, 0, 1), tuple(range(3)) * 1000])
def test_ranks_may_lie_anyhow(homes):
    peers = a_topology(3).peers
    topology = Topology(peers, homes, Scheme.DOUBLE, 5, asked=True)
    assert through(topology)[0] == topology


def test_ranks_that_are_dealt_in_turn_cost_little():
    dealt = Topology(a_topology(1000).peers, tuple(range(1000)) * 8)
    assert through(dealt)[1] <= MOST_NBYTES * 1000


def test_the_digest_is_of_the_content_alone():
    topology = a_topology(20)
    packed = topology.packed
    other = columns.Packed(packed.digest, packed.keys, zlib.compress(zlib.decompress(packed.rest), 9))
    assert other.rest != packed.rest
    assert Topology.unpacked(other) == topology
    moved = msgspec.structs.replace(topology, homes=(0,) * len(topology.homes))
    for another in (moved, msgspec.structs.replace(topology, set_size=4), a_topology(20, seed=1)):
        assert another.digest != topology.digest


def repacked(change, topology=None):
    """Columns that are changed, under their right digest."""
    packed = (topology or a_topology(3)).packed
    rest = msgspec.msgpack.decode(zlib.decompress(packed.rest))
    keys = change(rest) or packed.keys
    plain = msgspec.msgpack.encode(rest)
    return columns.Packed(columns.digest_of(keys, plain), keys, zlib.compress(plain))


def put(*path):
    """Sets one place of the columns to the last item."""

    def change(rest):
        *way, last, value = path
        for step in way:
            rest = rest[step]
        rest[last] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        put(0, 0, 0, "../node"),
        put(0, 0, 0, "node00001"),  # a second one of that name
        put(0, 0, 0, 7),
        put(0, 1, 0, "a/b"),
        put(0, 2, 0, "ipc:///etc/x"),
        put(0, 3, 0, "x" * 256),
        put(0, 0, ["node1"]),
        put(1, 0, 4),  # a node that there is not
        put(1, 0, 0),  # before the first
        put(1, [1]),
        put(2, 0, 0),
        put(2, 0, -1),
        put(2, 0, 1 << 40),
        put(2, 0, 1 << 63),
        put(3, 0, "triple"),
        put(3, 1, 1),
        put(3, []),
        lambda rest: b"k" * 95,
        lambda rest: b"k" * 64,
        lambda rest: rest.clear(),
    ],
)
def test_columns_that_make_no_topology_are_refused(change):
    with pytest.raises(ProtocolError, match="malformed topology"):
        Topology.unpacked(repacked(change))


def test_unchanged_columns_are_taken():
    assert Topology.unpacked(repacked(lambda rest: None)) == a_topology(3)


@pytest.mark.parametrize("place", range(3))
def test_one_other_byte_is_refused(place):
    fields = list(msgspec.structs.astuple(a_topology(5).packed))
    for at in range(0, len(fields[place]), 7):
        changed = bytearray(fields[place])
        changed[at] ^= 1
        with pytest.raises(ProtocolError, match="malformed topology"):
            Topology.unpacked(columns.Packed(*fields[:place], bytes(changed), *fields[place + 1 :]))


@pytest.mark.seconds
def test_bytes_that_expand_are_cut_off():
    bomb = zlib.compress(bytes(200 << 20), 9)
    assert len(bomb) < columns.MAX_NBYTES
    began = time.process_time()
    with pytest.raises(ProtocolError, match="do not end"):
        Topology.unpacked(columns.Packed(bytes(16), b"", bomb))
    assert time.process_time() - began < 2


@pytest.mark.parametrize("key", ["%" * 40, "k" * 39, "k" * 39 + "~", "é" * 40, "#####" + "k" * 35])
def test_a_key_that_is_none_is_not_packed(key):
    with pytest.raises(ProtocolError, match="is no key"):
        columns.raw_keys([key])


def test_keys_are_those_of_zeromq():
    chance = random.Random(3)
    raw = [chance.randbytes(32) for _ in range(200)]
    texts = [z85.encode(one).decode() for one in raw]
    assert columns.raw_keys(texts) == b"".join(raw)
    assert columns.text_keys(b"".join(raw)) == texts
