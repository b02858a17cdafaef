"""What the ranks' words come to: nodes in order, and errors that say what to type."""

import time

import msgspec
import pytest

from ckptd.shared.base.errors import BudgetError, CkptdError, ConfigError, ConnectError, UsageError
from ckptd.shared.base.ids import JobKey
from ckptd.shared.format.schemes import Scheme
from ckptd.shared.protocol.messages import MAX_MESSAGE_NBYTES, Attach, NodeInfo, decode_request, encode
from ckptd.shared.protocol.topology import Peer, Topology
from ckptd_client._daemon.settings import as_scheme, as_set_size
from ckptd_client._daemon.topology import RankRecord, announce_failure, gather, topology_of, why_unprotected
from ckptd_client._local.rank import Group

KEY = "k" * 40


def record(node, *, arena="a", endpoint=None, host=None, scheme=Scheme.NONE, set_size=8, **asked):
    endpoint = f"tcp://{node}.cluster:7000" if endpoint is None else endpoint
    info = NodeInfo(reply_to=0, peer=Peer(node, arena, endpoint, KEY), scheme=scheme, set_size=set_size)
    return RankRecord(host=host or node, arena=f"/dev/shm/{node}", info=info, **asked)


def test_nodes_stand_in_the_order_of_their_lowest_rank_however_the_ranks_are_dealt():
    found = topology_of([record(node) for node in ("b", "a", "b", "c", "a", "b")])
    assert found.nodes == ("b", "a", "c")
    assert found.homes == (0, 1, 0, 2, 1, 0)
    assert (found.coordinator, found.home(3), found.ranks_of("a")) == ("b", "c", (1, 4))


def test_the_scheme_is_that_of_connect_or_of_rank_0s_daemon():
    a, b = record("a", scheme=Scheme.DOUBLE, set_size=5), record("b", scheme=Scheme.XOR)
    found = topology_of([a, b])
    assert (found.scheme, found.set_size) == (Scheme.DOUBLE, 5)
    found = topology_of([msgspec.structs.replace(w, redundancy=Scheme.NONE, set_size=2) for w in (a, b)])
    assert (found.scheme, found.set_size) == (Scheme.NONE, 2)


def test_ranks_that_disagree_are_named():
    records = [record("a", redundancy=Scheme.XOR), record("b", redundancy=Scheme.XOR), record("c")]
    with pytest.raises(UsageError, match=r"rank 0 connects with redundancy='xor', .* rank 2 with redundancy=None"):
        topology_of(records)
    with pytest.raises(UsageError, match=r"rank 0 connects with redundancy=None, set_size=None, rank 1 .*set_size=4"):
        topology_of([record("a"), msgspec.structs.replace(record("a"), set_size=4)])


def test_what_all_ranks_must_give_alike_is_compared():
    records = [record("a", alike=(("job", "'x'"), ("drain_every", "1")))] * 2
    assert topology_of(records).homes == (0, 0)
    other = msgspec.structs.replace(records[0], alike=(("job", "'y'"), ("drain_every", "1")))
    with pytest.raises(UsageError, match=r"rank 0 connects with job='x', rank 2 with job='y'") as caught:
        topology_of([*records, other])
    assert "same job= on all ranks; for a job of each rank's own: connect(job=..., alone=True)" in caught.value.hint
    other = msgspec.structs.replace(records[0], alike=(("job", "'x'"), ("drain_every", "2")))
    with pytest.raises(UsageError, match=r"rank 0 connects with drain_every=1, rank 1 with drain_every=2"):
        topology_of([records[0], other])


def test_two_daemons_of_one_name_are_distinguished_by_their_arenas():
    twins = [record("a", arena="1", host="x"), record("b"), record("a", arena="2", host="y")]
    with pytest.raises(ConfigError, match=r"two daemons call themselves node 'a': .* on x \(rank 0\) and .* on y") as e:
        topology_of(twins)
    assert "CKPTD_NODE" in e.value.hint


@pytest.mark.parametrize("endpoint", ["", "tcp://0.0.0.0:7000", "tcp://[::]:7000"])
def test_several_nodes_need_addresses_and_a_lone_one_does_not(endpoint):
    assert topology_of([record("a", endpoint=endpoint)] * 3).homes == (0, 0, 0)
    with pytest.raises(ConfigError, match="node 'b' is reached at") as caught:
        topology_of([record("a"), record("b", endpoint=endpoint)])
    assert "CKPTD_PEER_ADDRESS" in caught.value.hint


@pytest.mark.parametrize("address", ["127.0.0.1", "127.1.2.3", "localhost", "[::1]"])
def test_a_loopback_address_is_for_daemons_of_one_host(address):
    near, far = (record(n, endpoint=f"tcp://{address}:{p}", host="one") for n, p in (("a", 1), ("b", 2)))
    assert topology_of([near, far]).nodes == ("a", "b")
    with pytest.raises(ConfigError, match="leads from host two to two itself"):
        topology_of([near, msgspec.structs.replace(far, host="two")])


def test_two_nodes_at_one_address_are_a_mistake():
    with pytest.raises(ConfigError, match="'b' and that of 'a' are both reached at tcp://n:1"):
        topology_of([record(node, endpoint="tcp://n:1") for node in "ab"])


def test_what_fails_on_a_rank_is_raised_on_all_in_its_own_kind():
    failed = RankRecord(host="h", code="budget", message="too large", hint="shrink it")
    with pytest.raises(BudgetError, match="rank 1 on h could not connect: too large") as caught:
        topology_of([record("a"), failed, record("c")])
    assert caught.value.hint == "shrink it"


@pytest.mark.parametrize("error", [ConfigError("no store", hint="set it"), ZeroDivisionError("oops")])
def test_a_failure_takes_the_place_of_the_word_and_is_raised_here_as_it_is(error):
    frames = []
    with pytest.raises(type(error)) as caught, announce_failure(Group(0, 2, "s", lambda frame: [frames.append(frame)])):
        raise error
    assert caught.value is error
    (told,) = [msgspec.msgpack.decode(frame, type=RankRecord) for frame in frames]
    with pytest.raises(CkptdError, match=r"no store|ZeroDivisionError: oops"):
        topology_of([record("a"), told])


def test_an_exchange_that_fails_is_a_connect_error():
    def broken(frame):
        raise RuntimeError("Connection closed by peer")

    with pytest.raises(ConnectError, match="Connection closed by peer"):
        gather(Group(0, 2, "s", broken), record("a"))


def test_why_a_node_is_unprotected():
    pair = topology_of([record("a"), record("b")])
    assert why_unprotected(pair, 0) == "redundancy is none"
    xor = {"redundancy": Scheme.XOR}
    assert why_unprotected(topology_of([record("a", **xor)]), 0) == "all ranks of the job run on one node"
    assert why_unprotected(topology_of([record("a", **xor), record("b", **xor)]), 1).startswith("node b has no other")


def test_ten_thousand_ranks_are_a_message_and_a_moment():
    records = [record(f"node{rank // 8:05d}", arena=f"{rank // 8:032x}") for rank in range(10_000)]
    began = time.perf_counter()
    found = topology_of(records)
    frame = encode(
        Attach(seq=1, version=1, job=JobKey("/s", "j"), session="s", rank=0, world_size=10_000, host="h", pid=1,
               topology=found)
    )  # fmt: skip
    seconds = time.perf_counter() - began
    assert len(frame) < MAX_MESSAGE_NBYTES / 4
    assert decode_request(frame).topology == found
    assert len(found.peers) == 1250
    assert seconds < 2, "it takes 0.1 s on an idle machine"


@pytest.mark.parametrize("bad", ["xxor", "", "XOR"])
def test_no_other_redundancy_is_taken(bad):
    with pytest.raises(ConfigError, match="redundancy="):
        as_scheme(bad)


@pytest.mark.parametrize("bad", [1, 65, -1, True, "8", 2.5])
def test_no_other_set_size_is_taken(bad):
    with pytest.raises(ConfigError, match="set_size="):
        as_set_size(bad)
    assert [as_set_size(good) for good in (None, 2, 64)] == [None, 2, 64]


def test_one_peer_is_a_topology():
    assert isinstance(topology_of([record("a", endpoint="")]), Topology)


def test_double_parity_has_smaller_sets():
    records = [record("a", scheme=Scheme.DOUBLE, set_size=17), record("b")]
    with pytest.raises(ConfigError, match="sets of 17 nodes are too large"):
        topology_of(records)
    assert topology_of([msgspec.structs.replace(w, redundancy=Scheme.XOR, set_size=64) for w in records]).set_size == 64


def test_a_topology_that_fits_no_message_is_reported():
    records = [
        record(f"{'n' * 200}{number}", endpoint=f"tcp://10.{number // 256}.{number % 256}.1:7000")
        for number in range(4000)
    ]
    with pytest.raises(ConfigError, match="the topology of 4000 nodes takes"):
        topology_of(records)
