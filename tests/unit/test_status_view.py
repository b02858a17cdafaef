"""Lines are compared as they appear: a reader of this file sees what a user sees."""

import io
import re

import pytest
from rich.console import Console

from ckptd.status_view import StatusView
from tests.unit import a_status


def shown(status, *, width=80, encoding="utf-8", nodes=False, **options) -> str:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding)
    Console(file=file, width=width, **options).print(StatusView(status, nodes=nodes))
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
        "step 1300 · 150.0 GiB of 376.0 GiB · 1.2 GiB/s · 3m1s left",
        "step 1200 abandoned: rank 15 never delivered within 300 s",
        "error: rank 15 ended without close\n",
        "    hint: its memory is kept for 24h: restart the job\n",
        "no checkpoint yet",
        "error: no answer for 40 s",
    ):
        assert part in re.sub(r" +\n", "\n", text)


def test_checkpoints_say_how_safe_they_are():
    text = shown(a_status.status(jobs=[a_status.job()]))
    assert line(text, "step inc") == "step inc staged protected durable in ranks size age"
    assert line(text, "1350") == "1350 4 … – – arena 9/16 376.0 GiB –"  # noqa: RUF001
    assert line(text, "1300") == "1300 4 ✓ – draining arena 16/16 376.0 GiB 3m20s"  # noqa: RUF001
    assert line(text, "1250") == "1250 4 ✓ ✓ superseded arena, peer 16/16 376.0 GiB 3m20s"
    assert line(text, "1200") == "1200 4 ✗ – abandoned arena 16/16 376.0 GiB 3m20s"  # noqa: RUF001
    assert line(text, "1100") == "1100 4 ✓ – ✓ pfs 16/16 376.0 GiB 3m20s"  # noqa: RUF001


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
    marks = [line(text, str(step)).split()[3] for step in (1400, 1350, 1300, 1250, 1200)]
    assert marks == ["–", "…", "–", "✓", "–"]  # noqa: RUF001
    assert line(text, "nodes") == "nodes 4 nodes · xor in 1 set"


def test_what_is_amiss_between_the_nodes_is_said_without_being_asked_for():
    nodes = [a_status.node(number, reachable=number not in (1, 2)) for number in range(4)]
    degraded = ["set 0 makes no parity while it hears nothing of node01, node02", *(f"set {n}: x" for n in range(9))]
    status = a_status.status(jobs=[a_status.job(nodes=nodes, degraded=degraded, **FOUR)])
    text = shown(status, width=100)
    assert line(text, "nodes") == "nodes 4 nodes · xor in 1 set · not heard of: node01, node02"
    assert "degraded: set 0 makes no parity while it hears nothing of node01, node02 " in text
    assert "and 6 more: ckptd status --nodes" in text
    assert "degraded: set 8: x" in shown(status, nodes=True)


def test_nodes_stand_by_sets():
    nodes = [
        a_status.node(0),
        a_status.node(1, set_index=1, encoded_step=None, problem="no memory for parity"),
        a_status.node(2, reachable=False, ranks=[8, 9, 11]),
    ]
    text = shown(a_status.status(jobs=[a_status.job(nodes=nodes, **FOUR)]), nodes=True, width=100)
    assert line(text, "set node") == "set node domain ranks heard of parity of step problem"
    assert line(text, "0 node00") == "0 node00 rack0 0-3 yes 1300"
    assert line(text, "0 node02") == "0 node02 rack1 8-9, 11 no 1300"
    assert line(text, "1 node01") == "1 node01 rack0 4-7 yes none no memory for parity"
    assert "node node00 coordinates the job and knows more" in text, "the daemon asked is node03's"
    assert text.index("node02") < text.index("node01"), "sets are not torn apart"
    assert "parity of step" not in shown(a_status.status(jobs=[a_status.job(nodes=nodes, **FOUR)]))


def test_ranks_in_step_share_a_line_and_a_dead_one_stands_out():
    text = shown(a_status.status(), width=120)
    assert line(text, "ranks 0-14") == "ranks 0-14 ■■□ 2 of 3 slots of 24.0 GiB in use, newest step 1300"
    assert line(text, "rank 15: ") == (
        "rank 15: process ended; newest step 1300 (pid 4015 on node03); 2 of 3 slots of 24.0 GiB in use"
    )


def test_a_drain_that_failed_says_when_it_tries_again():
    drain = a_status.drain(last_error="Input/output error: /s/x", attempt=2, retry_in_s=8.0)
    text = shown(a_status.status(jobs=[a_status.job(drain=drain)]))
    assert "attempt 2 failed: Input/output error: /s/x, again in 8s" in text
    assert " left" not in text


def test_only_the_newest_checkpoints_are_shown():
    many = [a_status.checkpoint(step, "durable", "durable") for step in range(1000, 0, -1)]
    text = shown(a_status.status(jobs=[a_status.job(checkpoints=many)]))
    assert "and 990 older checkpoints" in text


def test_what_was_removed_is_said_and_soon_left_out():
    here = [a_status.checkpoint(step, "durable", "durable", tiers=["pfs"]) for step in (900, 800)]
    removed = [a_status.checkpoint(step, "durable", "durable", tiers=[]) for step in range(700, 200, -100)]
    text = shown(a_status.status(jobs=[a_status.job(checkpoints=[*here, *removed])]))
    assert line(text, "800").split()[5] == "pfs"
    assert line(text, "700").split()[5] == "removed"
    assert text.count("removed") == 3
    assert "and 2 older checkpoints" in text


def test_a_narrow_terminal_loses_the_protected_column_first():
    text = shown(a_status.status(jobs=[a_status.job()]), width=60)
    assert line(text, "step inc") == "step inc staged durable in ranks size age"
    assert "superseded" in text
    assert max(map(len, text.splitlines())) <= 60


def test_a_bar_is_for_terminals_only():
    assert "━" in shown(a_status.status(), force_terminal=True)
    plain = shown(a_status.status())
    assert "━" not in plain
    assert line(plain, "memory") == "memory 768.0 GiB of 1.2 TiB (64 %)"
    assert line(plain, "drain") == "drain 40 %"


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
    for word in ("draining", "abandoned", "✓", "error:"):
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
