"""Segments in the memory of nodes, as a rank asks its daemon for them: each byte once, and what faults are named."""

import os

import pytest

from ckptd.shared.base.errors import ConnectError, DamagedError
from ckptd.shared.base.ids import JobKey, SaveId
from ckptd.shared.format.byte_ranges import unpacked
from ckptd.shared.protocol.messages import AskSegments, Done, DropSegments, SegmentsHere
from ckptd.shared.protocol.segments import SegmentHere, SegmentLacks
from ckptd_client._load import memory
from ckptd_client._load.memory import LackingError, MemorySegments
from ckptd_client._load.reader import Target
from tests.runs import RUN
from tests.slots import write_slot

KEY, SAVE = JobKey("/store", "job"), SaveId(1, 1, 10, RUN)


class Daemon:
    """It has two segments: that of rank 0 in a slot, that of rank 1 in a partial segment."""

    def __init__(self, directory):
        self.directory, self.asked, self.answer = str(directory), [], {}
        self.names = {0: "r00000-000001.slot", 1: "r00001-000001.part"}
        for rank, name in self.names.items():
            self.slot = write_slot(directory / name, KEY, SAVE, rank=rank, world_size=2)

    def ask(self, make, _deadline):
        request = make(1)
        self.asked.append(request)
        if isinstance(request, DropSegments):
            return Done(reply_to=1)
        files = [SegmentHere(one.rank, self.names[one.rank]) for one in request.wanted]
        return SegmentsHere(reply_to=1, **({"files": files} | self.answer))

    @property
    def ranges(self):
        return [[*unpacked(one.ranges)] for ask in self.asked if isinstance(ask, AskSegments) for one in ask.wanted]


@pytest.fixture(name="daemon")
def fixture_daemon(tmp_path):
    return Daemon(tmp_path)


@pytest.fixture(name="segments")
def fixture_segments(daemon):
    return MemorySegments(daemon.ask, daemon.directory, KEY, SAVE)


def test_tails_first_then_only_ranges_that_did_not_come_yet(daemon, segments):
    described = segments.describe([0, 1])
    assert [described[rank].layout.rank for rank in (0, 1)] == [0, 1]
    assert [described[rank].holes for rank in (0, 1)] == [False, True]
    segments.describe([1])
    assert len(daemon.asked) == 1
    segments.pull({0: [Target(0, 9, 0)], 1: [Target(100, 50, 0), Target(150, 10, 0), Target(300, 1, 0)]})
    segments.pull({1: [Target(120, 20, 0)]})
    segments.pull({1: [Target(90, 20, 0)]})
    assert daemon.ranges == [[], [], [(100, 160), (300, 301)], [(90, 100)]]


def test_many_ranges_are_several_requests(daemon, segments, monkeypatch):
    monkeypatch.setattr(memory, "_MOST_RANGES", 3)
    segments.describe([1])
    segments.pull({1: [Target(10 * at, 1, 0) for at in range(8)]})
    assert [len(one) for one in daemon.ranges[1:]] == [3, 3, 2]


def test_what_lacks_names_its_ranks(daemon, segments):
    daemon.answer = {"files": [], "lacks": [SegmentLacks(1, "node b: slot s block 0 does not match its digest")]}
    with pytest.raises(LackingError, match="rank 1: node b: slot s block 0") as caught:
        segments.describe([0, 1])
    assert caught.value.ranks == (1,)


def test_what_the_own_node_cannot_have_is_no_others_fault(daemon, segments):
    daemon.answer = {"files": [], "refused": "no room"}
    with pytest.raises(DamagedError, match="no room") as caught:
        segments.describe([0, 1])
    assert not isinstance(caught.value, LackingError)


def test_a_damaged_tail_names_its_rank(daemon, segments):
    with open(os.path.join(daemon.directory, daemon.names[1]), "r+b") as file:
        file.seek(daemon.slot.seal.layout_offset)
        file.write(b"\xff\xff")
    with pytest.raises(LackingError, match="layout") as caught:
        segments.describe([0, 1])
    assert caught.value.ranks == (1,)


def test_an_image_is_read_as_it_is_pulled(daemon, segments):
    segments.describe([1])
    with segments.images.reading(1) as read:
        assert bytes(read(8, 40)) == daemon.slot.image[8:48]
    assert daemon.ranges[-1] == [(8, 48)]


def test_what_was_pulled_is_given_back_also_by_a_daemon_that_has_ended(daemon, segments):
    segments.release()
    assert isinstance(daemon.asked[-1], DropSegments)

    def gone(_make, _deadline):
        raise ConnectError("the daemon ended")

    segments.ask = gone
    segments.release()
