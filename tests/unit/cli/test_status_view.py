"""Lines are compared as they appear: a reader of this file sees what a user sees."""

import io
import re

import msgspec
import pytest
from rich.cells import cell_len
from rich.console import Console

from ckptd.cli.view.parts import UNICODE, bar, levels, shortened
from ckptd.cli.view.status import StatusView
from ckptd.shared.protocol.status import RestoreStatus, WorkerStatus
from tests.faults.nodes.capture import in_readme
from tests.unit import a_status


def shown(status, *, width=80, encoding="utf-8", nodes=False, everything=False, **options) -> str:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding, errors="replace")  # as the command has it
    Console(file=file, width=width, **options).print(StatusView(status, nodes=nodes, everything=everything))
    file.flush()
    return raw.getvalue().decode(encoding)


def line(text: str, start: str) -> str:
    """The one line that begins with start, runs of blanks drawn together."""
    lines = [re.sub(r" +", " ", one).strip() for one in text.splitlines()]
    (found,) = [one for one in lines if one.startswith(start)]
    return found


def test_a_busy_daemon_fits_in_80_columns():
    text = shown(a_status.status())
    assert max(map(len, text.splitlines())) <= 80
    for part in (
        "ckptd 0.1.0 · node node03 · pid 4242 · up 3h12m",
        "768.0 GiB of 1.2 TiB (64 %)",
        "1 malformed message",
        "llama-7b  incarnation 4 · 16 ranks",
        "safe    durable 1100 (3m20s) · protected 1250 (3m20s) · staged 1300 (3m20s)\n",
        "drain   ━━━━━━━━━━━━────────────────────  40 % of step 1300\n",
        "        150.0 GiB of 376.0 GiB · 1.2 GiB/s · 3m1s left\n",
        "error   rank 15 ended without close\n",
        "hint    its memory is kept for 24h: restart the job\n",
        "store   /scratch/project_465000123/someone…/path/that/does/not/fit/in/one/line\n",
        "step 1200 abandoned: rank 15 never delivered within 300 s",
        "safe    no checkpoint yet",
        "unsafe   tiny: the store does not answer: no answer for 40 s; nothing is durable\n",
        "hint     is the mount alive? timeout 10 stat -f /s; training goes on\n",
    ):
        assert part in re.sub(r" +\n", "\n", text)


def test_of_jobs_of_one_name_each_has_its_own_problems_and_is_named_with_its_store():
    jobs = [a_status.job(store="/one"), a_status.job(store="/two", pace=None)]
    text = shown(a_status.status(jobs=jobs), width=200)
    assert "unsafe   llama-7b in /one: the store takes 34s per save" in text
    assert "llama-7b in /two: the store takes" not in text


@pytest.mark.parametrize(("busy", "idle_s", "told"), [(1, 45.0, True), (1, 5.0, False), (0, 4500.0, False)])
def test_a_store_that_does_not_answer_is_reported_long_before_it_is_given_up(busy, idle_s, told):
    worker = WorkerStatus(store="/s", pid=77, busy=busy, idle_s=idle_s)
    text = shown(a_status.status(workers=[worker]))
    assert ("the store has not answered for 45s" in text) is told


def test_a_save_that_waits_for_ranks_names_them_once():
    """The reason is the same for each save that waits: the oldest one's line stands for all."""
    waiting = [
        a_status.checkpoint(step, "staging", reason="waits for ranks 1-7: every rank must call save")
        for step in (30, 20, 10)
    ]
    text = shown(a_status.status(jobs=[a_status.job(checkpoints=waiting)]))
    assert text.count("waits for") == 1
    assert "step 10 waits for ranks 1-7: every rank must call save" in text


def test_where_the_time_went_is_one_short_line():
    text = shown(a_status.status())
    assert line(text, "time") == "time ETTR 94.6 % of 2h46m: starts 3 %, repeated steps 2 %"
    young = a_status.goodput(total_s=59.0, training_s=50.0, start_s=9.0)
    text = shown(a_status.status(jobs=[a_status.job(goodput=young)]))
    assert "ETTR" not in text, "in its first minute it says little"
    assert "ETTR" not in shown(a_status.status(jobs=[a_status.job(goodput=None)]))


def test_what_matters_most_comes_first():
    text = shown(a_status.status())
    order = ["ckptd", "unsafe", "hint", "memory", "llama-7b", "safe", "drain", "error", "store", "ranks"]
    at_left = ("unsafe", "hint", "memory", "llama-7b")
    places = [text.index(f"\n{w}" if w in at_left else w if w == "ckptd" else f"\n  {w}") for w in order]
    assert places == sorted(places)


def test_saves_that_were_superseded_are_one_line():
    rows = [a_status.checkpoint(step, "superseded", "staged", end="superseded") for step in range(1300, 700, -50)]
    durable = a_status.checkpoint(700, "durable", "durable", end="durable", tiers=["pfs"])
    job = a_status.job(checkpoints=[*rows, durable])
    text = shown(a_status.status(jobs=[job]))
    assert [line.split()[0] for line in text.splitlines() if re.match(r" +\d+ +4 ", line)] == ["1300", "700"]
    assert "steps 750 to 1250 superseded: the store was slower than the saves" in text
    few = a_status.job(checkpoints=[*rows[:3], durable], pace=None)
    text = shown(a_status.status(jobs=[few]))
    assert "steps 1200, 1250 superseded: a newer one was staged before their drain began" in text


def test_a_load_that_runs_stands_at_the_top():
    load = RestoreStatus(phase="reading", seconds=12.0, step=1300, ranks=9, missing=[(9, 15)])
    lines = shown(a_status.status(jobs=[a_status.job(restore=load, ranks=[], pace=None)], workers=[])).splitlines()
    assert lines[1].split(maxsplit=1)[0] == "load"
    assert lines[1].rstrip().endswith(" step 1300 is read: 9 of 16 ranks, for 12s")


def test_more_than_a_few_findings_are_counted():
    jobs = [a_status.job(job=f"job-{n}", ranks=[]) for n in range(6)]
    text = shown(a_status.status(jobs=jobs, workers=[]))
    assert text.count("unsafe ") == 4
    assert "and 2 more: ckptd status --nodes --all" in text


def test_what_is_safe_is_said_as_far_as_it_is_newer_than_what_is_safer():
    def safe(*checkpoints):
        return line(shown(a_status.status(jobs=[a_status.job(checkpoints=list(checkpoints), errors=[])])), "safe")

    durable = a_status.checkpoint(20, "durable", "durable", tiers=["pfs"], age_s=None)
    protected = a_status.checkpoint(10, "kept", "protected", end="kept")
    staged = a_status.checkpoint(30, "staged", "staged")
    lost = a_status.checkpoint(40, "staged", "staged", tiers=[])
    assert safe(durable, protected) == "safe durable 20"
    assert safe(staged, durable) == "safe durable 20 · staged 30 (3m20s)"
    assert safe(lost, staged, protected) == "safe nothing durable yet · protected 10 (3m20s) · staged 30 (3m20s)"


def test_parity_that_stands_in_for_lost_nodes_protects_less():
    def safe(scheme, lost):
        nodes = [a_status.node(n, reachable=n >= lost) for n in range(4)]
        job = a_status.job(checkpoints=[protected], nodes=nodes, scheme=scheme, errors=[])
        return line(shown(a_status.status(jobs=[job])), "safe").rpartition(" · ")[2]

    protected = a_status.checkpoint(10, "kept", "protected", end="kept", age_s=5.0)
    assert safe("xor", 0) == "protected 10 (5s)"
    assert safe("xor", 1) == "protected 10 (5s) until one more node is lost"
    assert safe("xor", 2) == "protected 10 (5s) if they come back"
    assert safe("double", 1) == "protected 10 (5s)"
    assert safe("double", 2) == "protected 10 (5s) until one more node is lost"


def test_checkpoints_say_how_safe_they_are():
    text = shown(a_status.status(jobs=[a_status.job()]))
    assert line(text, "step inc") == "step inc staged protected durable in ranks size age"
    assert line(text, "1350") == "1350 4 … – – arena 9/16 376.0 GiB –"  # noqa: RUF001
    assert line(text, "1300") == "1300 4 ✓ – draining arena 16/16 376.0 GiB 3m20s"  # noqa: RUF001
    assert line(text, "1250") == "1250 4 ✓ ✓ superseded arena, peer 16/16 376.0 GiB 3m20s", "it alone is protected"
    assert line(text, "1200") == "1200 4 ✗ – abandoned arena 16/16 376.0 GiB 3m20s"  # noqa: RUF001
    assert line(text, "1100") == "1100 4 ✓ not needed ✓ pfs 16/16 376.0 GiB 3m20s"


def test_a_durable_checkpoint_of_which_replicas_were_not_compared_is_named():
    rows = [
        a_status.checkpoint(step, "durable", "durable", end="durable", tiers=["pfs"], replicas=replicas)
        for step, replicas in ((30, "window"), (20, "all"), (10, ""))
    ]
    text = shown(a_status.status(jobs=[a_status.job(checkpoints=rows)]))
    assert "step 30: its ranks saved what they all hold, and only some" in text
    assert text.count("its ranks saved what") == 1


FOUR = {"scheme": "xor", "set_size": 4, "coordinator": "node00"}


def test_parity_that_is_being_made_was_made_or_never_will_be():
    rows = [
        a_status.checkpoint(1400, "staging", ranks=9),
        a_status.checkpoint(1350, "kept", "staged", end="kept"),
        a_status.checkpoint(1300, "superseded", "staged", end="superseded"),
        a_status.checkpoint(1250, "durable", "durable", protected=True, tiers=["arena", "pfs"]),
        a_status.checkpoint(1200, "durable", "durable", tiers=["pfs"]),
    ]
    nodes = [a_status.node(number) for number in range(4)]
    text = shown(a_status.status(jobs=[a_status.job(checkpoints=rows, nodes=nodes, **FOUR)]))
    marks = [line(text, str(step)).split()[3] for step in (1400, 1350, 1250, 1200)]
    assert marks == ["–", "…", "✓", "not"]  # noqa: RUF001
    assert "step 1300 superseded: " in text, "which has no row: a newer one is staged"
    assert line(text, "1200").startswith("1200 4 ✓ not needed ✓ pfs")
    (newest,) = rows[1:2]
    for tiers, mark in ((["arena", "pfs"], "…"), (["pfs"], "not needed")):
        rows[1] = msgspec.structs.replace(newest, phase="durable", milestone="durable", end="durable", tiers=tiers)
        durable = shown(a_status.status(jobs=[a_status.job(checkpoints=rows, nodes=nodes, **FOUR)]))
        assert line(durable, "1350").startswith(f"1350 4 ✓ {mark} ✓ "), "its parity is made while it is in memory"
    assert line(text, "nodes") == "nodes 4 nodes · xor in 1 set"


def test_what_is_amiss_between_the_nodes_is_said_without_being_asked_for():
    nodes = [a_status.node(number, reachable=number not in (1, 2)) for number in range(4)]
    degraded = ["set 0 makes no parity while it hears nothing of node01, node02", *(f"set {n}: x" for n in range(9))]
    status = a_status.status(jobs=[a_status.job(nodes=nodes, degraded=degraded, **FOUR)])
    text = shown(status, width=100)
    assert "unsafe nodes node[01-02] do not answer" in " ".join(text.split())
    assert line(text, "nodes 4") == "nodes 4 nodes · xor in 1 set", "it names no node again"
    assert (
        line(text, "degraded set 0 makes") == "degraded set 0 makes no parity while it hears nothing of node01, node02"
    )
    assert "and 6 more: ckptd status --nodes --all" in text
    assert "set 8: x" not in text
    assert "set 8: x" in shown(status, nodes=True, everything=True)


def of_nodes(*nodes, **changes):
    return a_status.status(jobs=[a_status.job(nodes=list(nodes), **FOUR | changes)])


def test_nodes_stand_by_sets_and_are_counted_as_people_do():
    nodes = [
        a_status.node(0, report=a_status.report(0)),
        a_status.node(10, node="node10", ranks=[8], report=a_status.report(2, ranks=[])),
        a_status.node(9, node="node9", ranks=[9, 11], reachable=False),
        a_status.node(1, set_index=1, encoded_step=None, problem="no memory for parity"),
    ]
    text = shown(of_nodes(*nodes, drain=None, silent=["node01"]), nodes=True)
    assert line(text, "node set") == "node set ranks memory parity state"
    assert line(text, "node00") == "node00 0 0-3 61 % 1300 fine"
    assert line(text, "node9") == "node9 0 9, 11 – 1300 not heard of"  # noqa: RUF001
    assert line(text, "node01") == "node01 1 4-7 – – no answer"  # noqa: RUF001
    names = [row.split()[0] for row in text.splitlines() if row.startswith("  node")][-4:]
    assert names == ["node00", "node9", "node10", "node01"], "sets are not torn apart"
    assert line(text, "nodes") == "nodes 4 nodes · xor in 2 sets · 2 answered"
    assert line(text, "silent") == "silent did not answer: node01"
    assert "state" not in shown(of_nodes(*nodes))
    wide = shown(of_nodes(*nodes), nodes=True, width=120)
    assert line(wide, "node set") == "node set domain ranks memory drain parity state"
    assert line(wide, "node00") == "node00 0 rack0 0-3 61.0 GiB of 100.0 GiB 61 % – 1300 fine"  # noqa: RUF001


def test_a_drain_has_a_bar_for_each_node_and_rank():
    share = {"drain_nbytes": 40 * a_status.GIB, "drain_nbytes_done": 19 * a_status.GIB}
    nodes = [
        a_status.node(0, report=a_status.report(0), **share),
        a_status.node(1, drain_nbytes=40 * a_status.GIB, drain_nbytes_done=40 * a_status.GIB, drain_voted=True),
    ]
    status = of_nodes(*nodes, ranks=a_status.report(0).ranks)
    text = shown(status, nodes=True)
    assert line(text, "node00") == "node00 0 0-3 61 % █▅▂▁ 48 % 1300 draining"
    assert line(text, "node01") == "node01 0 4-7 – 100 % 1300 synced"  # noqa: RUF001
    assert line(text, "1 ━") == "1 ━━━━━━━━━━━━━━━━━━━━━━────────── 70 % of 10.0 GiB"
    assert line(text, "0 ━") == "0 ━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━ 100 % of 10.0 GiB"
    assert line(shown(status, nodes=True, encoding="ascii"), "node00") == "node00 0 0-3 61 % 9610 48 % 1300 draining"


def a_thousand(**changes):
    nodes = [
        a_status.node(
            number, node=f"gpu-{number:04d}", set_index=number // 8, report=a_status.report(number),
            drain_nbytes=40 * a_status.GIB, drain_nbytes_done=(20 if number != 700 else 4) * a_status.GIB,
        )
        for number in range(1000)
    ]  # fmt: skip
    nodes[500] = a_status.node(500, node="gpu-0500", reachable=False)
    nodes[600] = a_status.node(600, node="gpu-0600")
    nodes[300] = a_status.node(
        300, node="gpu-0300", report=a_status.report(300, problems=["No space left on device\n  hint: df -h /s"])
    )
    return of_nodes(*nodes, silent=["gpu-0600"], world_size=8000, **changes)


def test_of_a_thousand_nodes_the_worst_come_first_and_the_rest_is_summed_up():
    text = shown(a_thousand(), nodes=True)
    rows = [row.split()[0] for row in text.splitlines() if row.startswith("  gpu-")]
    assert rows[:4] == ["gpu-0500", "gpu-0600", "gpu-0300", "gpu-0700"]
    assert len(rows) == 16
    assert line(text, "984 more") == "984 more nodes, all fine · memory 61 % · drain 50 % · all of them: --all"
    assert line(text, "nodes 1,") == "nodes 1,000 nodes · xor in 125 sets · 998 answered"
    assert line(text, "error gpu") == "error gpu-0300: No space left on device"
    assert line(text, "hint df") == "hint df -h /s"
    assert len(text.splitlines()) <= 60
    assert (
        sum(row.startswith("  gpu-") for row in shown(a_thousand(), nodes=True, everything=True).splitlines()) == 1000
    )


def ten_thousand(done):
    """In a drain, seven nodes lost. done: of each node's share, which differ by less than a tenth."""
    lost = {3, *range(7, 13)}
    nodes = [
        a_status.node(
            number, node=f"gpu-{number:05d}", set_index=number // 8, reachable=number not in lost,
            drain_nbytes=40 * a_status.GIB, drain_nbytes_done=int((done + number % 5) * a_status.GIB),
        )
        for number in range(10_000)
    ]  # fmt: skip
    sets = [f"set {n // 8} makes no parity while it hears nothing of gpu-{n:05d}" for n in sorted(lost)]
    return of_nodes(*nodes, degraded=sets, world_size=80_000, ranks=[], errors=[], pace=None)


def test_the_page_of_ten_thousand_nodes_is_low_and_calm():
    pages = [shown(ten_thousand(done), nodes=True) for done in (20.0, 20.2)]
    for text in pages:
        assert len(text.splitlines()) < 50
        assert "nodes gpu-[00003,00007-00012] (7 of 10,000) do not answer" in " ".join(text.split())
        assert line(text, "degraded 7 sets") == "degraded 7 sets make no parity while nodes do not answer"
    names = [[row.split()[0] for row in text.splitlines() if row.startswith("  gpu-")] for text in pages]
    assert names[0] == names[1], "rows keep their places from one look to the next"
    assert len(pages[0].splitlines()) == len(pages[1].splitlines())


def test_the_same_trouble_of_many_nodes_is_one_and_versions_that_differ_are_one():
    problem = ["disk quota exceeded"]
    nodes = [a_status.node(n, report=a_status.report(n, problems=problem if n else [])) for n in range(8)]
    nodes[7] = a_status.node(7, report=a_status.report(7, version="0.0.9"))
    text = shown(of_nodes(*nodes), nodes=True, width=120)
    assert line(text, "error node[") == "error node[01-06]: disk quota exceeded"
    assert line(text, "error versions") == "error versions differ: 0.1.0 on 7; 0.0.9 on node07"
    assert "install the same ckptd there" in text


def test_ranks_in_step_share_a_line_and_a_dead_one_stands_out():
    text = shown(a_status.status(), width=120)
    assert line(text, "ranks 0-14") == "ranks 0-14 ■■□ 2 of 3 slots of 24.0 GiB in use, newest step 1300"
    assert line(text, "rank 15: ") == (
        "rank 15: process ended; newest step 1300 (pid 4015 on node03); 2 of 3 slots of 24.0 GiB in use"
    )


def test_a_rank_that_lives_and_has_not_called_this_daemon_has_not_ended():
    ranks = [a_status.rank(0), a_status.rank(1, attached=False)]
    text = shown(a_status.status(jobs=[a_status.job(ranks=ranks)]), width=120)
    assert line(text, "rank 1:").startswith(
        "rank 1: has not called ckptd since this daemon started; newest step 1300 (pid 4001 on node03); 2 of 3 slots"
    )
    assert "process ended" not in text


def test_what_verifies_late_copies_is_reported_and_why_there_are_none_stands_out():
    def told(*late):
        ranks = [a_status.rank(number, late=text) for number, text in enumerate(late)]
        return shown(a_status.status(jobs=[a_status.job(ranks=ranks)]), width=120)

    assert "late" not in told("", "")
    assert line(told("proof", "proof"), "late") == "late verified by proof"
    both = told("proof", "off: userfaultfd: Operation not permitted", "proof")
    assert line(both, "late 0, 2") == "late 0, 2 verified by proof"
    assert line(both, "late 1") == "late 1 copied before save returns (off: userfaultfd: Operation not permitted)"


def test_a_drain_that_failed_says_when_it_tries_again():
    drain = a_status.drain(last_error="Input/output error: /s/x", attempt=3, retry_in_s=8.0)
    text = shown(a_status.status(jobs=[a_status.job(drain=drain)]))
    assert "attempt 2 failed: Input/output error: /s/x, again in 8s" in text
    assert " left" not in text


def test_the_capture_in_the_readme_is_of_80_columns():
    lines = in_readme().split("\n")
    assert lines[0] == "$ ckptd status --nodes"
    assert max(map(len, lines)) <= 80
    for part in ("safe", "drain", "nodes", "ranks", "step inc", "node  set"):
        assert any(one.strip().startswith(part) for one in lines), part


def test_only_the_newest_checkpoints_are_shown():
    many = [a_status.checkpoint(step, "durable", "durable") for step in range(1000, 0, -1)]
    text = shown(a_status.status(jobs=[a_status.job(checkpoints=many)]))
    assert "and 990 older checkpoints" in text


def test_what_was_removed_is_said_and_soon_left_out():
    here = [a_status.checkpoint(step, "durable", "durable", tiers=["pfs"]) for step in (900, 800)]
    removed = [a_status.checkpoint(step, "durable", "durable", tiers=[]) for step in range(700, 200, -100)]
    text = shown(a_status.status(jobs=[a_status.job(checkpoints=[*here, *removed])]))
    assert line(text, "800").startswith("800 4 ✓ not needed ✓ pfs")
    assert line(text, "700").split()[5] == "removed"
    assert text.count("removed") == 3
    assert "and 2 older checkpoints" in text


def test_a_narrow_terminal_loses_the_protected_column_first():
    text = shown(a_status.status(jobs=[a_status.job()]), width=60)
    assert line(text, "step staged") == "step staged durable in ranks size"
    assert "superseded" in text
    assert max(map(len, text.splitlines())) <= 60


@pytest.mark.parametrize("width", [24, 40, 60, 79, 80, 81, 100, 132, 200])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_it_fits_whatever_the_width(width, encoding):
    names = {"node": f"a-{'very-' * 40}long-name", "domain": "rack " * 30}
    nodes = [a_status.node(n, **names | {"node": f"{names['node']}-{n}"}, report=a_status.report(n)) for n in range(3)]
    status = of_nodes(*nodes, silent=[names["node"]], drain=a_status.drain(last_error="x" * 300))
    text = shown(msgspec.structs.replace(status, node=names["node"]), width=width, nodes=True, encoding=encoding)
    assert max(map(len, text.splitlines())) <= width
    rows = [row.strip() for row in text.splitlines() if row.startswith("  a")]
    assert len(rows) == 3, "a name is shortened, never wrapped"


def test_a_bar_needs_no_colour():
    for options in ({}, {"force_terminal": True, "no_color": True}, {"encoding": "ascii"}):
        plain = re.sub(r"\x1b\[[0-9;]*m", "", shown(a_status.status(), **options))
        done, rest = ("#", ".") if "encoding" in options else ("━", "─")
        assert line(plain, f"memory {done}") == f"memory {done * 20}{rest * 12} 768.0 GiB of 1.2 TiB (64 %)"


def test_a_bar_is_full_only_when_all_is_done():
    assert bar(999, 1000, 10, "", UNICODE).plain == "━━━━━━━━━─"
    assert bar(0, 0, 4, "", UNICODE).plain == "━━━━"
    assert levels([0, 0.99, 1], UNICODE) == "▁▇█"


def test_the_middle_of_a_long_name_goes():
    assert shortened("/scratch/someone/checkpoints", 12) == "/scra…points"
    assert shortened("node", 4) == "node"
    assert shortened("node", 2) == "no"
    assert cell_len(shortened("ノード" * 9, 10)) <= 10


def test_no_job_says_how_one_comes():
    assert "ckptd_client.connect(job=...)" in shown(a_status.status(jobs=[], errors=["store is gone"]))


def test_without_a_terminal_there_is_no_escape_code():
    assert "\x1b" not in shown(a_status.status())


def test_no_color_keeps_every_word(monkeypatch):
    coloured = shown(a_status.status(), force_terminal=True, color_system="standard")
    monkeypatch.setenv("NO_COLOR", "1")
    plain = shown(a_status.status(), force_terminal=True, color_system="standard")
    assert "\x1b[32m" in coloured
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]", plain)
    for word in ("draining", "abandoned", "✓", "error", "hint"):
        assert word in plain


def test_ascii_terminals_get_ascii():
    text = shown(a_status.status(), encoding="ascii")
    assert line(text, "1300") == "1300 4 yes - draining arena 16/16 376.0 GiB 3m20s"


@pytest.mark.parametrize("width", [80, 100, 200])
def test_hostile_text_neither_steers_the_terminal_nor_is_markup(width):
    evil = "\x1b[2J[bold]x[/nope]" * 10
    node = a_status.node(0, node=evil, domain=evil, problem=evil, reachable=False)
    evil_job = a_status.job(errors=[evil], drain=a_status.drain(last_error=evil), nodes=[node], degraded=[evil], **FOUR)
    text = shown(a_status.status(errors=[evil], jobs=[evil_job]), width=width, nodes=True)
    assert "\x1b" not in text
    assert "[bold]" in text
    assert max(map(len, text.splitlines())) <= width


def test_saves_that_never_became_durable_are_counted_and_others_are_not():
    assert "1 durable · 1 superseded · 1 abandoned" in shown(a_status.status())
    quiet = a_status.job(ends={"durable": 5, "kept": 7})
    assert "7 kept" not in shown(a_status.status(jobs=[quiet]))
