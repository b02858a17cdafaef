"""Ranks that read one checkpoint together: how they name the read, and what a rank says that takes no part in it."""

import gc
import threading
import time

import pytest
import torch
from torch.distributed.checkpoint.planner import LoadPlan

from ckptd.shared.base.errors import DamagedError, MismatchError, UsageError
from ckptd.shared.base.ids import JobKey, SaveId
from ckptd.shared.files.mapping import Mapping
from ckptd.shared.format.digest import digest
from ckptd.shared.format.manifest import FileRecord
from ckptd.shared.protocol.messages import PlaceKnown
from ckptd.shared.protocol.read_tree import MAX_READERS, Place
from ckptd_client._load.checkpoint import open_directory
from ckptd_client._load.foreign.load_from import checked, load_from
from ckptd_client._load.reader import Target
from ckptd_client._load.rounds import read_checkpoint
from ckptd_client._load.shared_read import node_group, parent, participants, peer_exchange, senders
from ckptd_client._load.shared_read.found import Found
from ckptd_client._load.shared_read.meeting import NodeReaders
from ckptd_client._load.shared_read.node_group import NodeGroup
from ckptd_client._load.shared_read.participants import Participants, all_ranks
from ckptd_client._load.shared_read.read import copy_out_together
from ckptd_client._load.shared_read.schedule import Blocks
from ckptd_client._local.rank import Group
from ckptd_client.dcp import CkptdReader
from tests.checkpoints import write_checkpoint
from tests.runs import RUN
from tests.stored import Listed

SAVE = SaveId(1, 1, 1, RUN)


def test_the_reads_of_a_job_are_counted_for_that_job(join, job):
    """A process may have clients of two jobs, whose ranks are not in the same processes on all nodes."""
    one, two = join(f"{job}-1"), join(f"{job}-2")
    for client in (one, two):
        client._link.nodes = 2
    numbers = [all_ranks(client._link, client._link.ask).here.number for client in (one, one, two, one)]
    assert numbers == [1, 2, 1, 3]


class Other:
    """Rank 1 of a node, which joins; rank 0 is that of the test, the first of the node."""

    def __init__(self, directory):
        directory.mkdir()
        self.directory, self.exchanges, self.ranks = directory, [], (0, 1)
        self.thread = threading.Thread(target=self.join)
        self.thread.start()

    def readers(self, rank):
        return NodeReaders(str(self.directory), "s", self.ranks, rank, "all", nodes=True, number=1)

    def join(self):
        began = time.monotonic()
        here = self.readers(1)
        content = digest(bytes(16))  # of the tests that join
        self.joined = NodeGroup(here.enter(), Blocks([8]), Found.of(1, SAVE, content, 1)).join({0})
        self.waited_s = time.monotonic() - began

    def find_place(self, exchange, _number):
        self.exchanges.append(exchange)
        return PlaceKnown(reply_to=1)

    def participants(self):
        return Participants(JobKey("/s", "j"), self.readers(0), SAVE, "127.0.0.1", self.find_place)

    def check_that_it_did_not_wait(self):
        self.thread.join()
        assert self.waited_s < 6.0  # not 10
        assert self.exchanges == [None]  # other nodes do not wait for an address of this node either
        assert list(self.directory.iterdir()) == []


@pytest.fixture
def other(tmp_path):
    return Other(tmp_path / "arena")


def test_a_rank_whose_checkpoint_cannot_be_opened_keeps_no_other_waiting(other, tmp_path):
    with pytest.raises(DamagedError):
        read_checkpoint(str(tmp_path / "none"), {}, group=Group(0, 2, "s"), participants=other.participants())
    other.check_that_it_did_not_wait()


def test_a_rank_that_needs_its_own_image_alone_keeps_no_other_waiting(other, tmp_path):
    states = [{"w": torch.arange(4.0) + rank} for rank in range(2)]
    found = write_checkpoint(tmp_path / "store", states)
    state = {"w": torch.zeros(4)}
    read_checkpoint(str(found), state, group=Group(0, 2, "s"), participants=other.participants())
    assert torch.equal(state["w"], states[0]["w"])
    other.check_that_it_did_not_wait()


def test_a_rank_whose_state_does_not_fit_keeps_no_other_waiting(other, tmp_path):
    found = write_checkpoint(tmp_path / "store", [{"w": torch.zeros(4)}])
    with pytest.raises(MismatchError), other.participants() as taking:
        load_from(str(found), {"w": torch.zeros(5)}, Group(0, 2, "s"), participants=taking)
    other.check_that_it_did_not_wait()


def test_a_rank_without_memory_for_the_group_keeps_no_other_waiting(other):
    with other.participants() as taking:
        assert taking.open(Blocks([1 << 70]), b"") is None  # larger than a file can be
    other.check_that_it_did_not_wait()


def test_a_first_rank_that_misses_a_rank_of_its_node_keeps_no_other_node_waiting(other, monkeypatch):
    """Rank 1 joins, and there is a third that does not come."""
    monkeypatch.setattr(node_group, "_JOIN_S", 0.5)
    taking = other.participants()
    taking.here = NodeReaders(str(other.directory), "s", (0, 2), 0, "all", nodes=True, number=1)
    memory = Mapping(None, 8)
    targets = {0: [Target(0, 8, memory.address)]}
    record = FileRecord(name="r00000", rank=0, nbytes=8, digests=bytes(16), plan=b"", form=b"", own=b"", leaves=b"")

    def open_source(_rank):
        raise OSError("it reads alone")

    with pytest.raises(OSError, match="alone"), taking:
        copy_out_together(open_source, targets, Listed([record]), taking)
    assert other.exchanges == [None]


def test_the_wait_for_the_plan_is_longer_than_all_that_the_first_rank_may_wait():
    most = Place(0, MAX_READERS)
    assert participants._ANSWER_S + peer_exchange.patience_s(most) + parent._LEAVE_S < node_group._PLAN_S
    assert senders._BLOCK_S < node_group._PATIENCE_S


def test_a_first_rank_without_a_thread_for_its_exchange_shares_with_its_node(other, monkeypatch):
    def no(_self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(peer_exchange.BulkServer, "start", no)
    memory = Mapping(None, 8)
    record = FileRecord(name="r00000", rank=0, nbytes=8, digests=bytes(16), plan=b"", form=b"", own=b"", leaves=b"")

    def open_source(_rank):
        raise OSError("not here")

    with pytest.raises(OSError, match="not here"), other.participants() as taking:
        copy_out_together(open_source, {0: [Target(0, 8, memory.address)]}, Listed([record]), taking)
    other.check_that_it_did_not_wait()
    assert other.joined


def test_a_rank_that_fails_before_it_opens_anything_keeps_no_other_waiting(other):
    with pytest.raises(UsageError), other.participants():
        checked(1, {})
    other.check_that_it_did_not_wait()


def test_a_call_with_a_wrong_argument_is_a_read_of_this_rank(join, job):
    """So that its next one is the next of all."""
    client = join(job)
    with pytest.raises(UsageError):
        client.load_from(1, {}, together=True)
    assert client._link.reads == 1


def test_a_reader_of_dcp_that_cannot_plan_its_reads_keeps_no_other_waiting(other, tmp_path):
    found = write_checkpoint(tmp_path / "store", [{"w": torch.zeros(4)}])
    reader = CkptdReader(found)
    reader.read_metadata()
    with other.participants() as taking:
        reader._checkpoint.read_with(taking)
        with pytest.raises(AttributeError):
            reader.read_data(LoadPlan([None]), None)
        other.check_that_it_did_not_wait()


def test_a_checkpoint_that_is_dropped_keeps_no_rank_of_the_node_waiting(other, tmp_path):
    """Nothing is said to the daemon: it may be dropped in the middle of a call to it."""
    checkpoint = open_directory(str(write_checkpoint(tmp_path / "store", [{"w": torch.zeros(4)}])))
    checkpoint.read_with(other.participants().__enter__())
    del checkpoint
    gc.collect()
    other.thread.join()
    assert other.waited_s < 6.0
    assert other.exchanges == []


def test_the_number_on_which_all_agree_is_counted_on(join, job):
    client = join(job)
    all_ranks(client._link, client._link.ask).counted(7)
    assert all_ranks(client._link, client._link.ask).here.number == 8
