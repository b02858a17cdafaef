"""A rebuild begins when its node has links to all of its sources: it does not fail for one that is still to come."""

import pytest

from ckptd.core import events as ev
from ckptd.core.actions import FetchSegment
from ckptd.core.links import Links
from ckptd.core.node.fetch import Fetching
from ckptd.core.policy import Policy
from ckptd.shared.base.ids import JobKey, SaveId
from ckptd.shared.protocol.messages import Tier
from ckptd.shared.protocol.parity_types import DataColumn, ParityChunk
from tests.runs import RUN
from tests.seals import a_seal

JOB, SAVE = JobKey("/store", "demo"), SaveId(1, 7, 7, RUN)
ORDER = ev.FetchOrdered(
    job=JOB, node="d", rank=0, save=SAVE, tier=Tier.REBUILT, holder="c", epoch=1,
    homes=((1, "b"), (2, "c")), chunks=((1, "b"), (2, "c")),
)  # fmt: skip
COLUMNS = (DataColumn("a", (a_seal(JOB, SAVE, 0),)), DataColumn("b", (a_seal(JOB, SAVE, 1),)))
CHUNK = ParityChunk(SAVE, 1, "xor", 2, COLUMNS)


@pytest.fixture(name="fetching")
def fixture_fetching():
    """Of node d, which takes the place of a; its link to c, which holds the chunk, is up."""
    fetching = Fetching(JOB, "d", Policy(), Links("d"))
    up(fetching, "c")
    fetching.order(ORDER, None)
    return fetching


def up(fetching, node):
    return [type(action) for action in came(fetching, node)]


def came(fetching, node):
    fetching._links.came(node)
    return fetching.peer_up(ev.PeerUp(job=JOB, node=node))


def went(fetching, node):
    fetching._links.went(node)
    fetching.peer_down(ev.PeerDown(job=JOB, node=node))


def described(fetching, chunk=CHUNK):
    return fetching.described(ev.ChunkReported(job=JOB, node="c", save=SAVE, epoch=1, chunk=chunk))


def test_it_waits_for_the_link_to_a_source(fetching):
    assert described(fetching) == []
    (begun,) = came(fetching, "b")
    assert isinstance(begun, FetchSegment)
    assert begun.chunk == CHUNK
    assert came(fetching, "b") == [], "once"


def test_it_begins_at_once_where_all_are_linked(fetching):
    up(fetching, "b")
    assert [type(action) for action in described(fetching)] == [FetchSegment]


def test_it_begins_without_a_source_that_does_not_come(fetching):
    """It may not need it: the work itself finds out."""
    described(fetching)
    assert fetching.tick(100) == []
    assert fetching.next_deadline() == 100 + Policy().outside_wait_s
    assert [type(action) for action in fetching.tick(fetching.next_deadline())] == [FetchSegment]


def test_an_order_that_is_given_again_asks_for_the_chunk_again(fetching):
    described(fetching)
    fetching.order(ORDER, None)
    assert up(fetching, "b") == [], "what the chunk is may have changed"
    assert [type(action) for action in described(fetching)] == [FetchSegment]


def test_a_job_that_ends_has_no_rebuild_left(fetching):
    described(fetching)
    fetching.forget()
    assert up(fetching, "b") == []
    assert fetching.next_deadline() is None


def test_an_order_that_was_given_up_and_is_given_again_has_its_time_again(fetching):
    went(fetching, "c")
    fetching.order(ORDER, None)
    fetching.tick(100)
    assert len(fetching.tick(100 + Policy().outside_wait_s)) == 1
    fetching.order(ORDER, None)
    assert fetching.tick(100 + Policy().outside_wait_s) == []


def test_the_wait_for_sources_begins_when_the_holder_has_answered(fetching):
    went(fetching, "c")
    fetching.order(ORDER, None)
    fetching.tick(100)
    up(fetching, "c")
    described(fetching)
    assert fetching.tick(100 + Policy().outside_wait_s) == []
