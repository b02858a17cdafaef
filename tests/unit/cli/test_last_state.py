"""``ckptd status JOB|PATH`` where no daemon has the job: what its store and its journal tell, and what to type."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import msgspec
import pytest
import torch
from rich.console import Console

from ckptd.arena.journal_files import JournalFile
from ckptd.cli import last_state
from ckptd.cli.view.last import view
from ckptd.shared.base.errors import CkptdError
from ckptd.shared.base.ids import JobKey, SaveId
from ckptd.shared.files.child_process import told_within
from ckptd.shared.protocol.journal import Ended, Lost, Name, RunBegan, RunEnded, Staged, framed, run_digits
from ckptd.shared.protocol.messages import End
from tests.checkpoints import write_checkpoint
from tests.cluster import Node
from tests.faults.mounts import FuseStore, needs_fuse
from tests.faults.ranks import JOB, Ranks
from tests.runs import RUN
from tests.unit.history import stored
from tests.unit.verbs import in_process

pytestmark = pytest.mark.process
BEGAN = 1_790_000_000.0
FIRST = RunBegan(at=BEGAN, incarnation=1, run=RUN, world_size=2, nodes=1, coordinator="gpu07")


def staged(counter, step, at):
    return Staged(at=BEGAN + at, counter=counter, step=step, nbytes=10, seconds=0.1)


@pytest.fixture
def store(tmp_path):
    """One job: step 50 is committed, step 100 was staged, and there is no record of its run's end."""
    path = tmp_path / "store"
    write_checkpoint(path, [{"w": torch.zeros(4)}], job="llama", save=SaveId(1, 1, 50, RUN))
    stored.write(path / "llama", [[FIRST, staged(1, 50, 10.0), staged(2, 100, 20.0)]])
    return str(path)


@pytest.fixture
def ckptd(capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return in_process(capfd, monkeypatch, tmp_path, CKPTD_ARENA=str(tmp_path / "arena"))


def told(ckptd, *args):
    code, out, err = ckptd("status", *args, "--json", "--timeout", "60")
    assert (code, err) == (0, "")
    return json.loads(out)


def shown(last, now):
    file = io.StringIO()
    Console(file=file, width=80, highlight=False).print(view(last, now))
    return [line.rstrip() for line in file.getvalue().splitlines()]


def test_what_was_staged_and_is_lost_comes_first_and_where_it_may_still_be(ckptd, store):
    code, out, err = ckptd("status", "llama", "--store", store, "--timeout", "60")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "llama: no daemon of this node serves it"
    first = " ".join(" ".join(lines[1:5]).split())
    assert "unsafe step 100 was staged and is not on the store, and not in memory here" in first
    assert "without it load() goes on from step 50" in first
    assert "hint ckptd status on gpu07 shows what a daemon there still has" in first
    assert max(map(len, lines)) <= 80


def test_json_has_the_facts(ckptd, store):
    found = told(ckptd, f"{store}/llama")
    assert (found["type"], found["schema"], found["job"], found["store"]) == ("last", 1, "llama", store)
    assert (found["durable"]["step"], [one["step"] for one in found["unsaved"]]) == (50, [100])
    assert (found["run"]["coordinator"], found["run"]["over"], found["newest_step"]) == ("gpu07", False, 100)
    assert found["memory"]["step"] is None


def test_an_arena_has_records_that_the_store_lacks(ckptd, store, tmp_path):
    """A daemon puts them every half minute: one that was killed has more to tell than the store."""
    name = Name(1, run_digits(RUN), "0a0b0c0d", 0)
    arena = tmp_path / "arena"
    arena.mkdir(mode=0o700)
    key = JobKey(store, "llama")
    file = JournalFile.make(str(arena), key, name)
    entries = [FIRST, staged(1, 50, 10.0), staged(2, 100, 20.0), staged(3, 150, 30.0)]
    file.append(b"".join(map(framed, entries)))
    other = JournalFile.make(str(arena), JobKey("/elsewhere", "llama"), name)
    other.append(framed(staged(9, 900, 90.0)))
    assert [one["step"] for one in told(ckptd, "llama", "--store", store)["unsaved"]] == [150, 100]


def read(store, tmp_path):
    return last_state.read(str(tmp_path / "arena"), "llama", store)


def test_a_job_that_closed_with_all_on_the_store_says_how_to_go_on(tmp_path):
    path = tmp_path / "store"
    write_checkpoint(path, [{"w": torch.zeros(4)}], job="llama", save=SaveId(1, 1, 50, RUN))
    closed = RunEnded(at=BEGAN + 3600, how="closed")
    stored.write(path / "llama", [[FIRST, staged(1, 50, 10.0), closed]])
    lines = shown(read(str(path), tmp_path), BEGAN + 7200)
    assert "unsafe" not in "\n".join(lines)
    assert lines[1:5] == [
        "next    start the training again: load() goes on from step 50",
        "safe    durable 50 (1h59m ago)",
        "last    run 1 of 2 ranks on gpu07",
        "last    closed, 1h ago",
    ]


def test_a_lost_node_and_a_run_that_was_lost_are_named(tmp_path):
    path = tmp_path / "store"
    write_checkpoint(path, [{"w": torch.zeros(4)}], job="llama", save=SaveId(1, 1, 50, RUN))
    events = [Lost(at=BEGAN + 60, node="gpu07", what="ranks", ranks=2), RunEnded(at=BEGAN + 61, how="lost")]
    stored.write(path / "llama", [[FIRST, staged(1, 50, 10.0), *events]])
    text = "\n".join(shown(read(str(path), tmp_path), BEGAN + 121))
    assert "last    lost: its ranks ended without a word, 1m ago" in text
    assert "last    gpu07 lost: ranks, 2 ranks, 1m1s ago" in text


def test_steps_after_the_durable_one_are_counted(tmp_path):
    path = tmp_path / "store"
    write_checkpoint(path, [{"w": torch.zeros(4)}], job="llama", save=SaveId(1, 1, 50, RUN))
    ended = Ended(at=BEGAN + 21, counter=2, step=100, end=End.SUPERSEDED)
    stored.write(path / "llama", [[FIRST, staged(1, 50, 10.0), staged(2, 100, 20.0), ended]])
    assert "step    100 was reached: 50 steps after the durable one" in shown(read(str(path), tmp_path), BEGAN + 30)


def test_damage_is_counted_and_the_rest_shown(store, tmp_path):
    stored.damage(f"{store}/llama")
    found = read(store, tmp_path)
    assert (found.damaged, found.durable.step) == (1, 50)
    assert "error   1 damaged part of the journal passed over" in shown(found, BEGAN)


def test_a_name_cannot_steer_the_terminal(store, tmp_path):
    found = read(store, tmp_path)
    found = msgspec.structs.replace(found, run=msgspec.structs.replace(found.run, coordinator="gpu\x1b[2J07"))
    assert "\x1b" not in "\n".join(shown(found, BEGAN))


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["lama"], "where is the job lama? There is no store in the settings"),
        (["lama", "--store", "{store}"], "{store} has no job lama"),
        (["{store}/lama"], "{store}/lama: no such job"),
    ],
)
def test_a_job_that_is_not_there_is_an_error_of_the_command(ckptd, store, args, says):
    code, out, err = ckptd("status", *(arg.format(store=store) for arg in args), "--timeout", "60")
    assert (code, out) == (2, "")
    assert says.format(store=store) in err


def test_without_an_arena_it_says_how_to_ask_for_a_job(ckptd):
    code, _, err = ckptd("status")
    assert (code, "what is known of a job: ckptd status JOB|PATH" in err) == (3, True)


@needs_fuse
def test_a_store_that_hangs_costs_the_deadline(store, tmp_path):
    with FuseStore(str(tmp_path)) as fuse:
        shutil.copytree(f"{store}/llama", f"{fuse.path}/llama", symlinks=True)
        assert last_state.asked(str(tmp_path), "llama", fuse.path, 60).durable.step == 50
        fuse.hang()
        began = time.monotonic()
        with pytest.raises(CkptdError, match="does not answer in 2 s") as error:
            last_state.asked(str(tmp_path), "llama", fuse.path, 2)
        assert time.monotonic() - began < 10
        assert f"stat -f {fuse.path}" in error.value.hint
        fuse.go_on()


def test_a_job_that_the_daemon_here_has_is_shown_alone(tmp_path, ckptd, monkeypatch):
    with Node(str(tmp_path)) as node, Ranks(node, 1) as ranks:
        node.start()
        monkeypatch.setenv("CKPTD_ARENA", node.arena)
        ranks.call("connect")
        ranks.call("save", 1)
        ranks.call("wait", 1, "durable")
        for words in ([JOB], [JOB, "--store", node.store], [f"{node.store}/{JOB}"]):
            found = told(ckptd, *words)
            assert ([job["job"] for job in found["jobs"]], "type" in found) == ([JOB], False)
        write_checkpoint(node.store, [{"w": torch.zeros(4)}], job="other", save=SaveId(1, 1, 50, RUN))
        assert told(ckptd, "other", "--store", node.store)["durable"]["step"] == 50
        assert ckptd("status", JOB, "--store", str(tmp_path / "elsewhere"), "--timeout", "60")[0] == 2


def test_one_child_looks_for_all_jobs_and_says_when_a_store_has_answered(store, tmp_path):
    told, ended = told_within(60, "ckptd.cli.last_state", str(tmp_path), "llama", store, "lama", store)
    said = {}
    for text in map(json.loads, told.splitlines()):
        said.setdefault(text["place"], []).append(text["what"] and text["what"]["type"])
    assert (said, ended) == ({0: [None, "last"], 1: ["refused"]}, True)
    found, missing = last_state.asked_of(str(tmp_path), [("llama", store), ("lama", store)], 60)
    assert (found.durable.step, str(missing).startswith(store)) == (50, True)


def test_our_own_slowness_is_no_store_that_does_not_answer(store, tmp_path, monkeypatch):
    told, _ = told_within(60, "ckptd.cli.last_state", str(tmp_path), "llama", store)
    first, _, rest = told.partition(b"\n")
    for cut in (b"", rest[:100]):  # the child was killed while it computed, or while it wrote
        monkeypatch.setattr(last_state, "told_within", lambda *_, cut=cut: (first + b"\n" + cut, False))
        with pytest.raises(
            CkptdError, match="the store of llama answers, and its journal takes more than 5 s"
        ) as error:
            last_state.asked(str(tmp_path), "llama", store, 5)
        assert "mount" not in error.value.hint
        assert "--timeout" in error.value.hint


@needs_fuse
def test_a_store_that_hangs_takes_none_of_the_time_of_other_jobs(store, tmp_path):
    with FuseStore(str(tmp_path)) as fuse:
        shutil.copytree(f"{store}/llama", f"{fuse.path}/llama", symlinks=True)
        fuse.hang()
        began = time.monotonic()
        wanted = [*[("llama", fuse.path)] * 5, ("llama", store)]
        *hung, found = last_state.asked_of(str(tmp_path), wanted, 10)
        assert time.monotonic() - began < 20
        assert all("does not answer in 10 s" in str(one) for one in hung)
        assert found.durable.step == 50
        fuse.go_on()


def test_without_a_daemon_watch_looks_again_and_sees_what_changes(store, tmp_path):
    words = ("status", "llama", "--store", store, "--watch", "--json", "--interval", "0.1", "--timeout", "60")
    child = subprocess.Popen(
        ["env", "--default-signal=INT", sys.executable, "-m", "ckptd", *words], stdout=subprocess.PIPE,
        env=os.environ | {"CKPTD_ARENA": str(tmp_path / "arena")},
    )  # fmt: skip
    try:
        assert json.loads(child.stdout.readline())["durable"]["step"] == 50
        write_checkpoint(store, [{"w": torch.zeros(4)}], job="llama", save=SaveId(1, 2, 100, RUN))
        while json.loads(child.stdout.readline())["durable"]["step"] != 100:
            pass
        child.send_signal(signal.SIGINT)
        assert child.wait(60) == 0
    finally:
        child.kill()
        child.communicate()
