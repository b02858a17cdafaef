"""When a survey of all nodes is over, and what it makes of what they said. And how questions travel between daemons."""

import msgspec
import pytest

from ckptd.daemon import status_query
from ckptd.daemon.status_query import Answer, StatusQuery, decode_answer, encode_answer, joined
from ckptd.peers.packets import Answered, Ask
from ckptd.shared.base.errors import ProtocolError
from ckptd.shared.base.ids import JobKey
from tests.unit import a_status
from tests.unit.peers.planes import JOB, OTHER, World

KEY = JobKey("/s", "job")
NODES = ("node00", "node01", "node02")


def asked(now=100.0):
    return StatusQuery({KEY: NODES[1:]}, now)


def answer(number, **changes):
    return Answer(report=a_status.report(number), **changes)


def a_job(**changes):
    nodes = [a_status.node(number) for number in range(3)]
    return a_status.job(job="job", store="/s", nodes=nodes, coordinator="node01", drain=None, **changes)


def test_it_is_over_when_all_have_answered():
    one = asked()
    assert not one.over(100.0)
    one.told(KEY, "node01", answer(1), 100.1)
    assert not one.over(100.1)
    one.told(KEY, "node02", answer(2), 100.2)
    assert one.over(100.2)


def test_it_is_over_when_none_answers_any_more_and_a_crowd_is_waited_for():
    one = asked()
    assert not one.over(100.0 + status_query.PATIENCE_S - 0.01)
    assert one.over(100.0 + status_query.PATIENCE_S)
    one.told(KEY, "node01", answer(1), 100.0 + status_query.PATIENCE_S - 0.01)
    assert not one.over(100.0 + status_query.PATIENCE_S)
    assert one.over(one.deadline)
    late = StatusQuery({KEY: [f"n{number}" for number in range(1000)]}, 0.0)
    for number in range(1000):
        late.told(KEY, f"n{number}", answer(1), number * 0.1)
    assert late.deadline <= 3.0, "however many there are"


def test_who_was_not_asked_or_cannot_be_is_not_waited_for():
    one = asked()
    one.unasked(KEY, "node01")
    one.told(KEY, "stranger", answer(1), 100.0)
    one.told(JobKey("/s", "another"), "node02", answer(1), 100.0)
    assert one.answers == {KEY: {}}
    one.told(KEY, "node02", answer(2), 100.0)
    assert one.over(100.0)


def test_the_coordinator_s_picture_is_taken_and_who_is_silent_is_named():
    one, own = asked(), a_job(errors=["mine"], checkpoints=[])
    whole = a_job(errors=["theirs"], degraded=["set 0"])
    one.told(KEY, "node01", answer(1, job=whole), 100.0)
    made = joined(own, "node00", a_status.report(0), one)
    assert (made.errors, made.degraded, made.checkpoints) == (["mine"], ["set 0"], whole.checkpoints)
    assert made.ranks == own.ranks
    assert made.silent == ["node02"]
    assert [node.report is not None for node in made.nodes] == [True, True, False]
    assert joined(own, "node00", a_status.report(0), asked()).silent == ["node01", "node02"]


def test_the_word_of_a_node_on_its_own_drain_is_newer():
    nodes = [a_status.node(number, drain_nbytes=40 * a_status.GIB) for number in range(3)]
    own = msgspec.structs.replace(a_job(), nodes=nodes, drain=a_status.drain(), coordinator="node00")
    one = asked()
    one.told(KEY, "node01", answer(1), 100.0)
    made = joined(own, "node00", a_status.report(0), one)
    assert [node.drain_nbytes_done // a_status.GIB for node in made.nodes] == [19, 19, 0]


def test_the_drain_s_progress_is_the_sum_of_what_its_nodes_say():
    nodes = [a_status.node(number, drain_nbytes=40 * a_status.GIB) for number in range(3)]
    running = msgspec.structs.replace(a_status.drain(), nbytes=120 * a_status.GIB, nbytes_done=0, seconds=19.0)
    own = msgspec.structs.replace(a_job(), nodes=nodes, drain=running)
    made = status_query.progressed(own, {"node00": a_status.report(0), "node02": a_status.report(2)})
    assert made.drain is not None
    assert (made.drain.nbytes_done, made.drain.bytes_per_s) == (38 * a_status.GIB, 2.0 * a_status.GIB)
    assert made.drain.seconds_left == 41.0
    assert [node.report for node in made.nodes] == [None] * 3, "only those that ask for reports get them"
    assert status_query.progressed(own, {}) == own
    assert status_query.progressed(a_job(), {"node00": a_status.report(0)}) == a_job()


@pytest.mark.parametrize("raw", [b"", b"\xc1", b"\x80", b"x" * 100, msgspec.msgpack.encode({"report": None})])
def test_what_is_no_answer_is_refused(raw):
    with pytest.raises(ProtocolError, match="malformed answer"):
        decode_answer(raw)


def test_an_answer_that_is_too_long_is_refused():
    many = answer(1)
    assert decode_answer(encode_answer(many)) == many
    rank = a_status.rank(1)
    report = msgspec.structs.replace(many.report, ranks=[rank] * 2000)
    with pytest.raises(ProtocolError):
        decode_answer(encode_answer(Answer(report=report)))


def test_questions_and_answers_travel_between_planes(tmp_path):
    with World(tmp_path) as world:
        one, two = world.start("a"), world.start("b")
        world.all_meet()
        world.until(lambda: world.ups("a") and world.ups("b"))
        assert one.write(JOB, "b", Ask(7, JOB))
        assert not one.write(JOB, "nobody", Ask(7, JOB))
        assert not one.write(OTHER, "b", Ask(7, OTHER)), "they share no such job"
        mail = []
        world.until(lambda: mail.extend(two.take_mail()) or mail)
        assert mail == [("a", Ask(7, JOB))]
        assert not two.write(JOB, "a", Answered(7, b"x" * (9 << 20))), "too large for a packet"
        assert two.write(JOB, "a", Answered(7, b"answer"))
        back = []
        world.until(lambda: back.extend(one.take_mail()) or back)
        assert back == [("b", Answered(7, b"answer"))]
        assert one.write(JOB, "b", Ask(8, OTHER))
        world.until(lambda: two.refused["job"] == 1)
        assert two.take_mail() == [], "a question about a job that they do not share"
