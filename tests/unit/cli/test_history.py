"""``ckptd history`` and ``ckptd advise`` on journals as they lie on a store."""

import json
import os
import re
from datetime import UTC, datetime

import msgspec
import pytest

from ckptd.history import advice, intervals, runs, spread, summary
from ckptd.history.goodput import spans, totals
from ckptd.history.runs import runs_of
from ckptd.shared.protocol import status
from ckptd.shared.protocol.journal import JOURNAL_DIR, Missing, Name
from tests.unit.history import stored
from tests.unit.history.played import BEGAN, Training, played
from tests.unit.history.test_runs import flat
from tests.unit.sources import ROOT
from tests.unit.verbs import in_process


@pytest.fixture
def ckptd(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    return in_process(capsys, monkeypatch, tmp_path, COLUMNS="100", TZ="UTC")


@pytest.fixture(scope="module")
def journal():
    return played(Training(), failures=4).journal


@pytest.fixture
def job(tmp_path, journal):
    return stored.write(tmp_path / "store" / "llama", journal)


def told(ckptd, *args):
    code, out, err = ckptd(*args, "--json")
    assert (code, err) == (0, "")
    return json.loads(out)


def test_the_last_runs_are_listed_and_all_where_they_are_asked_for(ckptd, tmp_path):
    job = stored.write(tmp_path / "many", played(Training(), failures=24).journal)
    rows = re.compile(r"^ +([0-9]+) +2026.* (?:lost|closed) ", re.MULTILINE)
    out = ckptd("history", job)[1]
    assert "the last 20 of 25 runs; all: --all" in out
    assert rows.findall(out) == [str(number) for number in range(6, 26)]
    assert len(rows.findall(ckptd("history", job, "--all")[1])) == 25
    assert len(told(ckptd, "history", job)["runs"]) == 25


def test_how_a_run_ended_is_shown_without_orders_to_the_terminal(ckptd, tmp_path):
    training = played(Training(), failures=0)
    training.run(100.0, how="\x1b]0;mine\x07")
    assert "\x1b" not in ckptd("history", stored.write(tmp_path / "many", training.journal))[1]


def test_the_table_has_a_row_for_each_run_and_says_what_was_lost(ckptd, job, journal):
    code, out, err = ckptd("history", job)
    assert (code, err) == (0, "")
    found = runs_of(flat(journal))
    ettr = totals(spans(found), found).ettr
    assert f"5 runs, ETTR {100 * ettr:.3g} % of" in " ".join(out.split())
    assert re.findall(r"^ +([0-9]) +2026.* (lost|closed) ", out, re.MULTILINE) == [
        ("1", "lost"), ("2", "lost"), ("3", "lost"), ("4", "lost"), ("5", "closed"),
    ]  # fmt: skip
    for loss in (one for run in found for one in run.losses):
        assert f"{loss.node} lost: node, 8 ranks" in out
    assert "restored in 5s from arena (24 ranks)" in " ".join(out.split())
    assert max(map(len, out.splitlines())) <= 100


def test_the_table_fits_a_terminal(ckptd, job, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = ckptd("history", job)
    assert max(map(len, out.splitlines())) <= 80
    assert re.search(r"^ +5 2026-\S+ \S+ +\S+ closed .* %$", out, re.MULTILINE)


def test_json_has_the_figures_of_the_journal(ckptd, job, journal):
    found = told(ckptd, "history", job)
    same = runs_of(flat(journal))
    assert (found["schema"], found["job"], found["store"], found["damaged"]) == (1, "llama", os.path.dirname(job), 0)
    assert [row["saves_by_end"] for row in found["runs"]] == [
        msgspec.to_builtins(row.saves_by_end) for row in summary.rows(same, [])
    ]
    assert found["goodput"] == msgspec.to_builtins(totals(spans(same), same))
    assert sum(row["goodput"]["total_s"] for row in found["runs"]) == pytest.approx(found["goodput"]["total_s"])
    assert found["runs"][0]["saves"] == []
    saves = told(ckptd, "history", job, "--saves")["runs"][0]["saves"]
    assert [one["step"] for one in saves] == [save.step for save in same[0].saves]


@pytest.mark.parametrize(
    ("flags", "incarnations"),
    [
        (["--run", "2"], [2]),
        (["--run", "4", "--run", "1"], [1, 4]),
        (["--losses"], [1, 2, 3, 4, 5]),
        (["--since", "2026-09-21"], [1, 2, 3, 4, 5]),
        (["--since", "2999-01-01"], []),
    ],
)
def test_filters_choose_runs(ckptd, job, flags, incarnations):
    found = told(ckptd, "history", job, *flags)
    assert [row["incarnation"] for row in found["runs"]] == incarnations
    assert found["goodput"]["failures"] == len({1, 2, 3, 4} & {*incarnations})


def test_since_leaves_out_what_was_over_before(ckptd, job, journal):
    code, _, err = ckptd("history", job, "--since", "yesterday")
    assert (code, "'yesterday' is no time" in err, 'such as "24h"' in err) == (2, True, True)
    text = f"{datetime.fromtimestamp(runs_of(flat(journal))[2].began + 1, UTC):%Y-%m-%dT%H:%M:%S}+00:00"
    assert [row["incarnation"] for row in told(ckptd, "history", job, "--since", text)["runs"]] == [3, 4, 5]


def test_a_job_is_found_by_name_path_store_and_checkpoint(ckptd, job, monkeypatch):
    store = os.path.dirname(job)
    ways = [[job], [store], ["llama", "--store", store], [f"{job}/step-000000100.i0001"], [f"{job}/"]]
    assert len({json.dumps(told(ckptd, "history", *way)) for way in ways}) == 1
    monkeypatch.setenv("CKPTD_STORE", store)
    assert told(ckptd, "history", "llama")["job"] == "llama"


@pytest.mark.parametrize("verb", [["history"], ["advise"], ["report", "-o", "page.html"]], ids=lambda verb: verb[0])
class TestErrors:
    def test_no_store(self, ckptd, verb):
        code, out, err = ckptd(*verb, "llama")
        assert (code, out) == (2, "")
        assert "where is the job llama?" in err
        assert f"hint: ckptd {verb[0]} llama --store DIR" in err

    def test_no_such_job(self, ckptd, verb, job):
        store = os.path.dirname(job)
        code, _, err = ckptd(*verb, "lama", "--store", store)
        assert (code, f"{store} has no job lama" in err, f"hint: its jobs: ckptd list {store}" in err) == (
            2,
            True,
            True,
        )
        code, _, err = ckptd(*verb, f"{store}/lama")
        assert (code, f"{store}/lama: no such job" in err, f"ckptd list {store}" in err) == (2, True, True)

    def test_no_journal(self, ckptd, verb, tmp_path):
        (tmp_path / "old").mkdir()
        code, _, err = ckptd(*verb, str(tmp_path / "old"))
        assert (code, "has no journal" in err, f"ckptd list {tmp_path / 'old'}" in err) == (2, True, True)

    def test_several_jobs(self, ckptd, verb, job, journal):
        stored.write(os.path.join(os.path.dirname(job), "other"), journal)
        code, _, err = ckptd(*verb, os.path.dirname(job))
        assert (code, "has 2 jobs" in err, f"hint: one of {job}, " in err) == (2, True, True)

    def test_nothing_but_damage(self, ckptd, verb, tmp_path):
        folder = tmp_path / "job" / JOURNAL_DIR / "i0001-00000000"
        folder.mkdir(parents=True)
        (folder / "000000").write_bytes(b"no journal")
        code, _, err = ckptd(*verb, str(tmp_path / "job"))
        assert (code, "has no run that can be read: 1 damaged" in err, "ckptd verify" in err) == (2, True, True)


def test_damaged_parts_are_counted_and_the_rest_is_shown(ckptd, job):
    stored.damage(job)
    code, out, _ = ckptd("history", job, "--json")
    assert (code, json.loads(out)["damaged"]) == (1, 1)
    code, out, _ = ckptd("history", job)
    assert code == 1
    assert "1 damaged part of the journal passed over" in " ".join(out.split())
    assert "5 runs" in out


def test_a_link_in_place_of_a_segment_is_damage(ckptd, job):
    os.symlink("/etc/passwd", os.path.join(job, Name(1, "00000000", "0a0b0c0d", 9).path))
    code, out, _ = ckptd("history", job, "--json")
    assert (code, json.loads(out)["damaged"]) == (1, 1)


def test_a_journal_in_many_segments_is_the_same(ckptd, tmp_path, journal, job):
    parts = [[*one[:7], one[0], *one[7:]] for one in journal]  # a segment begins with its run, again
    many = stored.write(tmp_path / "many" / "llama", parts, segment_entries=7)
    found = [told(ckptd, "history", one) for one in (job, many)]
    assert found[0]["goodput"] == found[1]["goodput"]


def test_dropped_records_are_said(ckptd, tmp_path, journal):
    dropped = Missing(at=BEGAN + 5, records=12)
    job = stored.write(tmp_path / "gap", [[*journal[0], dropped], *journal[1:]])
    code, out, _ = ckptd("history", job)
    assert (code, "12 records dropped while the store was away" in out) == (0, True)


def test_a_name_in_the_journal_steers_no_terminal(ckptd, tmp_path, journal):
    loss = next(entry for entry in journal[0] if type(entry).__name__ == "Lost")
    bad = msgspec.structs.replace(loss, node="n\x1b[2J1")
    job = stored.write(tmp_path / "bad", [[*journal[0], bad]])
    _, out, _ = ckptd("history", job)
    assert "\x1b" not in out
    assert "n\N{REPLACEMENT CHARACTER}[2J1 lost" in out


# --- advise ---


def test_advise_says_what_to_do_from_what_and_what_else_would_cost(ckptd, job):
    code, out, err = ckptd("advise", job)
    assert (code, err) == (0, "")
    found = told(ckptd, "advise", job)
    assert f"save every {found['best']['steps']} steps" in out
    assert f"connect(drain_every={found['drain_every']})" in out
    assert "4 failures in the journal" in out
    assert len(re.findall(r"^ +[0-9]+ steps? ", out, re.MULTILINE)) == len(found["choices"])
    assert re.search(rf"^ +{found['best']['steps']} steps .* best$", out, re.MULTILINE)
    assert re.search(r"^ +50 steps .* now$", out, re.MULTILINE)


def test_advise_takes_a_time_between_failures(ckptd, job):
    assert told(ckptd, "advise", job, "--mtbf", "3h")["mtbf_s"] == 10800.0
    code, _, err = ckptd("advise", job, "--mtbf", "soon")
    assert (code, "--mtbf: 'soon' is no duration" in err, 'such as "90m"' in err) == (2, True, True)
    assert ckptd("advise", job, "--mtbf", "0s")[0] == 2


def test_advise_without_figures_is_not_fine(ckptd, tmp_path, journal):
    job = stored.write(tmp_path / "young", [journal[0][:2]])
    code, _, err = ckptd("advise", job)
    assert (code, "no advice for" in err, f"hint: what it has: ckptd history {job}" in err) == (1, True, True)


# --- docs/history.md ---

STRUCTS = {
    found.__name__: {field.name for field in msgspec.structs.fields(found)}
    for found in (
        summary.Summary, summary.RunRow, status.Goodput, spread.Spread, runs.Save, runs.Loss, runs.Restore,
        runs.Damage, runs.Fault, advice.Advice, intervals.Costs, intervals.Choice,
    )
}  # fmt: skip


def test_every_field_is_documented_and_nothing_else():
    found, of = {}, ""
    text = (ROOT / "docs" / "history.md").read_text()
    for first, names in re.findall(r"^\| (\w*) ?\| (`.*?) \|", text[text.index("| of | field | |") :], re.MULTILINE):
        of = first or of
        found.setdefault(of, set()).update(re.findall(r"`(\w+)`", names))
    assert found.pop("report") == {"schema", "path", "nbytes", "runs", "damaged"}
    found["Advice"] -= {"schema", "job", "store"}
    assert found == STRUCTS
