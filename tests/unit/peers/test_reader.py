"""Messages of many nodes in a row are what they are one by one, whatever came before."""

import random

import pytest

from ckptd.shared.base.errors import ProtocolError
from ckptd.shared.base.ids import JobKey, SaveId
from ckptd.shared.protocol import node_messages as nm
from tests.runs import RUN

JOBS = JobKey("/store", "job"), JobKey("/store", "other")
SAVES = SaveId(1, 1, 10, RUN), SaveId(1, 2, 20, RUN)
BAD_NODE = nm.encode(nm.Report(job=JOBS[0], node="a/b", event=nm.VoteWritten(job=JOBS[0], save=SAVES[0])))
BAD_FACT = nm.encode(nm.Report(job=JOBS[0], node="a", event=nm.VoteWritten(job=JOBS[0], save=SaveId(1, -1, 10, RUN))))


def frames():
    facts = [kind(job=job, save=save) for kind in (nm.VoteWritten, nm.Drained) for job in JOBS for save in SAVES]
    facts += [
        nm.Encoded(job=JOBS[0], save=SAVES[0], epoch=epoch, problem=text) for epoch in (1, 2) for text in ("", "x")
    ]
    facts.append(nm.VoteWritten(job=JOBS[0], save=SAVES[0], problem="p" * 10_000))
    reports = [
        nm.Report(job=job, node=node, event=fact) for fact in facts for node in "ab" for job in (fact.job, JOBS[1])
    ]
    orders = [nm.SaveStaged(job=job, node=node, save=SAVES[0]) for job in JOBS for node in "ab"]
    known = [nm.encode(message) for message in (*reports, *orders)]
    return [*known, *(frame[:-1] for frame in known[:4]), b"", b"\xc1", BAD_NODE, BAD_FACT]


def outcome(decode, frame):
    try:
        return decode(frame)
    except ProtocolError as error:
        return type(error), error.message


@pytest.mark.parametrize("seed", range(20))
def test_a_message_is_what_it_is_alone(seed):
    dice, reader = random.Random(seed), nm.Reader()
    some = frames()
    for _ in range(400):
        frame = dice.choice(some[seed % 7 :: 7])
        assert outcome(reader.decode, frame) == outcome(nm.decode, frame)


def test_the_same_report_of_another_node_is_not_checked_again(monkeypatch):
    reader, read = nm.Reader(), []
    decode = nm.decode
    monkeypatch.setattr(nm, "decode", lambda raw: (read.append(raw), decode(raw))[1])
    for node in ("a", "b", "c"):
        report = nm.Report(job=JOBS[0], node=node, event=nm.VoteWritten(job=JOBS[0], save=SAVES[0]))
        assert reader.decode(nm.encode(report)) == report
    assert len(read) == 1
    for bad in (BAD_NODE, BAD_FACT):
        with pytest.raises(ProtocolError):
            reader.decode(bad)
