"""``ckptd scrub``: all of a store in its turn, at its rate, from where the last one ended, mended where it can be."""

import json
import os
import tempfile
import time

import pytest
import torch

from ckptd.shared.base.ids import SaveId
from ckptd.shared.format.digest import BLOCK_NBYTES
from tests.checkpoints import write_checkpoint
from tests.flips import flip
from tests.parity_store import Made
from tests.runs import RUN
from tests.unit.verbs import in_process

IMAGE = "r00000-p00.safetensors"
WORDS = torch.arange((3 * BLOCK_NBYTES) // 4, dtype=torch.int32)


@pytest.fixture(name="ckptd")
def fixture_ckptd(capsys, monkeypatch, tmp_path):
    monkeypatch.delenv("STATE_DIRECTORY", raising=False)
    monkeypatch.chdir(tmp_path)
    verb = in_process(capsys, monkeypatch, tmp_path, XDG_STATE_HOME=str(tmp_path / "state"))
    return lambda *args: verb("scrub", *args)


@pytest.fixture(name="store")
def fixture_store(tmp_path):
    """Two steps of a job, one of another."""
    store = tmp_path / "store"
    for step in (10, 20):
        write_checkpoint(store, [{"w": torch.ones(100) * step}], save=SaveId(1, step, step, RUN))
    write_checkpoint(store, [{"w": torch.zeros(3)}], job="other")
    return store


def found(ckptd, *args):
    """What --json says, and the exit code."""
    code, out, err = ckptd(*args, "--json")
    assert err == ""
    told = json.loads(out)
    assert told["ok"] is (code == 0)
    return code, told


def steps(told):
    return [one["step"] for one in told["checkpoints"]]


@pytest.mark.parametrize(
    "how",
    [("{store}/demo",), ("demo", "--store", "{store}"), ("{store}/demo/latest",), ("{store}/demo/", "--rate", "1G")],
)
def test_what_is_named_is_read_newest_first(ckptd, store, how):
    code, told = found(ckptd, *(one.format(store=store) for one in how))
    assert code == 0
    assert steps(told) == ([20] if "latest" in how[0] else [20, 10])
    assert all(one["complete"] and one["ok"] for one in told["checkpoints"])


@pytest.mark.parametrize("how", [("{store}",), ("--all", "--store", "{store}")])
def test_a_store_is_all_its_jobs(ckptd, store, how):
    code, told = found(ckptd, *(one.format(store=store) for one in how))
    assert (code, steps(told)) == (0, [20, 10, 10])


def test_what_was_read_is_passed_over_until_its_time(ckptd, store):
    assert steps(found(ckptd, str(store))[1]) == [20, 10, 10]
    write_checkpoint(store, [{"w": torch.ones(100)}], save=SaveId(1, 30, 30, RUN))
    told = found(ckptd, str(store))[1]
    assert (steps(told), told["recent"], told["left"]) == ([30], 3, 0)
    assert "3 read within 7d" in ckptd(str(store))[1] or "4 read within 7d" in ckptd(str(store))[1]
    time.sleep(0.05)
    assert sorted(steps(found(ckptd, str(store), "--every", "0.01s")[1])) == [10, 10, 20, 30]


def test_the_rate_is_kept_and_the_next_one_goes_on_in_the_middle(ckptd, tmp_path):
    folder = write_checkpoint(tmp_path / "store", [{"w": WORDS}])
    rate = 2 * BLOCK_NBYTES
    began = time.monotonic()
    code, told = found(ckptd, str(folder), "--rate", str(rate), "--for", "0.2s")
    took = time.monotonic() - began
    assert code == 0
    assert (told["left"], told["checkpoints"][0]["complete"]) == (1, False)
    assert told["nbytes"] >= 2 * BLOCK_NBYTES
    assert took >= told["nbytes"] / rate - 0.05
    code, rest = found(ckptd, str(folder), "--rate", "1G")
    assert (rest["left"], rest["checkpoints"][0]["complete"]) == (0, True)
    assert told["nbytes"] + rest["nbytes"] < 4.5 * BLOCK_NBYTES, "nothing was read twice"
    assert rest["nbytes"] < 3 * BLOCK_NBYTES


def test_damage_is_named_each_time_until_it_is_gone(ckptd, store):
    path = store / "demo" / "latest"
    flip(path / IMAGE, -5)
    for _ in range(2):
        code, out, _ = ckptd(str(store))
        assert code == 1
        assert f"damaged: {os.path.realpath(path)}/{IMAGE}: block 0" in out
        assert "not mended: " in out
        assert "no parity was drained" in out
        assert "1 damaged" in out
    flip(path / IMAGE, -5)
    code, out, _ = ckptd(str(store))
    assert (code, "nothing is damaged" in out) == (0, True)


@pytest.fixture(name="arenas")
def fixture_arenas():
    with tempfile.TemporaryDirectory(prefix="ckptd-test-", dir="/dev/shm") as directory:
        yield directory


def test_it_is_mended_from_parity(ckptd, tmp_path, arenas):
    final = Made(tmp_path, arenas, [[50_000], [80_001], [33_333]]).commit()
    whole = (final / IMAGE).read_bytes()
    flip(final / IMAGE, -5)
    code, told = found(ckptd, str(final), "--no-repair")
    assert (code, told["checkpoints"][0]["mended"]) == (1, [])
    code, out, _ = ckptd(str(final))
    assert code == 0
    assert f"mended: {final / IMAGE}" in out
    assert "nothing is damaged, what was is mended" in out
    assert (final / IMAGE).read_bytes() == whole


def test_damage_that_is_found_before_the_time_is_over_is_mended_then(ckptd, tmp_path, arenas):
    final = Made(tmp_path, arenas, [[3 * BLOCK_NBYTES], [80_001], [33_333]]).commit()
    whole = (final / IMAGE).read_bytes()
    flip(final / IMAGE, 2000)
    code, told = found(ckptd, str(final), "--rate", "16M", "--for", "0.1s")
    assert (code, told["checkpoints"][0]["complete"], len(told["checkpoints"][0]["mended"])) == (0, False, 1)
    assert (final / IMAGE).read_bytes() == whole


def test_a_state_that_cannot_be_read_is_said_and_one_that_cannot_be_written_is_an_error(ckptd, store, tmp_path):
    state = tmp_path / "own" / "state.json"
    assert ckptd(str(store), "--state", str(state))[0] == 0
    assert len(json.loads(state.read_text())["read"]) == 3
    state.write_text("{")
    code, told = found(ckptd, str(store), "--state", str(state))
    assert (code, len(told["checkpoints"])) == (0, 3)
    assert "begins again" in told["notes"][0]
    (tmp_path / "file").write_text("")
    code, _, err = ckptd(str(store), "--state", str(tmp_path / "file" / "state.json"))
    assert code == 1
    assert "another place: --state FILE" in err


def test_a_unit_has_its_own_state(ckptd, store, tmp_path, monkeypatch):
    monkeypatch.setenv("STATE_DIRECTORY", str(tmp_path / "unit"))
    assert found(ckptd, str(store))[1]["state"] == str(tmp_path / "unit" / "scrub.json")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((), "nothing to scrub is named"),
        (("{store}", "--all"), "--all, or one target"),
        (("--all",), "no store in the settings"),
        (("{store}", "--rate", "0"), "0 bytes per second"),
        (("{store}", "--rate", "fast"), "--rate: 'fast' is no size"),
        (("{store}", "--every", "soon"), "--every: 'soon' is no duration"),
        (("{store}/demo/none",), "cannot list"),
    ],
)
def test_what_makes_no_sense_is_refused(ckptd, store, args, words):
    code, _, err = ckptd(*(one.format(store=store) for one in args))
    assert code == 2
    assert words in err
    assert "hint:" in err
