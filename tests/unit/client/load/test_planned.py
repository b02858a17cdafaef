"""Ranks that load a directory without a daemon: what their plans say of each, and the part that each gets."""

import gc
import os
import socket
import time
import weakref

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.planner import LoadPlan

from ckptd.shared.base.ids import SaveId
from ckptd.shared.bulk import own_host
from ckptd.shared.protocol.read_tree import ExchangeAddress, Place
from ckptd_client._load.shared_read import planned
from ckptd_client._load.shared_read.found import DifferentError, Found
from ckptd_client._load.shared_read.own_address import own_address
from ckptd_client._load.shared_read.planned import Assigned, Offer, Offered, assign, refuse_different
from ckptd_client._local.rank import Group
from ckptd_client.dcp import CkptdReader
from tests.checkpoints import write_checkpoint
from tests.on_meshes import rank_of
from tests.runs import RUN
from tests.stored import records_of


def address(number, host="10.0.0.{}"):
    return ExchangeAddress(host.format(number), 1000 + number, bytes(32))


def offer(rank, home, *, machine="m", exchange=None, step=1):
    return Offer(Found.of(rank, SaveId(1, 1, step, RUN), b"", 0), machine, f"{machine} {home}", exchange)


def test_ranks_of_a_home_share_and_the_first_that_has_an_address_exchanges_with_other_homes():
    """In any order of ranks over homes; a home without an address reads without the others."""
    offers = [
        offer(0, "a"), offer(1, "b", exchange=address(1)), offer(2, "c"), offer(3, "a", exchange=address(3)),
        offer(4, "b", exchange=address(4)), offer(5, "c"),
    ]  # fmt: skip
    assert assign(offers, "s") == [
        Assigned(0, "s", (3, 0), Place(0, 2), None),
        Assigned(1, "s", (1, 4), Place(1, 2), address(3)),
        Assigned(2, "s", (2, 5), None, None),
        Assigned(3, "s", (3, 0), Place(0, 2), None),
        Assigned(4, "s", (1, 4), Place(1, 2), address(3)),
        Assigned(5, "s", (2, 5), None, None),
    ]


def test_one_home_needs_no_other():
    offers = [offer(rank, "a", exchange=address(rank)) for rank in range(2)]
    assert [(one.readers, one.place, one.parent) for one in assign(offers, "s")] == [((0, 1), None, None)] * 2


def test_the_parents_of_many_nodes_are_those_of_the_tree():
    found = assign([offer(n, n, machine=n, exchange=address(n)) for n in range(70)], "s")
    assert [one.place for one in found] == [Place(n, 70) for n in range(70)]
    assert [found[n].parent for n in (0, 31, 32, 33, 64, 69)] == [
        None, address(0), address(0), address(32), address(0), address(64),
    ]  # fmt: skip


def test_a_loopback_address_is_one_only_where_all_ranks_are_of_one_machine():
    loop = [address(n, "127.0.0.1") for n in range(2)]
    assert assign([offer(n, n, exchange=loop[n]) for n in range(2)], "s")[1].parent == loop[0]
    apart = assign([offer(n, n, machine=f"m{n}", exchange=loop[n]) for n in range(2)], "s")
    assert [(one.place, one.parent) for one in apart] == [(None, None)] * 2


def test_ranks_that_found_different_checkpoints_load_nothing():
    with pytest.raises(DifferentError, match="rank 0 found step 1, rank 1 step 2"):
        refuse_different([offer(0, "a"), offer(1, "a", step=2)])


def test_a_rank_without_shared_memory_reads_by_itself_and_the_others_together():
    offers = [offer(0, "a"), Offer(offer(1, "").found), offer(2, "a"), Offer(offer(3, "").found)]
    assert [one.readers for one in assign(offers, "s")] == [(0, 2), (1,), (0, 2), (3,)]


@pytest.fixture
def directory(tmp_path):
    return write_checkpoint(tmp_path / "store", [{"w": torch.arange(4.0)}] * 2)


def test_a_rank_that_loads_alone_in_a_job_of_several_waits_for_no_other(directory, monkeypatch):
    """Its own plan is the only one."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    state, began = {"w": torch.zeros(4)}, time.monotonic()
    with rank_of(1, 2), pytest.warns(UserWarning, match="is disabled"):
        dcp.load(state, storage_reader=CkptdReader(directory), no_dist=True)
    assert torch.equal(state["w"], torch.arange(4.0))
    assert time.monotonic() - began < 20


def test_what_a_planner_has_left_out_of_the_plans_is_no_read_together(directory):
    with rank_of(0, 2):
        reader = CkptdReader(directory)
        reader.read_metadata()
        told = reader.prepare_local_plan(LoadPlan([]))
        bare = [told, LoadPlan([])]
        assert reader.prepare_global_plan(bare) == bare
        assert isinstance(told.storage_data, Offer)
        reader.close()


def test_a_rank_of_which_nothing_is_known_hides_no_different_checkpoints_of_the_others(directory, caplog):
    plans = [LoadPlan([], storage_data=offer(0, "a")), LoadPlan([]), LoadPlan([], storage_data=offer(2, "a", step=2))]
    with rank_of(0, 3):
        reader = CkptdReader(directory)
        with pytest.raises(DifferentError, match="rank 0 found step 1, rank 2 step 2"):
            reader.prepare_global_plan(plans)
        assert reader.prepare_global_plan(plans[:2]) == plans[:2]
    assert "1 of 2 ranks do not say which checkpoint they found" in caplog.text


def test_a_rank_without_shared_memory_says_which_checkpoint_it_found(directory, monkeypatch):
    records = records_of(directory)
    full = Offered(records, Group(1, 2, ""), records.files.integrity)
    full.close()
    monkeypatch.setattr(planned, "SHARED_MEMORY", "/no/such/directory")
    bare = Offered(records, Group(1, 2, ""), records.files.integrity)
    assert bare.offer == Offer(full.offer.found)


def test_an_offer_has_an_address_where_other_nodes_may_need_it_and_there_is_one(directory, monkeypatch):
    monkeypatch.setenv("CKPTD_PEER_ADDRESS", "127.0.0.1")
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    records = records_of(directory)
    offered = Offered(records, Group(0, 2, ""), records.files.integrity)
    assert offered.offer.exchange == offered.exchange.address
    offered.close()
    offered.close()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert Offered(records, Group(0, 2, ""), records.files.integrity).offer.exchange is None
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    monkeypatch.setenv("CKPTD_PEER_ADDRESS", "no.such.host.invalid")
    assert Offered(records, Group(0, 2, ""), records.files.integrity).offer.exchange is None


def test_the_address_is_that_towards_the_master_or_the_one_that_is_set(monkeypatch):
    monkeypatch.delenv("CKPTD_PEER_ADDRESS", raising=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert own_address() == "127.0.0.1"
    monkeypatch.delenv("MASTER_ADDR")
    assert own_address() == ""
    monkeypatch.setenv("CKPTD_PEER_ADDRESS", "lo")
    assert own_address() == "127.0.0.1"
    monkeypatch.setenv("CKPTD_PEER_ADDRESS", "::1")
    assert own_address() == "::1"


@pytest.mark.parametrize(
    ("said", "warnings"),
    [("0.0.0.0", 1), ("::", 1), ("0", 1), ("no.such.host.invalid", 1), ("off", 0)],  # noqa: S104 - refused
)
def test_an_address_that_others_cannot_use_is_none_and_named_and_off_is_none(monkeypatch, caplog, said, warnings):
    """Not the one towards MASTER_ADDR either."""
    monkeypatch.setenv("CKPTD_PEER_ADDRESS", said)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert own_address() == ""
    assert caplog.text.count(f"CKPTD_PEER_ADDRESS = {said!r}") == len(caplog.records) == warnings


def test_a_resolver_that_hangs_holds_no_load(monkeypatch, caplog):
    monkeypatch.setenv("CKPTD_PEER_ADDRESS", "some.host")
    monkeypatch.setattr(own_host, "RESOLVE_S", 0.2)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: time.sleep(3))
    began = time.monotonic()
    assert own_address() == ""
    assert time.monotonic() - began < 2.9
    assert "cannot be resolved" in caplog.text


@pytest.fixture
def with_port(directory, monkeypatch):
    monkeypatch.setenv("CKPTD_PEER_ADDRESS", "127.0.0.1")
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    return directory


def answers(found, seconds=0.0):
    """Whether something listens there, after so long at most if not."""
    until = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((found.host, found.port), 1.0).close()
        except ConnectionRefusedError:
            return False
        if time.monotonic() >= until:
            return True
        time.sleep(0.7)


def test_a_port_that_no_read_uses_closes_itself_and_one_in_use_does_not(with_port, monkeypatch, caplog):
    monkeypatch.setattr(planned, "UNUSED_S", 0.3)
    records = records_of(with_port)
    unused, used = (Offered(records, Group(0, 2, ""), records.files.integrity) for _ in range(2))
    assert used.exchange.use()
    assert not answers(unused.offer.exchange, 10.0)
    assert "no read used it in time" in caplog.text
    assert answers(used.offer.exchange)
    late = unused.participants(Assigned(0, "s", (0,), Place(0, 2), None))
    assert late is not None
    assert "rank 0 reads without other nodes" in caplog.text
    used.close()
    assert not answers(used.offer.exchange)


def test_a_reader_keeps_no_offer_of_a_former_load_and_closes_its_port_at_its_end(with_port):
    with rank_of(0, 2):
        reader = CkptdReader(with_port)
        former = []
        for _ in range(2):
            reader.read_metadata()
            told = reader.prepare_local_plan(LoadPlan([])).storage_data
            former.append((weakref.ref(reader._offered), told.exchange))
        gc.collect()
        assert [one() is None for one, _ in former] == [True, False]
        assert [answers(found) for _, found in former] == [False, True]
        del reader
        gc.collect()
        assert not answers(former[1][1])


def test_a_load_that_is_refused_closes_the_port_at_once(with_port):
    with rank_of(0, 2):
        reader = CkptdReader(with_port)
        reader.read_metadata()
        own = reader.prepare_local_plan(LoadPlan([]))
        assert answers(own.storage_data.exchange)
        with pytest.raises(DifferentError):
            reader.prepare_global_plan([own, LoadPlan([], storage_data=offer(1, "a", step=77))])
        assert not answers(own.storage_data.exchange)


def test_directories_in_which_ranks_were_killed_are_removed_and_no_others(tmp_path):
    for name in (f"{planned.READS}7-old", f"{planned.READS}7-new", f"{planned.READS}77-old", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.group").touch()
        if not name.endswith("new"):
            os.utime(tmp_path / name, (1, 1))
    planned._make(str(tmp_path / f"{planned.READS}7-mine"))
    left = {f"{planned.READS}7-new", f"{planned.READS}7-mine", f"{planned.READS}77-old", "other"}
    assert {path.name for path in tmp_path.iterdir()} == left
