"""``ckptd history``, ``advise`` and ``report`` of a real job whose daemon is gone, beside what the test knows of it."""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptd import cli
from ckptd.shared.format.integrity import XXH3
from ckptd.shared.protocol.journal import RunEnded
from ckptd.shared.stores.kinds import open_files
from ckptd.store.journal import read_journal
from tests.cluster import Node, wait_for
from tests.faults.ranks import JOB, Ranks, told

pytestmark = [pytest.mark.faults, pytest.mark.timeout(240)]
STEP_S = 0.2


@pytest.fixture(name="node")
def fixture_node(tmp_path: Path) -> Iterator[Node]:
    with told(str(tmp_path)) as node:
        node.start()
        yield node


def ends(store: str) -> list[str]:
    entries = read_journal(open_files(f"{store}/{JOB}", XXH3)).entries
    return [entry.how for entry in entries if isinstance(entry, RunEnded) and entry.how != "loaded"]


def train(ranks: Ranks, *steps: int) -> list[float]:
    """Steps that take a while, each saved and durable. Returns the longest stall of each save."""
    stalls = []
    for step in steps:
        time.sleep(STEP_S)
        stalls.append(max(ranks.call("save", step)))
        assert ranks.call("wait", step) == [("durable", "durable")] * len(ranks.all)
    return stalls


def printed_by(capsys: pytest.CaptureFixture[str], verb: str, store: str) -> dict[str, object]:
    assert cli.invoke([verb, os.path.join(store, JOB), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_job_that_was_killed_and_resumed_has_its_history(node: Node, tmp_path: Path, capsys):
    began_s = time.time()
    with Ranks(node, 2) as ranks:
        ranks.call("connect")
        ranks.call("load")
        stalls = train(ranks, 1, 2, 3, 4)
        ranks.kill()
    wait_for(lambda: ends(node.store) == ["lost"])
    with Ranks(node, 2) as ranks:
        ranks.call("connect")
        assert ranks.call("load")[0]["step"] == 4
        stalls += train(ranks, 5, 6, 7)
        ranks.call("close")
    wait_for(lambda: ends(node.store) == ["lost", "closed"])
    node.stop()
    lasted_s = time.time() - began_s
    found = printed_by(capsys, "history", node.store)
    first, second = found["runs"]
    assert [(one["how"], one["over"], one["world_size"], one["nodes"]) for one in (first, second)] == [
        ("lost", True, 2, 1), ("closed", True, 2, 1),
    ]  # fmt: skip
    assert [one["saves_by_end"] for one in (first, second)] == [{"durable": 4}, {"durable": 3}]
    assert [one["newest_durable_step"] for one in (first, second)] == [4, 7]
    assert (first["restores"], [one["step"] for one in second["restores"]]) == ([], [4])
    assert second["restores"][0]["tiers"] == {"arena": 2}
    assert second["restores"][0]["lost_steps"] == 0
    assert sum(loss["ranks"] for loss in first["losses"]) == 2
    assert found["stall"]["count"] == 7
    assert 0 < found["stall"]["total"] <= sum(stalls)
    goodput = found["goodput"]
    assert (found["damaged"], goodput["failures"]) == (0, 1)
    assert 0 < goodput["total_s"] <= lasted_s
    # Each step slept, all but the two before a run's first mark are between marks; the wait for durable is in them too.
    assert 7 * STEP_S * 0.8 <= goodput["training_s"] + goodput["unexplained_s"] <= goodput["total_s"]
    assert 0 < goodput["restore_s"] < goodput["total_s"]
    assert goodput["step_s"] >= STEP_S
    advice = printed_by(capsys, "advise", node.store)
    assert (advice["failures"], advice["mtbf_from"], advice["now"]["steps"]) == (1, "journal", 1)
    assert (advice["restores"], advice["restores_from_store"]) == (1, 0)
    page = tmp_path / "report.html"
    assert cli.invoke(["report", JOB, "--store", node.store, "-o", str(page)]) == 0
    assert "step 4 restored in" in page.read_text()


def test_a_job_whose_daemon_was_killed_too_ended_without_a_word(node: Node, capsys):
    with Ranks(node) as ranks:
        ranks.call("connect")
        train(ranks, 1, 2)
        wait_for(lambda: len(read_journal(open_files(f"{node.store}/{JOB}", XXH3)).entries) >= 5)
        node.kill()
        ranks.kill()
    found = printed_by(capsys, "history", node.store)
    assert [(one["how"], one["ended"], one["over"]) for one in found["runs"]] == [("", None, False)]
    assert found["runs"][0]["saves_by_end"] == {"durable": 2}


def test_a_training_that_an_exception_ends_has_failed_and_a_new_job_is_known_by_name(node: Node, capsys, monkeypatch):
    """Also before the store has its journal: the daemon of this node keeps the newest records."""
    monkeypatch.setenv("CKPTD_ARENA", node.arena)
    monkeypatch.delenv("CKPTD_STORE", raising=False)
    with Ranks(node, 2) as ranks:
        ranks.call("connect")
        ranks.call("save", 1)
        ranks.call("wait", 1)
        assert cli.invoke(["history", JOB, "--json"]) == 0
        assert [run["newest_step"] for run in json.loads(capsys.readouterr().out)["runs"]] == [1]
        ranks.call("fail")
    wait_for(lambda: ends(node.store) == ["failed"])
    found = printed_by(capsys, "history", node.store)
    assert [(one["how"], one["over"]) for one in found["runs"]] == [("failed", True)]
    assert found["goodput"]["failures"] == 1
