"""The demo: its proof notices what it should, and its short form runs through and leaves nothing behind."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ckptd_client.demo import DemoError, promises, report, told
from ckptd_client.demo.journal import Finished, Loss, Reached, Reader, Restored, Saved, TorchSaved, Writer
from tests import pythons

ROOT = Path(__file__).parents[2]
STEPS = 6
RANKS = 2


def losses(start, stop, digest=None):
    """What each rank of one attempt says."""
    records = [Loss(step, (1 / (step + 1)).hex()) for step in range(start, stop)]
    return [[*records, Finished(digest)] if digest else list(records) for _ in range(RANKS)]


def attempts(first, second):
    return [("first", first), ("second", second)]


def test_equal_curves_are_joined():
    curve = report.join(losses(0, STEPS, "d"), attempts(losses(0, 4), losses(2, STEPS, "d")), STEPS)
    assert [(step, name) for step, _, name in curve.points] == [
        (0, "first"), (1, "first"), (2, "second"), (3, "second"), (4, "second"), (5, "second"),
    ]  # fmt: skip
    assert (curve.compared, curve.repeated, curve.digest) == (RANKS * 8, 2, "d")


@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize("step", range(4))
def test_one_bit_of_one_loss_is_noticed_even_if_the_step_was_run_again(rank, step):
    first = losses(0, 4)
    value = float.fromhex(first[rank][step].loss)
    first[rank][step] = Loss(step, (value * (1 + sys.float_info.epsilon)).hex())
    with pytest.raises(DemoError, match=f"first, rank {rank}, step {step}: "):
        report.join(losses(0, STEPS, "d"), attempts(first, losses(2, STEPS, "d")), STEPS)


def test_a_missing_step_is_noticed():
    with pytest.raises(DemoError, match="5 of 6 steps"):
        report.join(losses(0, STEPS, "d"), attempts(losses(0, 2), losses(3, STEPS, "d")), STEPS)


def test_other_weights_are_noticed():
    with pytest.raises(DemoError, match="d, e"):
        report.join(losses(0, STEPS, "d"), attempts(losses(0, 4), losses(2, STEPS, "e")), STEPS)


def test_the_curves_show_their_bits_only_where_they_differ():
    curve = report.join(losses(0, STEPS, "d"), attempts(losses(0, 4), losses(2, STEPS, "d")), STEPS)
    assert "0x" not in cells(report.curve_table(losses(0, STEPS, "d"), curve))
    other = losses(0, STEPS, "d")
    other[0][3] = Loss(3, "0x1p-30")
    assert "0x1p-30" in cells(report.curve_table(other, curve))


def cells(table):
    return " | ".join(str(cell) for column in table.columns for cell in [column.header, *column.cells])


def came_back(*tiers, step=3):
    return [Restored(step, tier, 0.1 * rank, 38 << 20) for rank, tier in enumerate(tiers, 1)]


def test_what_was_not_measured_has_no_row():
    restored = came_back("arena", "arena", "rebuilt", "rebuilt")
    first = [[Saved(1, 0.2), Saved(3, 0.1), Reached(3, "staged", 0.3)]]
    free = [[Saved(5, 0.1), Reached(5, "staged", 0.3), Reached(5, "protected", 0.35), Reached(5, "durable", 0.4)]]
    measured = report.Measured([[TorchSaved(1, 37 << 20, 0.1, 0.2)], []], [first], [free], [("a death", restored)])
    text = cells(measured.table("32 MiB/s"))
    assert "none was seen" not in text
    assert "32 MiB/s" not in text
    assert "ckptd, 38 MiB per rank | " in text
    assert "300.0 ms | 350.0 ms | 400.0 ms, meanwhile training goes on" in text
    assert "200.0 ms: step 3 from arena, 2 ranks | 400.0 ms: step 3 from rebuilt, 2 ranks" in text
    assert measured.notes()[0].startswith("worst stop of ckptd: the save of step 1, the first after a start")


def test_a_promise_that_was_kept():
    reached = [[Reached(3, "staged", 0.1), Reached(3, "protected", 0.1)], [Reached(5, "staged", 0.1)], [], []]
    assert promises.newest(reached, "staged") == 5
    assert promises.newest(reached, "protected") == 3
    assert promises.newest(reached, "protected", reported=4) == 4
    restored = promises.restored([[one, Loss(4, "0x1p+0")] for one in came_back("arena", "rebuilt")])
    promises.check(restored, 3, "protected", ["arena", "rebuilt"])


@pytest.mark.parametrize(
    ("restored", "promised", "says"),
    [
        (came_back("arena", "rebuilt"), 4, "step 4 was reported protected, but step 3 came back"),
        (came_back("arena", "pfs"), 3, r"step 3 came from \['arena', 'pfs'\], by rank"),
        (came_back("arena") + came_back("rebuilt", step=5), 3, r"different steps: \[3, 5\]"),
    ],
)
def test_a_broken_promise_is_noticed(restored, promised, says):
    with pytest.raises(DemoError, match=says):
        promises.check(restored, promised, "protected", ["arena", "rebuilt"])


def test_a_training_that_began_from_nothing_is_noticed():
    with pytest.raises(DemoError, match=r"ranks \[1\] began from nothing"):
        promises.restored([came_back("arena"), [Loss(0, "0x1p+0")]])
    with pytest.raises(DemoError, match="no checkpoint was reported staged"):
        promises.newest([[Saved(1, 0.1)]], "staged")


def test_a_journal_is_read_while_it_is_written(tmp_path):
    path = str(tmp_path / "journal")
    reader = Reader(path)
    assert reader.poll() == []
    writer = Writer(path)
    writer.write(Loss(0, "0x1p+0"))
    assert reader.poll() == [Loss(0, "0x1p+0")]
    writer.write(Loss(1, "0x1p-1"))
    with open(path, "ab") as file:
        file.write(b'{"type":"lo')  # half a line
    assert reader.poll() == [Loss(1, "0x1p-1")]
    assert reader.poll() == []


# --- what is told when all daemons are gone


def saved(step, stall_s, *milestones):
    return [Saved(step, stall_s), *(Reached(step, milestone, 1.0) for milestone in milestones)]


def told_save(step, stall_s, **more):
    return {"step": step, "stall_s": stall_s, "staged_s": 0.1, "protected_s": 0.2, "durable_s": 0.3} | more


def a_history():
    """Two starts of two ranks, as the ranks have it and as ckptd tells it."""
    one = [[Loss(0, "0x0p+0"), *saved(0, 0.1 + rank, "staged", "durable"), Loss(1, "0x0p+0")] for rank in range(RANKS)]
    two = [[Restored(0, "arena", 0.4, 5), Loss(1, "0x0p+0"), *saved(1, 0.2, "staged")] for _ in range(RANKS)]
    attempts = [told.Attempt(one, "lost", 100.0, 110.0), told.Attempt(two, "closed", 120.0, 130.0)]
    lost = [{"what": "ranks", "ranks": 1}, {"what": "ranks", "ranks": 1}]
    back = {"step": 0, "tiers": {"arena": 2}, "seconds": 0.3, "nbytes": 10, "lost_steps": 0}
    same = {"world_size": 2, "nodes": 2}
    runs = [
        {"how": "lost", "began": 101.0, "ended": 111.0, "losses": lost, "restores": [], "saves": [told_save(0, 1.0)]},
        {"how": "closed", "began": 121.0, "ended": 130.0, "losses": [], "restores": [back]},
    ]
    runs[1]["saves"] = [told_save(1, 0.1)]
    parts = {"training_s": 20.0, "stall_s": 1.1, "restore_s": 0.4, "repeated_s": 0.0, "start_s": 7.5}
    goodput = parts | {"unexplained_s": 0.0, "total_s": 29.0, "failures": 1}
    return {"runs": [run | same for run in runs], "goodput": goodput}, attempts


def test_a_history_that_is_true():
    history, attempts = a_history()
    assert told.check_history(history, attempts, 2) == "2 starts, 2 saves, 1 restores"
    told.check_advice(
        {"failures": 1, "restores": 2, "restores_from_store": 0, "costs": {"stall_s": 0.1}},
        [attempts[0], attempts[1]._replace(records=[attempts[1].records[0] * 2])],
    )
    state = {"run": {"how": "closed"}, "durable": {"step": 1}, "unsaved": []}
    told.check_state(state, 2)
    with pytest.raises(DemoError, match="the durable step: ckptd tells 1, the ranks' own records have 2"):
        told.check_state(state, 3)


@pytest.mark.parametrize(
    ("place", "value", "says"),
    [
        (("runs", 0, "how"), "closed", "start 1: its end"),
        (("runs", 1, "nodes"), 1, "ranks and nodes"),
        (("runs", 0, "began"), 99.0, "start 1: its begin"),
        (("runs", 0, "ended"), 116.0, "start 1: its end"),
        (("runs", 0, "losses"), [], "start 1: ranks that were lost"),
        (("runs", 0, "saves"), [], "start 1: saves"),
        (("runs", 0, "saves", 0, "durable_s"), None, "step 0 was reported durable, and ckptd history lacks it"),
        (("runs", 1, "saves", 0, "stall_s"), 0.3, "the stall of step 1"),
        (("runs", 0, "saves"), [told_save(0, 1.0), told_save(-1, 0.0)], "which no rank began"),
        (("runs", 1, "restores"), [], "start 2: restores"),
        (("runs", 1, "restores", 0, "tiers"), {"pfs": 2}, "where ranks read"),
        (("runs", 1, "restores", 0, "seconds"), 1.0, "seconds of the restore"),
        (("runs", 1, "restores", 0, "nbytes"), 5, "bytes of the restore"),
        (("runs", 1, "restores", 0, "lost_steps"), 2, "steps lost"),
        (("goodput", "training_s"), 10.0, "the parts of the time add up to"),
        (("goodput", "failures"), 0, "failures"),
    ],
)
def test_a_history_that_is_not_is_noticed(place, value, says):
    history, attempts = a_history()
    found = history
    for key in place[:-1]:
        found = found[key]
    found[place[-1]] = value
    with pytest.raises(DemoError, match=says):
        told.check_history(history, attempts, 2)


def start_demo(tmp_path):
    """The short demo, its files under tmp_path."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "client")])
    return pythons.Popen(
        [sys.executable, "-m", "ckptd_client.demo", "--short"],
        env=os.environ | {"PYTHONPATH": path, "TMPDIR": str(tmp_path), "NO_COLOR": "1"} | pythons.with_forks(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=tmp_path,
    )


def left_behind(tmp_path, pid):
    """Files, shared memory and processes of the demo that pid was."""
    arena = f"/dev/shm/ckptd-demo-{pid}-"
    marks = [f"{tmp_path}/ckptd-demo-".encode(), arena.encode()]
    processes = []
    for entry in Path("/proc").iterdir():
        try:
            environ = (entry / "environ").read_bytes()
        except OSError:
            continue
        if entry.name.isdigit() and any(mark in environ for mark in marks):
            processes.append(entry.name)
    return [*tmp_path.iterdir(), *Path("/dev/shm").glob(f"ckptd-demo-{pid}*"), *processes]


@pytest.mark.faults
@pytest.mark.timeout(600)
def test_the_short_demo_proves_what_it_says(tmp_path):
    with start_demo(tmp_path) as demo:
        output = demo.communicate()[0]
    assert demo.returncode == 0, output
    assert "the loss curve equals the uninterrupted run's, bit for bit: 30 steps" in output
    routes = re.findall(r"restored step \d+ from tier (\w+), (\d) ranks", output)
    assert routes == [("arena", "4"), ("arena", "2"), ("rebuilt", "2")], output
    assert re.search(r"^ *node-a +0 +0-1 ", output, re.MULTILINE), output  # node, set, ranks
    assert re.search(r"^ *node-c +0 +2-3 .* (fine|synced) *$", output, re.MULTILINE), output
    assert "none was seen" not in output
    assert "each figure agrees with the ranks' own records: 3 starts, " in output
    assert re.search(r"report\.html:\s+3\s+runs, ", output), output
    assert output.splitlines()[-1] == 'Everything it made is removed. Next: "A first save" in README.md'
    assert left_behind(tmp_path, demo.pid) == []


@pytest.mark.faults
@pytest.mark.timeout(600)
@pytest.mark.skipif(os.environ.get("FAULTS") != "long", reason="a minute of both cores: FAULTS=long")
def test_an_interrupted_demo_leaves_nothing_behind(tmp_path):
    with start_demo(tmp_path) as demo:
        for line in demo.stdout:
            if "ckptd took it over" in line:  # a daemon runs by now
                break
        demo.send_signal(signal.SIGINT)
        output = demo.communicate()[0]
    assert demo.returncode == 130, output
    assert left_behind(tmp_path, demo.pid) == []
