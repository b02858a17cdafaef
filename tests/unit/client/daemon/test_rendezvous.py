"""Rank 0 offers where the daemons meet; all ranks continue, or fail together with an error that says what to type."""

import threading

import msgspec
import pytest

from ckptd.shared.base.errors import BudgetError, CkptdError, ConfigError, ConnectError, UsageError
from ckptd.shared.base.ids import JobKey
from ckptd.shared.format.schemes import Scheme
from ckptd.shared.protocol.messages import Attach, NodeInfo, decode_request, encode
from ckptd.shared.protocol.topology import Peer, Rendezvous
from ckptd_client._daemon.rendezvous import RankRecord, agree, announce_failure, compare, rendezvous_of, why_unprotected
from ckptd_client._daemon.settings import as_scheme, as_set_size
from ckptd_client._local.rank import Group
from ckptd_client._local.settlement import StoreSettlement

KEY = "k" * 40


class Together:
    """A store of torch.distributed, in this process. It counts what is sent."""

    def __init__(self):
        self._values, self._lock = {}, threading.Lock()
        self.nbytes = 0

    def set(self, key, value):
        with self._lock:
            self._values[key] = value.encode()
            self.nbytes += len(value)

    def get(self, key):
        with self._lock:
            self.nbytes += len(self._values[key])
            return self._values[key]

    def add(self, key, amount):
        with self._lock:
            count = int(self._values.get(key, b"0")) + amount
            self._values[key] = str(count).encode()
            return count

    def check(self, keys):
        with self._lock:
            return all(key in self._values for key in keys)

    def delete_key(self, key):
        with self._lock:
            return self._values.pop(key, None) is not None

    @property
    def keys(self):
        return list(self._values)


def record(node, *, arena="a", endpoint=None, host=None, **asked):
    endpoint = f"tcp://{node}.cluster:7000" if endpoint is None else endpoint
    peer = Peer(node, arena, endpoint, KEY)
    return RankRecord(host=host or node, arena=f"/dev/shm/{node}", peer=peer, integrity="xxh3", **asked)


def info(*, scheme=Scheme.NONE, set_size=8):
    return NodeInfo(reply_to=0, peer=record("a").peer, scheme=scheme, set_size=set_size)


def all_agree(records, store=None):
    """What each rank gets: where to meet, or its error."""
    store, out = store or Together(), [None] * len(records)

    def of_rank(rank):
        group = Group(rank, len(records), "s", settle=StoreSettlement(store, "s", rank, len(records)))
        try:
            if isinstance(records[rank], Exception):
                with announce_failure(group):
                    raise records[rank]  # noqa: TRY301 - the very error of the test
            out[rank] = agree(group, records[rank], info())
        except Exception as error:
            out[rank] = error

    threads = [threading.Thread(target=of_rank, args=(rank,)) for rank in range(len(records))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return out


def test_all_ranks_meet_at_the_daemon_of_rank_0_with_one_ticket_and_leave_nothing():
    store = Together()
    found = all_agree([record(node) for node in "abbc"], store)
    assert len({(one.peer.node, one.ticket) for one in found}) == 1
    assert (found[0].peer.node, len(found[0].ticket)) == ("a", 32)
    assert store.keys == []
    assert found[0].ticket not in repr(found[0]).encode()


def test_what_a_rank_receives_does_not_grow_with_the_job():
    nbytes = {}
    for ranks in (2, 8, 32):
        store = Together()
        all_agree([record(f"n{rank}") for rank in range(ranks)], store)
        nbytes[ranks] = store.nbytes / ranks
    assert nbytes[32] <= nbytes[2] < 2048


def test_a_group_without_messages_meets_nowhere_else():
    found = [agree(Group(rank, 2, "s"), record("a"), info()) for rank in range(2)]
    assert found == [Rendezvous(record("a").peer, b"", Scheme.NONE, 8, asked=True)] * 2


def test_the_scheme_is_that_of_connect_or_of_rank_0s_daemon():
    found = rendezvous_of(record("a"), info(scheme=Scheme.DOUBLE, set_size=5), several=True)
    assert (found.scheme, found.set_size, found.asked) == (Scheme.DOUBLE, 5, True)
    found = rendezvous_of(record("a", redundancy=Scheme.NONE, set_size=2), info(scheme=Scheme.DOUBLE), several=True)
    assert (found.scheme, found.set_size) == (Scheme.NONE, 2)
    assert not rendezvous_of(record("a"), info(scheme=Scheme.XOR), several=True).asked


def test_double_parity_has_smaller_sets():
    with pytest.raises(ConfigError, match="sets of 17 nodes are too large"):
        rendezvous_of(record("a"), info(scheme=Scheme.DOUBLE, set_size=17), several=True)
    asked = record("a", redundancy=Scheme.XOR, set_size=64)
    assert rendezvous_of(asked, info(scheme=Scheme.DOUBLE), several=True).set_size == 64


def test_ranks_that_disagree_are_named_on_all_of_them():
    found = all_agree([record("a", redundancy=Scheme.XOR), record("b", redundancy=Scheme.XOR), record("c")])
    assert {type(error) for error in found} == {UsageError}
    (text,) = {error.message for error in found}
    assert "rank 0 connects with redundancy='xor', set_size=None, rank 2 with redundancy=None" in text
    with pytest.raises(UsageError, match=r"rank 0 connects with redundancy=None, set_size=None, rank 1 .*set_size=4"):
        compare(record("a"), record("a", set_size=4), 1)


def test_what_all_ranks_must_give_alike_is_compared():
    first = record("a", alike=(("job", "'x'"), ("drain_every", "1")))
    compare(first, first, 1)
    other = msgspec.structs.replace(first, alike=(("job", "'y'"), ("drain_every", "1")))
    with pytest.raises(UsageError, match=r"rank 0 connects with job='x', rank 2 with job='y'") as caught:
        compare(first, other, 2)
    assert "same job= on all ranks; for a job of each rank's own: connect(job=..., alone=True)" in caught.value.hint
    other = msgspec.structs.replace(first, alike=(("job", "'x'"), ("drain_every", "2")))
    with pytest.raises(UsageError, match=r"rank 0 connects with drain_every=1, rank 1 with drain_every=2"):
        compare(first, other, 1)
    with pytest.raises(ConfigError, match=r"rank 0 and its daemon have integrity xxh3, rank 1 has keyed:1"):
        compare(first, msgspec.structs.replace(first, integrity="keyed:1"), 1)


def test_two_daemons_of_one_name_are_distinguished_by_their_arenas():
    with pytest.raises(ConfigError, match=r"two daemons call themselves node 'a': .* on x \(rank 0\) and .* on y") as e:
        compare(record("a", arena="1", host="x"), record("a", arena="2", host="y"), 1)
    assert "CKPTD_NODE" in e.value.hint


@pytest.mark.parametrize("endpoint", ["", "tcp://0.0.0.0:7000", "tcp://[::]:7000"])
def test_several_nodes_need_addresses_and_a_lone_one_does_not(endpoint):
    compare(record("a", endpoint=endpoint), record("a", endpoint=endpoint), 1)
    with pytest.raises(ConfigError, match="node 'b' is reached at") as caught:
        compare(record("a"), record("b", endpoint=endpoint), 1)
    assert "CKPTD_PEER_ADDRESS" in caught.value.hint


@pytest.mark.parametrize("address", ["127.0.0.1", "127.1.2.3", "localhost", "[::1]"])
def test_a_loopback_address_is_for_daemons_of_one_host(address):
    near, far = (record(n, endpoint=f"tcp://{address}:{p}", host="one") for n, p in (("a", 1), ("b", 2)))
    compare(near, far, 1)
    with pytest.raises(ConfigError, match="leads from host two to two itself"):
        compare(near, msgspec.structs.replace(far, host="two"), 1)


def test_two_nodes_at_one_address_are_a_mistake():
    with pytest.raises(ConfigError, match="'b' and that of 'a' are both reached at tcp://n:1"):
        compare(*(record(node, endpoint="tcp://n:1") for node in "ab"), 1)


def test_what_fails_on_a_rank_is_raised_on_all_in_its_own_kind():
    own = BudgetError("too large", hint="shrink it")
    found = all_agree([record("a"), own, record("c")])
    assert found[1] is own
    for error in (found[0], found[2]):
        assert isinstance(error, BudgetError)
        assert error.message.startswith("rank 1 on ")
        assert error.message.endswith(" could not connect: too large")
        assert error.hint == "shrink it"


@pytest.mark.parametrize("error", [ConfigError("no store", hint="set it"), ZeroDivisionError("oops")])
def test_a_failure_takes_the_place_of_the_offer_and_is_raised_here_as_it_is(error):
    found = all_agree([error, record("b")])
    assert found[0] is error
    assert isinstance(found[1], CkptdError)
    assert "no store" in found[1].message or "ZeroDivisionError: oops" in found[1].message


def test_an_exchange_that_fails_is_a_connect_error():
    def broken(offer, problem):
        raise RuntimeError("Connection closed by peer")

    with pytest.raises(ConnectError, match="Connection closed by peer"):
        agree(Group(0, 2, "s", settle=broken), record("a"), info())


def test_why_a_node_is_unprotected():
    none, xor = (Rendezvous(record("a").peer, b"", scheme) for scheme in (Scheme.NONE, Scheme.XOR))
    assert why_unprotected(none, 2, "a") == "redundancy is none"
    assert why_unprotected(xor, 1, "a") == "all ranks of the job run on one node"
    assert why_unprotected(xor, 3, "b").startswith("node b has no other")


@pytest.mark.parametrize("ranks", [4, 80_000])
def test_what_a_rank_says_to_its_daemon_is_small_whatever_the_job(ranks):
    rendezvous = Rendezvous(Peer("node00001", "a" * 32, "tcp://10.0.0.1:40000", KEY), bytes(32), Scheme.XOR)
    attach = Attach(
        seq=1, job=JobKey("/s", "j"), session="s" * 32, rank=0, world_size=ranks, host="h", pid=1,
        rendezvous=rendezvous,
    )  # fmt: skip
    assert len(encode(attach)) < 512
    assert decode_request(encode(attach)) == attach


@pytest.mark.parametrize("bad", ["xxor", "", "XOR"])
def test_no_other_redundancy_is_taken(bad):
    with pytest.raises(ConfigError, match="redundancy="):
        as_scheme(bad)


@pytest.mark.parametrize("bad", [1, 65, -1, True, "8", 2.5])
def test_no_other_set_size_is_taken(bad):
    with pytest.raises(ConfigError, match="set_size="):
        as_set_size(bad)
    assert [as_set_size(good) for good in (None, 2, 64)] == [None, 2, 64]
