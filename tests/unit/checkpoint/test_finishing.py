"""``ckptd commit``: what all nodes have voted for becomes a checkpoint without a daemon; what they have not is told."""

import json
import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from ckptd.checkpoint.finish import finish
from ckptd.checkpoint.verify import verify_path
from ckptd.cli import invoke
from ckptd.shared.base.ids import JobKey, SaveId
from ckptd.shared.format.integrity import XXH3
from ckptd.store.opening import open_store
from ckptd.system import failpoints
from tests.runs import MANIFEST, RUN, VOTES, file_in, vote_in
from tests.unit.checkpoint.test_verify import build

OLD, SAVE, NEW = SaveId(1, 1, 20, RUN), SaveId(1, 2, 30, RUN), SaveId(1, 3, 40, RUN)


def test_a_save_with_all_votes_is_committed(tmp_path, capsys):
    build(tmp_path, OLD)
    partial = build(tmp_path, SAVE, finish=False)
    assert invoke(["commit", str(partial.parent)]) == 0
    final = partial.parent / SAVE.dirname
    assert f"committed: step 30: {final}\n" in capsys.readouterr().out
    assert verify_path(str(final)).ok
    assert os.readlink(partial.parent / "latest") == SAVE.dirname
    assert invoke(["commit", str(tmp_path)]) == 0
    assert "nothing lies unfinished" in capsys.readouterr().out


def test_of_several_the_older_comes_first_and_one_can_be_chosen(tmp_path, capsys):
    old, new = build(tmp_path, SAVE, finish=False), build(tmp_path, NEW, finish=False)
    assert invoke(["commit", "--json", str(old)]) == 0
    (saved,) = json.loads(capsys.readouterr().out)["saves"]
    assert (saved["step"], saved["committed"]) == (30, True)
    assert new.is_dir()
    build(tmp_path, SaveId(1, 4, 50, RUN), finish=False)
    assert [one.step for one in finish(JobKey(str(tmp_path), "demo"), "test")] == [40, 50]
    assert os.readlink(old.parent / "latest") == SaveId(1, 4, 50, RUN).dirname


def test_what_is_missing_is_reported_and_nothing_touched(tmp_path, capsys):
    partial = build(tmp_path, finish=False)
    vote_in(partial, 1).unlink()
    before = sorted(os.listdir(partial))
    assert invoke(["commit", str(tmp_path)]) == 1
    assert "not committed: step 30: " in (out := capsys.readouterr().out)
    assert "1 of 2 ranks have no vote: 1" in out
    assert sorted(os.listdir(partial)) == before


def test_a_file_that_is_gone_is_reported(tmp_path, capsys):
    partial = build(tmp_path, finish=False)
    (partial / "r00001-p00.safetensors").unlink()
    assert invoke(["commit", "--json", str(partial)]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert (answer["schema"], answer["ok"]) == (1, False)
    assert "r00001-p00.safetensors: missing" in answer["saves"][0]["why"]
    assert partial.is_dir()


def test_what_a_newer_one_has_overtaken_is_left(tmp_path, capsys):
    build(tmp_path, NEW)
    partial = build(tmp_path, SAVE, finish=False)
    assert invoke(["commit", str(tmp_path)]) == 0
    assert "is committed and newer" in capsys.readouterr().out
    assert partial.is_dir()


@pytest.mark.parametrize("lost", [("COMMITTED",), (MANIFEST,), ("COMMITTED", MANIFEST)], ids=" ".join)
def test_what_lost_its_records_is_committed_again_also_beside_a_newer_one(tmp_path, capsys, lost):
    final = build(tmp_path, SAVE)
    build(tmp_path, NEW)
    for name in lost:
        file_in(final, name).unlink()
    assert invoke(["list", "--json", str(final.parent)]) == 1
    assert f"by: ckptd commit {final}" in capsys.readouterr().out
    assert invoke(["commit", str(final)]) == 0
    assert f"committed: step 30: {final}\n" in capsys.readouterr().out
    assert verify_path(str(final)).ok
    assert os.readlink(final.parent / "latest") == NEW.dirname


@pytest.mark.parametrize("point", ["commit.before-manifest", "commit.before-committed", "commit.before-rename"])
def test_a_daemons_look_removes_nothing_of_what_is_committed_again(tmp_path, capsys, monkeypatch, point):
    """An unfinished save that is older than a committed one is removed at each look."""
    final = build(tmp_path, SAVE)
    build(tmp_path, NEW)
    (final / "COMMITTED").unlink()
    store, seen = open_store(str(tmp_path), XXH3), []

    def look(reached):
        if reached == point:
            seen.append(point)
            for left in store.scan("demo").partials:
                store.discard("demo", left.save)

    monkeypatch.setattr(failpoints, "reach", look)
    assert invoke(["commit", str(final)]) == 0
    assert seen == [point]
    assert verify_path(str(final)).ok


def test_what_dies_while_it_is_committed_again_has_its_name_after_a_sweep(tmp_path, capsys, monkeypatch):
    final = build(tmp_path, SAVE)
    build(tmp_path, NEW)
    (final / "COMMITTED").unlink()

    def die(reached):
        if reached == "commit.before-committed":
            os._exit(9)

    child = os.fork()
    if child == 0:
        monkeypatch.setattr(failpoints, "reach", die)
        invoke(["commit", str(final)])
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert not final.exists()
    open_store(str(tmp_path), XXH3).sweep("demo")
    assert invoke(["commit", str(final)]) == 0
    assert verify_path(str(final)).ok


@pytest.mark.parametrize(
    ("gone", "said"),
    [("r00001-p00.safetensors", "r00001-p00.safetensors: missing"), (VOTES[1], "cover 1 of 2 ranks")],
)
def test_what_is_not_all_there_keeps_its_name(tmp_path, capsys, gone, said):
    """As an unfinished one, it could be removed by the next daemon."""
    final = build(tmp_path, SAVE)
    for name in ("COMMITTED", gone):
        file_in(final, name).unlink()
    assert invoke(["commit", str(final)]) != 0
    assert said in capsys.readouterr().err
    assert os.listdir(final.parent).count(SAVE.dirname) == 1


def test_a_checkpoint_of_another_job_is_not_committed_again_for_this_one(tmp_path, capsys):
    final = build(tmp_path, SAVE)
    (final / "COMMITTED").unlink()
    other = tmp_path / "other"
    other.mkdir()
    final.rename(other / final.name)
    assert invoke(["commit", str(other / final.name)]) == 2
    assert "its votes are not of" in capsys.readouterr().err
    assert os.listdir(other) == [final.name]


def test_two_at_once(tmp_path):
    key = JobKey(str(tmp_path), "demo")
    for counter in range(1, 9):
        build(tmp_path, save := SaveId(1, counter, 10 * counter, RUN), finish=False)
        with ThreadPoolExecutor(3) as pool:
            answers = [one for found in pool.map(lambda _: finish(key, "test"), range(3)) for one in found]
        assert any(one.committed for one in answers)
        assert verify_path(str(tmp_path / "demo" / save.dirname)).ok


def test_paths_that_are_nothing_to_commit(tmp_path, capsys):
    final = build(tmp_path)
    assert invoke(["commit", str(final)]) == 2
    assert "has its final name already" in capsys.readouterr().err
    assert invoke(["commit", str(tmp_path / "nowhere")]) == 2
