"""What a daemon answers to AskSteps, with time given. Between two nodes: tests/faults/nodes/test_steps.py."""

import msgspec
import pytest

from ckptd.core import actions as act
from ckptd.daemon.rank_socket import Incoming
from ckptd.daemon.steps_service import PATIENCE_S, StepsService
from ckptd.peers.packets import MAX_CHECKPOINTS, StepsAsked, StepsKnown, decode_body, encode_body
from ckptd.shared.base.ids import SaveId
from ckptd.shared.protocol.messages import AskSteps, Refused, Steps
from tests.runs import RUN
from tests.unit.core.a_job import KEY, AJob
from tests.unit.peers.planes import a_plane

ONE, TWO = SaveId(1, 1, 10, RUN), SaveId(1, 2, 20, RUN)


@pytest.fixture(name="plane")
def fixture_plane(tmp_path):
    plane = a_plane(tmp_path / "node", "node")
    yield plane
    plane.close()


class Asking:
    """Ranks of a job, and what they were answered."""

    def __init__(self, job, plane):
        self.answers = []
        self.job = job
        self.service = StepsService("node", job.catalogue, plane, lambda _identity, reply: self.answers.append(reply))

    def ask(self, seq=1):
        self.service.asked(Incoming(b"rank", AskSteps(seq=seq)), KEY, self.job.now)
        return self

    def after(self, seconds):
        self.job.now += seconds
        self.service.tick(self.job.now)
        due = self.service.next_deadline()
        assert due is None or due > self.job.now, "the loop would spin"
        return self.answers


def entered(**policy):
    """All ranks are let in; the store has not said what it has."""
    job = AJob(**policy)
    for rank in range(job.world):
        job.attach(rank)
    job.number(1)
    return job


def test_a_list_that_is_known_is_answered_at_once(plane):
    job = AJob().start(committed=(ONE,))
    (answer,) = Asking(job, plane).ask(7).after(0)
    assert (answer.reply_to, [c.step for c in answer.checkpoints]) == (7, [10])
    (empty,) = Asking(AJob().start(), plane).ask().after(0)
    assert empty == Steps(reply_to=1, checkpoints=[])


def test_an_empty_list_waits_until_the_store_has_answered(plane):
    job = entered()
    asking = Asking(job, plane).ask()
    assert asking.after(5.0) == []
    assert job.of(act.ScanStore)
    job.scan(ONE)
    (answer,) = asking.after(0)
    assert [c.step for c in answer.checkpoints] == [10]


def test_a_store_that_stays_silent_is_an_error_with_its_path(plane):
    (answer,) = Asking(entered(), plane).ask().after(PATIENCE_S)
    assert isinstance(answer, Refused)
    assert answer.code == "restore"
    assert "which steps of job job can be restored: store /store has not answered" in answer.message
    assert "ckptd doctor" in answer.hint


def test_what_lies_in_memory_is_named_though_the_store_is_silent(plane):
    job = entered()
    for rank in range(job.world):
        job.slots(rank)
    job.stage_all(TWO)
    asking = Asking(job, plane).ask()
    assert asking.after(1.0) == []
    (answer,) = asking.after(2.5)
    assert [c.step for c in answer.checkpoints] == [20]


def test_an_answer_of_another_node_than_the_one_that_was_asked_is_none(plane):
    asking = Asking(entered(), plane).ask()
    asking.service.hear("stranger", StepsKnown(1), 0.0)
    ((_, number),) = asking.service._open
    asking.service.hear("stranger", StepsKnown(number), 0.0)
    assert asking.after(1.0) == []


def test_as_many_as_an_answer_may_name_fit_into_a_packet(plane):
    job = AJob().start(committed=(ONE,))
    (answer,) = Asking(job, plane).ask().after(0)
    (one,) = answer.checkpoints
    large = msgspec.structs.replace(one, incarnation=2**62, nbytes=2**62, tiers=["arena", "pfs"])
    known = StepsKnown(1, (large,) * MAX_CHECKPOINTS)
    assert decode_body(encode_body(known)) == known
    assert decode_body(encode_body(StepsAsked(1, KEY))) == StepsAsked(1, KEY)
