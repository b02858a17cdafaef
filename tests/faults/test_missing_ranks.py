"""Some ranks save and others do not: those that saved hear it within seconds, with whom they wait for and what to type.

What a save says here it says without a further call of the user's: training may take minutes to its next one.
"""

import os
import re
import sys
import time
from pathlib import Path

import pytest

from tests.cluster import Node, wait_for
from tests.faults.ranks import RankError, Ranks, told

pytestmark = [pytest.mark.faults, pytest.mark.timeout(240)]

CALL = "every rank must call save (one rank alone: connect(alone=True))"
WAITS = f"ckptd: step 10 waits for ranks 1-3: {CALL}; ranks 1-3 are pids "


@pytest.fixture(name="node")
def fixture_node(tmp_path: Path):
    with told(str(tmp_path)) as node:
        node.start()
        yield node


@pytest.fixture(name="ranks")
def fixture_ranks(node: Node):
    with Ranks(node, 4) as ranks:
        ranks.call("connect")
        yield ranks


def said(ranks: Ranks, rank: int = 0) -> list[str]:
    return [text for text in ranks[rank].call("logs") if " waits for " in text]


def status_text(node: Node) -> str:
    command = (sys.executable, "-P", "-m", "ckptd", "status", "--arena", node.arena)
    return re.sub(r"\s+", " ", node.complete(*command, timeout_s=120, COLUMNS="200"))


@pytest.mark.parametrize("call", ["save", "save_files"])
def test_silence_of_five_seconds_is_ended_on_stderr_and_in_the_status(node: Node, ranks: Ranks, call: str):
    ranks.call("prepare")  # which is no save
    began = time.monotonic()
    ranks[0].call(call, 10)
    ranks[0].call("sleep", 4.0)  # nobody calls the client meanwhile
    assert said(ranks) == [], "ranks of a normal job differ by seconds"
    ranks[0].call("sleep", 3.0)
    assert time.monotonic() - began < 10
    (text,) = said(ranks)
    pids = [rank.pid for rank in ranks.all[1:]]
    assert text.startswith(WAITS)
    assert all(re.search(rf"\b{pid}\b|{pids[0]}-{pids[-1]}", text) for pid in pids)
    assert said(ranks, 1) == []
    told = rf"ranks 1-3 have not delivered step 10 for \S+ hint {re.escape(CALL)}; ranks 1-3 are pids "
    assert re.search(told, status_text(node))


def test_dcp_on_one_rank_is_refused_at_once(ranks: Ranks):
    with pytest.raises(RankError, match=r"(?s)dcp.save runs on 1 of the job's 4 ranks.*connect\(alone=True\)") as error:
        ranks[0].call("save_by_dcp", 10, timeout_s=60)
    assert error.value.seconds < 5


def test_the_next_save_brings_it_within_three_seconds(ranks: Ranks):
    ranks.call("prepare")
    ranks[0].call("save", 10)
    ranks[0].call("save", 20)
    ranks[0].call("sleep", 3.0)
    assert said(ranks)[0].startswith(WAITS)


def test_saves_without_a_slot_end_at_once_with_the_true_reason(ranks: Ranks):
    ranks.call("prepare")
    began = time.monotonic()
    for step in (10, 20, 30, 40):
        ranks[0].call("save", step)
    assert time.monotonic() - began < 7, "the fourth found no slot and waited until it was known why"
    began = time.monotonic()
    for step in (50, 60, 70):
        ranks[0].call("save", step)
    assert time.monotonic() - began < 5
    for step in (40, 50, 60, 70):
        _, end, reason = ranks[0].call("handle", step)
        assert end == "skipped"
        assert f"step 10 waits for ranks 1-3: {CALL}" in reason
        assert "drains" not in reason
    lines = [text for text in ranks[0].call("logs") if "step 70 was not saved: " in text]
    assert len(lines) == 1


def test_ranks_that_come_after_all_make_it_whole(ranks: Ranks):
    ranks.call("prepare")
    ranks[0].call("save", 10)
    wait_for(lambda: said(ranks), 8, every_s=0.2)
    for rank in ranks.all[1:]:
        rank.call("save", 10)
    ranks.call("wait", 10, "durable")
    ranks.call("save", 20)
    ranks.call("wait", 20, "durable")
    assert len(said(ranks)) == 1


def test_a_wait_that_ends_too_early_says_whom_it_waited_for(ranks: Ranks):
    ranks.call("prepare")
    ranks[0].call("save", 10)
    with pytest.raises(RankError, match=r"waits for ranks 1-3: every rank must call save"):
        ranks[0].call("wait", 10, "staged", 7.0)


def test_a_daemon_that_restarted_names_them_and_who_has_not_called_it_since(node: Node, ranks: Ranks):
    ranks.call("prepare")
    ranks[0].call("save", 10)
    node.kill()
    node.start()
    with pytest.raises(RankError, match=r"waits for ranks 1-3: every rank must call save"):
        ranks[0].call("wait", 10, "staged", 12.0)
    (text,) = said(ranks)
    assert "ranks 1-3 have not called ckptd since the daemon of their nodes restarted; ranks 1-3 are pids " in text
    text = status_text(node)
    assert "ranks 1-3 have not delivered step 10 for " in text
    for rank in ranks.all[1:]:
        assert f"rank {rank.rank}: has not called ckptd since this daemon started (pid {rank.pid} on " in text
    assert "process ended" not in text
    for rank in ranks.all[1:]:
        rank.call("save", 10)
    ranks.call("wait", 10, "durable")


def test_a_process_that_ends_while_its_save_waits_ends_cleanly(node: Node):
    code = """
import os, torch, ckptd_client
client = ckptd_client.connect("job")
client.save({"w": torch.ones(4)}, 1)
"""
    words = {"WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "run", "MASTER_PORT": "1", "LOCAL_WORLD_SIZE": "2"}
    both = [node.run(code, RANK=str(rank), **words) for rank in (0, 1)]
    for process in both:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
        assert b"Fatal" not in errors
    assert os.path.isdir(node.arena)
