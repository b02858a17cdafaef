"""Lines are compared as they appear: a reader of this file sees what a user sees."""

import io
import re

import pytest
from rich.console import Console

from ckptd.status_view import StatusView
from tests.unit import a_status


def shown(status, *, width=80, encoding="utf-8", **options) -> str:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding)
    Console(file=file, width=width, **options).print(StatusView(status))
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
    status = a_status.status(errors=[evil], jobs=[a_status.job(errors=[evil], drain=a_status.drain(last_error=evil))])
    text = shown(status, width=width)
    assert "\x1b" not in text
    assert "[bold]" in text
    assert max(map(len, text.splitlines())) <= width
