"""One line per event: as it is written, and what a real daemon writes of saves, drains and failures."""

import json
import logging
import os
import re
import shutil
import sys

import pytest

from ckptd.shared.base.ids import JobKey, SaveId
from ckptd.shared.base.log_line import line
from ckptd.shared.protocol import messages as m
from ckptd.system.logs import LineFormatter, is_journal
from tests.cluster import Node, wait_for
from tests.unit.daemon.test_rank_gateway import Rank, slot_nbytes

VALUE = r'(?:"(?:[^"\\]|\\.)*"|[^\s"=\\]+)'
FACTS_RE = re.compile(rf" ([a-z_]+)=({VALUE})")
EVENT_RE = re.compile(rf"([a-z][A-Za-z_, -]*)((?: [a-z_]+={VALUE})*)")
JOURNAL_RE = re.compile(r"<([0-7])>(.*)")
TIMED_RE = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z) (DEBUG|INFO|WARNING|ERROR) (.*)")
EVIL = 'a\nFAKE ready pid=1\r\x1b[2J\x85\u2028"quoted" \\ end'


def parsed(text: str) -> tuple[str, dict[str, str]]:
    """An event and its facts; AssertionError for what is none."""
    found = EVENT_RE.fullmatch(text)
    assert found, text
    facts = {key: json.loads(value) if value[0] == '"' else value for key, value in FACTS_RE.findall(found[2])}
    return found[1], facts


def record(text, level=logging.INFO, **more):
    return logging.LogRecord("ckptd", level, __file__, 1, text, (), more.get("exc_info"))


def test_facts_read_back_whatever_they_are():
    facts = {"job": "llama-7b", "path": "/a b/c", "evil": EVIL, "n": 3, "s": 0.12345, "none": None, "empty": ""}
    event, back = parsed(line("drain failed", **facts))
    assert event == "drain failed"
    assert back == {"job": "llama-7b", "path": "/a b/c", "evil": EVIL, "n": "3", "s": "0.123"}
    assert line("x", a=EVIL).isprintable()


@pytest.mark.parametrize("journal", [True, False])
def test_nothing_begins_a_second_line_and_a_traceback_is_a_fact(journal):
    formatter = LineFormatter(journal=journal)
    try:
        int(EVIL)
    except ValueError:
        text = formatter.format(record(f"message {EVIL}", logging.ERROR, exc_info=sys.exc_info()))
    assert text.isprintable()
    assert text.startswith("<3>message" if journal else "20")
    assert "ValueError" in text
    assert len(formatter.format(record("x" * 100_000))) < 40_000


def test_priorities_are_those_of_sd_daemon():
    formatter = LineFormatter(journal=True)
    levels = (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL)
    assert [formatter.format(record("x", level)) for level in levels] == ["<7>x", "<6>x", "<4>x", "<3>x", "<2>x"]


def test_it_is_the_journal_only_if_systemd_says_so_of_this_very_stream(tmp_path):
    with open(tmp_path / "one", "w") as one, open(tmp_path / "two", "w") as two:
        found = os.fstat(one.fileno())
        environ = {"JOURNAL_STREAM": f"{found.st_dev}:{found.st_ino}"}
        assert is_journal(one, environ)
        assert not is_journal(two, environ)
        assert not is_journal(one, {})
    assert not is_journal(one, environ), "a closed one"


def journal_of(node: Node) -> dict[str, str]:
    """What systemd would say if the daemon's log went to the journal."""
    open(node.log, "ab").close()
    found = os.stat(node.log)
    return {"JOURNAL_STREAM": f"{found.st_dev}:{found.st_ino}"}


def entries(node: Node, pattern: re.Pattern[str]) -> list[tuple[str, str, dict[str, str]]]:
    """Level, event and facts of every line, each of which must be one."""
    out = []
    for text in node.log_text().split("\n")[:-1]:
        found = pattern.fullmatch(text)
        assert found, text
        out.append((found[pattern.groups - 1], *parsed(found[pattern.groups])))
    return out


@pytest.mark.parametrize("journal", [True, False])
def test_a_daemon_reports_a_save_a_drain_and_what_goes_wrong(tmp_path, journal):
    store = tmp_path / "a store"
    store.mkdir()
    with Node(str(tmp_path)) as node:
        node.start(CKPTD_NODE="n1", **(journal_of(node) if journal else {}))
        job = JobKey(str(store), "job")
        rank = Rank(node, job)
        try:
            save_and_fail(node, rank, job, store)
        finally:
            rank.close()
        assert node.stop() == 0
        said = entries(node, JOURNAL_RE if journal else TIMED_RE)
    events = [event for _, event, _ in said]
    for event in ("ready", "session", "staged", "draining", "durable", "drain failed", "skipped", "stopping"):
        assert events.count(event) >= 1, (event, events)
    levels = dict(zip(events, (level for level, _, _ in said), strict=True))
    assert (levels["staged"], levels["drain failed"]) == (("6", "4") if journal else ("INFO", "WARNING"))
    facts = {event: facts for _, event, facts in said}
    assert facts["ready"]["node"] == "n1"
    assert facts["skipped"]["reason"] == f"rank 0: {EVIL}"
    assert facts["durable"]["step"] == "2"
    assert int(facts["durable"]["bytes_per_s"]) > 0
    assert "a store" in facts["drain failed"]["error"]


def save_and_fail(node, rank, job, store):
    incarnation, run = rank.welcome.incarnation, rank.welcome.run
    rank.ask(m.AskSlots, capacity=slot_nbytes(node, job))
    first = rank.granted()[0]
    wait_for(lambda: node.job("job").store_seen)  # else there is no drain to fail
    shutil.move(store, f"{store} away")
    rank.fill(first, SaveId(incarnation, 1, 1, run))
    rank.ask(m.HandOver, slot=first, save=SaveId(incarnation, 1, 1, run))
    wait_for(lambda: "drain failed" in node.log_text())
    shutil.move(f"{store} away", store)
    second = next(slot for slot in slots_granted(rank) if slot != first)
    rank.fill(second, SaveId(incarnation, 2, 2, run))
    rank.ask(m.HandOver, slot=second, save=SaveId(incarnation, 2, 2, run))
    wait_for(lambda: "durable job" in node.log_text())
    rank.ask(m.Skip, save=SaveId(incarnation, 3, 3, run), reason=EVIL)


def slots_granted(rank):
    while len(slots := rank.granted()) < 2:
        rank.pushes.append(rank.receive())
    return slots


def test_a_daemon_that_cannot_start_says_so_on_one_line_of_the_journal(tmp_path):
    with Node(str(tmp_path)) as node:
        done = node.start("--budget-nbytes", "none", ready=False, **journal_of(node)).wait(60)
        assert done == 2
        (text,) = node.log_text().splitlines()
        assert JOURNAL_RE.fullmatch(text)[1] == "3"
        assert parsed(JOURNAL_RE.fullmatch(text)[2])[0] == "error"
