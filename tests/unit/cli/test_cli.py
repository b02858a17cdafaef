"""Every verb as a script sees it: exit code, stdout, stderr. Real processes where the process is what is tested."""

import json
import os
import subprocess
import sys
import time
from contextlib import contextmanager
from types import SimpleNamespace

import click
import msgspec
import pytest

from ckptd import __version__, cli
from ckptd.cli import common
from ckptd.cli import drain as drain_verb
from ckptd.cli import status as status_verb
from ckptd.cli import stop as stop_verb
from ckptd.cli.view.unsafe import judged
from ckptd.peers.keys import read_keys
from ckptd.shared.base.errors import BudgetError, ConnectError, DamagedError, UsageError, WaitTimeoutError
from ckptd.shared.base.ids import JobKey, SaveId, file_name
from ckptd.shared.format import layout as lay
from ckptd.shared.format.digest import KIND, digest
from ckptd.shared.format.manifest import FileRecord, Vote
from ckptd.shared.format.sealed_record import VERSION
from ckptd.store.posix.commit import commit, write_vote
from ckptd.store.posix.scan import Place
from ckptd.system.config import SETTINGS
from ckptd.system.files import FileLayer
from ckptd.system.units import parse_size
from tests.runs import RUN, SET, STORE_ID
from tests.unit import a_status
from tests.unit.verbs import in_process

VERBS = tuple(cli._VERBS)


@pytest.fixture
def ckptd(capsys, monkeypatch, tmp_path):
    return in_process(capsys, monkeypatch, tmp_path, COLUMNS="80")


class Daemon:
    """A daemon that tells a list of statuses, then the last of them for ever."""

    def __init__(self, *statuses) -> None:
        self.statuses = list(statuses)
        self.drained, self.preempted = [], []

    @contextmanager
    def connect(self, arena, timeout_s=5.0):
        yield self

    def status(self, *, nodes=False):
        return self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]

    def drain(self, job, *, preempt):
        self.drained.append(job)
        self.preempted += [job] if preempt else []


@pytest.fixture
def store(tmp_path):
    """A store with one committed checkpoint of one rank, and one that is unfinished."""
    path = tmp_path / "store"
    (path / "job").mkdir(parents=True)
    key = JobKey(str(path), "job")
    put(key, SaveId(1, 1, 100, RUN))
    commit(FileLayer(), key, SaveId(1, 1, 100, RUN), "test")
    os.mkdir(Place(key, SaveId(1, 2, 200, RUN)).partial)
    return path


def put(key: JobKey, save: SaveId, leaves: bytes = b"") -> None:
    place = Place(key, save)
    os.mkdir(place.partial)
    image = b"image"
    with open(os.path.join(place.partial, file_name(0)), "wb") as file:
        file.write(image)
    record = FileRecord(
        name=file_name(0), rank=0, nbytes=len(image), digests=digest(image), plan=b"", form=b"", own=b"", leaves=leaves
    )
    vote = Vote(
        version=VERSION, digest_kind=KIND, store_id=STORE_ID, job=key.job, save=save, node="node",
        folder=SET, world_size=1, files=[record],
    )  # fmt: skip
    write_vote(FileLayer(), key, vote)


# --- the command itself ---


def test_version(ckptd):
    assert ckptd("--version") == (0, f"ckptd {__version__}\n", "")


def test_no_verb_is_help(ckptd):
    code, out, _ = ckptd()
    assert code == 2
    assert all(f"\n  {verb} " in out for verb in VERBS)


def test_help_says_the_exit_codes(ckptd):
    code, out, _ = ckptd("--help")
    assert code == 0
    assert "3  no daemon, or it was not done in time" in out


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_each_verb_has_an_example(verb):
    command = cli.cli.get_command(click.Context(cli.cli), verb)
    text = command.get_help(click.Context(command, info_name=f"ckptd {verb}"))
    assert f"Example:\n    ckptd {verb}" in text
    assert max(map(len, text.splitlines())) <= 80


def test_an_unknown_flag_is_usage(ckptd):
    code, out, err = ckptd("status", "--jsn")
    assert (code, out) == (2, "")
    assert err.startswith("error: No such option")
    assert "hint: see ckptd status --help" in err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UsageError("x"), 2),
        (ConnectError("x"), 3),
        (WaitTimeoutError("x"), 3),
        (DamagedError("x"), 1),
        (BudgetError("x"), 1),
    ],
)
def test_exit_codes(error, code):
    assert cli.exit_code(error) == code


@pytest.mark.process
def test_an_unread_pipe_is_no_traceback():
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "ckptd", "--help"], stdout=writer, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(writer)
    assert done.stderr == ""


@pytest.mark.process
def test_status_loads_little():
    """The slow parts of the daemon, the client and the store stay out of the verb that is typed most."""
    code = "import sys, ckptd.cli.status; print(*sys.modules)"
    loaded = set(subprocess.check_output([sys.executable, "-c", code], text=True).split())
    assert not loaded & {"torch", "numpy", "asyncio", "ckptd.daemon.loop", "ckptd.store.posix.commit", "ckptd_client"}


# --- keygen ---


def test_keygen_writes_once_and_for_the_owner_alone(ckptd, tmp_path):
    path = tmp_path / "key.toml"
    code, out, _ = ckptd("keygen", str(path))
    assert code == 0
    assert f"CKPTD_KEY_FILE={path}" in out
    assert path.stat().st_mode & 0o777 == 0o600
    keys = read_keys(str(path))
    assert keys.public in out
    assert keys.secret not in out
    code, _, err = ckptd("keygen", str(path))
    assert code == 2
    assert "is there already" in err
    assert read_keys(str(path)) == keys


def test_keygen_has_a_place_of_its_own_and_json(ckptd, tmp_path):
    code, out, _ = ckptd("keygen", "--json")
    found = json.loads(out)
    assert (code, found["schema"]) == (0, 1)
    assert found["file"] == str(tmp_path / ".config/ckptd/key.toml")
    assert read_keys(found["file"]).public == found["public"]
    assert ckptd("keygen", str(tmp_path / "missing" / "key.toml"))[0] == 2


# --- config ---


def test_config_says_what_each_setting_is_and_who_said_so(ckptd, tmp_path, monkeypatch):
    path = tmp_path / "config.toml"
    path.write_text("keep_last = 7\ndrain_bandwidth = '2G'\nset_size = 4\n")
    monkeypatch.setenv("CKPTD_SET_SIZE", "5")
    monkeypatch.setenv("CKPTD_STORE", str(tmp_path))
    args = ("config", "--config", str(path), "--worker-nice", "9", "--no-drain-parity")
    code, out, _ = ckptd(*args, "--json")
    found = json.loads(out)
    assert (code, found["schema"]) == (0, 1)
    settings = found["settings"]
    assert settings.keys() == SETTINGS.keys()
    said = {name: (one["value"], one["from"]) for name, one in settings.items() if one["from"] != "default"}
    assert said == {
        "keep_last": (7, str(path)),
        "drain_bandwidth": (2 << 30, str(path)),
        "set_size": (5, "CKPTD_SET_SIZE"),
        "store": (str(tmp_path), "CKPTD_STORE"),
        "worker_nice": (9, "--worker-nice"),
        "drain_parity": (False, "--drain-parity"),
    }
    monkeypatch.setenv("COLUMNS", "300")
    rows = {line.split("  ")[0]: line.split() for line in ckptd(*args)[1].splitlines()}
    assert rows["set_size"] == ["set_size", "5", "CKPTD_SET_SIZE"]
    assert parse_size("".join(rows["drain_bandwidth"][1:-1])) == 2 << 30
    assert ckptd("config", "--drain-bandwidth", "1500000000")[1].split("drain_bandwidth")[1].split()[0] == "1500000000"
    assert rows["read_timeout_s"] == ["read_timeout_s", "3600", "s", "default"]


def test_config_refuses_what_run_would_refuse(ckptd, tmp_path):
    path = tmp_path / "config.toml"
    path.write_text("keep_lats = 7\n")
    code, _, err = ckptd("config", "--config", str(path))
    assert code == 2
    assert "keep_lats" in err
    assert "did you mean keep_last?" in err
    assert ckptd("config", "--keep-last", "0")[0] == 2


# --- verbs that ask the daemon ---


@pytest.mark.parametrize("verb", ["status", "drain"])
def test_no_daemon(ckptd, tmp_path, verb):
    code, out, err = ckptd(verb, "--arena", str(tmp_path / "none"))
    assert (code, out) == (3, "")
    assert err.startswith("error: no daemon: there is no arena at")
    assert "hint: --arena or CKPTD_ARENA names another one; ckptd run starts a daemon in /dev/shm/ckptd-" in err


def test_status_without_an_arena_says_where_daemons_come_from(ckptd, tmp_path):
    _, _, err = ckptd("status", "--arena", str(tmp_path / "none"))
    assert "hint: a training starts one with connect(); it leaves when its last job is closed and durable\n" in err
    assert "hint: what lies on a store: ckptd list PATH\n" in err
    (tmp_path / "there").mkdir(mode=0o700)
    assert "ckptd list" not in ckptd("status", "--arena", str(tmp_path / "there"))[2]


def test_status_json_is_the_struct(ckptd, monkeypatch):
    monkeypatch.setattr(status_verb, "Daemon", Daemon(a_status.status()).connect)
    code, out, _ = ckptd("status", "--json")
    assert code == 0
    assert json.loads(out) == msgspec.to_builtins(judged(a_status.status()))
    assert json.loads(out)["schema"] == 1
    assert json.loads(out)["unsafe"]


def test_status_for_people(ckptd, monkeypatch):
    monkeypatch.setattr(status_verb, "Daemon", Daemon(a_status.status()).connect)
    code, out, _ = ckptd("status")
    assert code == 0
    assert "llama-7b  incarnation 4" in out
    assert "\x1b" not in out
    assert not any(line.endswith(" ") for line in out.splitlines())


def test_a_pipe_is_80_columns_wide(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr("os.get_terminal_size", lambda *_: os.terminal_size((200, 50)))
    assert common.console().width == 80


def test_watch_as_json_is_a_line_per_look_until_ctrl_c(ckptd, monkeypatch):
    looks = []

    def sleep(seconds):
        looks.append(seconds)
        if len(looks) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(status_verb, "time", SimpleNamespace(sleep=sleep))
    monkeypatch.setattr(status_verb, "Daemon", Daemon(a_status.status()).connect)
    code, out, _ = ckptd("status", "--watch", "--json", "--interval", "0.5")
    assert code == 0
    assert looks == [0.5] * 3
    assert [json.loads(line)["node"] for line in out.splitlines()] == ["node03"] * 3


def with_job(*checkpoints, **changes):
    return a_status.status(jobs=[a_status.job(checkpoints=list(checkpoints), **changes)])


STAGED = a_status.checkpoint(10, "staged", "staged")
DURABLE = a_status.checkpoint(10, "durable", "durable")
FAILED = a_status.checkpoint(10, "failed", "staged", end="failed", reason="disk full")
NEWER = a_status.checkpoint(20, "durable", "durable")
SUPERSEDED = a_status.checkpoint(10, "superseded", "staged", end="superseded")


@pytest.mark.parametrize(
    ("after", "code", "said"),
    [
        ([DURABLE], 0, "step 10 is durable"),
        ([NEWER, SUPERSEDED], 0, "step 20 is durable"),
        ([FAILED], 1, "step 10 cannot become durable (disk full)"),
        ([STAGED], 3, "step 10 is not durable yet"),
    ],
)
def test_drain_waits_for_what_it_asked(ckptd, monkeypatch, after, code, said):
    daemon = Daemon(with_job(STAGED), with_job(STAGED), with_job(*after))
    monkeypatch.setattr(drain_verb, "Daemon", daemon.connect)
    monkeypatch.setattr(drain_verb, "_LOOK_AGAIN_S", 0.01)
    found, out, _ = ckptd("drain", "--wait", "--timeout", "100ms")
    assert daemon.drained == daemon.preempted == [JobKey(a_status.STORE, "llama-7b")]
    assert found == code
    assert said in out


def test_drain_does_not_ask_for_what_is_durable(ckptd, monkeypatch):
    daemon = Daemon(with_job(a_status.checkpoint(30, "staging"), DURABLE))
    monkeypatch.setattr(drain_verb, "Daemon", daemon.connect)
    code, out, _ = ckptd("drain", "--no-preempt", "--json")
    assert (code, daemon.drained) == (0, [])
    assert json.loads(out)["jobs"][0]["result"] == "durable"
    assert json.loads(out)["schema"] == 1


def test_drain_of_a_job_that_saved_and_ended_in_between_is_no_failure(ckptd, monkeypatch):
    told = with_job(STAGED)
    told = msgspec.structs.replace(told, jobs=[msgspec.structs.replace(job, preempt_step=40) for job in told.jobs])
    gone = msgspec.structs.replace(told, jobs=[])
    monkeypatch.setattr(drain_verb, "Daemon", Daemon(with_job(STAGED), told, gone).connect)
    monkeypatch.setattr(drain_verb, "_LOOK_AGAIN_S", 0.01)
    code, out, _ = ckptd("drain", "--wait")
    assert (code, "what it saved at step 40 is durable" in out) == (0, True)


@pytest.mark.parametrize("checkpoints", [(), (DURABLE,)])
def test_drain_does_not_wait_for_ranks_of_which_none_asks(ckptd, monkeypatch, checkpoints):
    told = with_job(*checkpoints)
    asked = msgspec.structs.replace(told, jobs=[msgspec.structs.replace(job, preempt_step=-1) for job in told.jobs])
    monkeypatch.setattr(drain_verb, "Daemon", Daemon(told, asked, told).connect)
    monkeypatch.setattr(drain_verb, "_LOOK_AGAIN_S", 0.01)
    code, out, _ = ckptd("drain", "--wait", "--timeout", "20s")
    assert (code, "durable" in out) == (0, bool(checkpoints))


@pytest.mark.parametrize("checkpoints", [(), (DURABLE,)])
def test_drain_asks_the_ranks_to_save_also_where_nothing_is_to_be_drained(ckptd, monkeypatch, checkpoints):
    daemon = Daemon(with_job(*checkpoints))
    monkeypatch.setattr(drain_verb, "Daemon", daemon.connect)
    assert ckptd("drain")[0] == 0
    assert daemon.preempted == [JobKey(a_status.STORE, "llama-7b")]


def test_drain_of_nothing(ckptd, monkeypatch):
    monkeypatch.setattr(drain_verb, "Daemon", Daemon(with_job()).connect)
    assert ckptd("drain")[:2] == (0, "llama-7b: nothing to drain (no checkpoint is staged on all ranks)\n")


def test_drain_on_another_node_than_the_coordinators_says_where_to_wait(ckptd, monkeypatch):
    daemon = Daemon(a_status.status(jobs=[a_status.job(checkpoints=[], coordinator="node07", preempt_step=12)]))
    monkeypatch.setattr(drain_verb, "Daemon", daemon.connect)
    for flags, expected in (((), 0), (("--wait",), 4)):
        code, out, _ = ckptd("drain", *flags)
        assert code == expected
        assert out == (
            "llama-7b: node node07 was asked to drain: its daemon coordinates the job, and alone knows when it is "
            "durable. To wait for that, type there: ckptd drain --wait\n"
        )
    assert len(daemon.drained) == 2


def test_drain_of_an_unknown_job_names_those_there_are(ckptd, monkeypatch):
    monkeypatch.setattr(drain_verb, "Daemon", Daemon(a_status.status()).connect)
    code, _, err = ckptd("drain", "--job", "other")
    assert code == 2
    assert "hint: its jobs: llama-7b, tiny" in err


def test_drain_with_a_timeout_that_is_none(ckptd):
    code, _, err = ckptd("drain", "--timeout", "soon")
    assert code == 2
    assert "error: --timeout: 'soon' is no duration" in err


# --- stop ---


class Stopped(Daemon):
    """Ends when it is asked to."""

    def __init__(self, *statuses) -> None:
        super().__init__(*statuses)
        self.asked = 0

    def stop(self, *, wait):
        self.asked += 1
        return self.status()


@pytest.fixture
def stopped(ckptd, monkeypatch):
    """stopped(*statuses, words) -> (exit code, stdout, stderr) of ckptd stop, the daemon, and the seconds it took."""

    def run(*statuses, words=()):
        daemon = Stopped(*statuses)
        monkeypatch.setattr(stop_verb, "Daemon", daemon.connect)
        monkeypatch.setattr(stop_verb, "ask_status", lambda *_: daemon.status())
        start_s = time.monotonic()
        return *ckptd("stop", *words), daemon, time.monotonic() - start_s

    return run


def of_store(seen, problem=""):
    (job,) = with_job(STAGED).jobs
    return a_status.status(jobs=[msgspec.structs.replace(job, store_seen=seen, store_problem=problem)])


def test_stop_with_a_timeout_that_is_none_asks_nothing(stopped):
    for words in (("--timeout", "soon"), ("--wait", "--timeout", "soon")):
        code, _, err, daemon, seconds = stopped(of_store(False), words=words)
        assert (code, daemon.asked) == (2, 0)
        assert "error: --timeout: 'soon' is no duration" in err
        assert seconds < 4


def test_stop_names_what_the_store_answered_at_once(stopped):
    code, out, _, daemon, seconds = stopped(of_store(False), of_store(False, "no store lies at /s"))
    assert (code, daemon.asked) == (0, 1)
    assert "step 10 stays in memory; whether it is durable is not known: no store lies at /s\n" in out
    assert seconds < 4


def test_the_first_look_at_the_store_takes_half_of_the_timeout_at_most(stopped):
    code, out, _, daemon, seconds = stopped(of_store(False), words=("--wait", "--timeout", "600ms"))
    assert (code, daemon.asked) == (0, 1)
    assert f"is not known: {a_status.STORE} has not answered" in out
    assert 0.3 <= seconds < 4


def test_stop_does_not_wait_for_the_store_of_a_job_that_has_nothing_staged(stopped):
    (job,) = with_job().jobs
    code, _, _, _, seconds = stopped(a_status.status(jobs=[msgspec.structs.replace(job, store_seen=False)]))
    assert (code, seconds < 4) == (0, True)


# --- verbs that look at the store ---


def test_list(ckptd, store):
    code, out, _ = ckptd("list", str(store))
    assert code == 0
    assert "100" in out
    assert "latest" in out
    assert "unfinished step 200: no votes" in out


def test_a_path_in_a_verb_may_begin_at_home_or_here(ckptd, store, monkeypatch):
    monkeypatch.setenv("HOME", os.path.dirname(store))
    monkeypatch.chdir(os.path.dirname(store))
    told = [ckptd("list", "--json", path)[1] for path in (str(store), "~/store", "store", "./store/../store")]
    assert told[1:] == told[:1] * 3
    assert json.loads(told[0])["jobs"][0]["store"] == str(store)


def test_list_json_of_a_job(ckptd, store):
    code, out, _ = ckptd("list", "--json", str(store / "job"))
    assert code == 0
    listing = json.loads(out)
    (job,) = listing["jobs"]
    assert (listing["schema"], job["job"], job["store"]) == (1, "job", str(store))
    (row,) = job["checkpoints"]
    assert (row["step"], row["latest"], row["nbytes"], row["world_size"]) == (100, True, 5, 1)
    assert row["committed_at"].endswith("+00:00")
    assert [partial["step"] for partial in job["partials"]] == [200]


def test_list_of_a_damaged_store(ckptd, store):
    (store / "job/step-000000100.i0001/COMMITTED").write_text("{}")
    code, out, _ = ckptd("list", str(store))
    assert code == 1
    assert "error:" in out


LOSSES = {110: 2.5, 120: 0.5, 130: None, 140: 1.5}  # 150 has none


@pytest.fixture
def said(store):
    """Steps with a loss, and a run's name of which a terminal shows nothing dangerous."""
    key = JobKey(str(store), "job")
    for counter, step in enumerate(range(110, 160, 10), 3):
        told = {"loss": LOSSES[step], "epoch": step // 50, "run": "a\x1b[1m" * 9} if step in LOSSES else {}
        put(key, SaveId(1, counter, step, RUN), lay.encode_leaves(lay.Leaves(lay.VERSION, {}, told)))
        commit(FileLayer(), key, SaveId(1, counter, step, RUN), "test")
    return store


def listed(ckptd, *args):
    code, out, _ = ckptd("list", "--json", *args)
    return code, {row["step"]: row["metadata"] for row in json.loads(out)["jobs"][0]["checkpoints"]}


def test_list_shows_what_trainings_said_of_their_saves(ckptd, said):
    code, out, _ = ckptd("list", str(said))
    assert code == 0
    lines = [line.split() for line in out.splitlines()]
    head = next(place for place, words in enumerate(lines) if words[:1] == ["step"])
    assert lines[head][:7] == ["step", "inc", "ranks", "size", "committed", "loss", "epoch"]
    assert [words[7:] for words in lines[head + 2 : head + 6]] == [
        ["1.5", "2"], ["not", "finite", "2"], ["0.5", "2"], ["2.5", "2"],
    ]  # fmt: skip
    assert "\x1b" not in out
    code, found = listed(ckptd, str(said))
    assert found[120] == {"loss": 0.5, "epoch": 2, "run": "a\x1b[1m" * 9}
    assert (found[130]["loss"], found[150]) == (None, {})


def test_list_in_the_order_of_a_key_and_those_alone_that_match(ckptd, said):
    assert list(listed(ckptd, "--sort", "loss", str(said))[1]) == [120, 140, 110, 150, 130, 100]
    assert list(listed(ckptd, "--sort", "loss:max", str(said))[1]) == [110, 140, 120, 150, 130, 100]
    assert list(listed(ckptd, "--where", "loss<2", str(said))[1]) == [140, 120]
    assert list(listed(ckptd, "--where", "loss < 2", "--where", "loss!=0.5", str(said))[1]) == [140]
    assert "none of 6 checkpoints is so" in ckptd("list", "--where", "loss<-1", str(said))[1]


@pytest.mark.parametrize(
    ("args", "what", "hint"),
    [
        (("--sort", "los"), "no checkpoint here has metadata 'los'", "did you mean loss?"),
        (("--where", "accuracy>1"), "no checkpoint here has metadata 'accuracy'", "there are epoch, loss, run"),
        (("--where", "loss"), "--where 'loss' compares nothing", "loss<1.5"),
    ],
)
def test_list_by_a_key_that_is_not_there(ckptd, said, args, what, hint):
    code, out, err = ckptd("list", *args, str(said))
    assert (code, out) == (2, "")
    assert what in err
    assert hint in err


# --- retention without a daemon ---


@pytest.fixture
def many(store):
    """Steps 100 to 150, of the job in the store."""
    key = JobKey(str(store), "job")
    for counter, step in enumerate(range(110, 160, 10), 3):
        save = SaveId(1, counter, step, RUN)
        put(key, save)
        commit(FileLayer(), key, save, "test")
    return store


def steps(store):
    """Committed ones that are there."""
    return sorted(int(name[5:14]) for name in os.listdir(store / "job") if name.startswith("step-"))


def test_prune_keeps_what_it_is_asked_to_keep_and_what_is_pinned(ckptd, many):
    code, out, _ = ckptd("pin", str(many / "job/step-000000110.i0001"))
    assert (code, out) == (0, f"{many}/job/step-000000110.i0001: pinned\n")
    args = ("prune", "--keep-last", "2", "--keep-every", "60", str(many))
    code, out, _ = ckptd(*args, "--dry-run")
    assert code == 0
    assert [step for step in range(100, 160, 10) if f"{step:09d}" in out] == [100, 130]
    assert "10 B in all; nothing was removed" in out
    assert steps(many) == [100, 110, 120, 130, 140, 150]
    code, out, _ = ckptd(*args, "--json")
    found = json.loads(out)
    assert (code, found["schema"], found["ok"]) == (0, 1, True)
    told = [(one["step"], one["removed"], one["nbytes"]) for one in found["checkpoints"]]
    assert told == [(100, True, 5), (130, True, 5)]
    assert steps(many) == [110, 120, 140, 150]
    assert ckptd(*args) == (0, "nothing to remove\n", "")
    assert ckptd("pin", "--remove", str(many / "job/step-000000110.i0001"))[0] == 0
    assert ckptd("prune", "--keep-last", "1", str(many / "job"))[0] == 0
    assert steps(many) == [150]
    assert [name for name in os.listdir(many / "job") if "trash" in name] == []


def test_prune_keeps_the_best(ckptd, said):
    args = ("prune", "--keep-last", "1", "--keep-best", "loss", "1", str(said))
    assert ckptd(*args, "--dry-run")[0] == 0
    assert steps(said) == [100, 110, 120, 130, 140, 150]
    assert ckptd(*args, "--keep-best", "loss:max", "1")[0] == 0
    assert steps(said) == [110, 120, 150], "the newest, the smallest and the largest"
    assert ckptd(*args)[0] == 0
    assert steps(said) == [120, 150]


@pytest.fixture
def another(said):
    """A job beside it, without metadata."""
    key = JobKey(str(said), "another")
    (said / "another").mkdir()
    for counter, step in enumerate((1, 2), 1):
        put(key, SaveId(1, counter, step, RUN))
        commit(FileLayer(), key, SaveId(1, counter, step, RUN), "test")
    return said / "another"


def test_prune_by_a_key_that_is_not_there_removes_nothing_of_any_job(ckptd, said, another):
    args = ("prune", "--keep-last", "1", "--keep-best")
    code, _, err = ckptd(*args, "los", "1", str(said))
    assert (code, err) == (2, "error: no checkpoint here has metadata 'los'\nhint: did you mean loss?\n")
    code, _, err = ckptd(*args, "loss", "1", str(another))
    assert (code, "no checkpoint of job another has metadata 'loss'" in err) == (2, True)
    assert len(steps(said)) == 6
    assert len(os.listdir(another)) == 3


def test_prune_by_a_key_that_one_job_does_not_have_names_that_job(ckptd, said, another):
    args = ("prune", "--keep-last", "1", "--keep-best", "loss", "1", str(said))
    told = "job another has no checkpoint with metadata 'loss': of it --keep-last and --keep-every alone decide"
    assert json.loads(ckptd(*args, "--dry-run", "--json")[1])["notes"] == [told]
    code, out, err = ckptd(*args)
    assert (code, err, f"note: {told}\n" in out) == (0, "", True)
    assert steps(said) == [120, 150]
    assert sorted(os.listdir(another)) == ["latest", SaveId(1, 2, 2, RUN).dirname]


def test_prune_takes_its_settings_from_where_the_daemon_does(ckptd, many, monkeypatch):
    monkeypatch.setenv("CKPTD_KEEP_LAST", "4")
    assert ckptd("prune", str(many))[0] == 0
    assert steps(many) == [120, 130, 140, 150]
    assert ckptd("prune", "--keep-last", "0", str(many))[0] == 2
    assert steps(many) == [120, 130, 140, 150]


def test_prune_says_what_it_could_not_remove(ckptd, many, monkeypatch):
    def refuse(src, dst, **_):
        raise PermissionError(13, "Permission denied", src)

    monkeypatch.setattr(os, "rename", refuse)
    code, out, _ = ckptd("prune", "--keep-last", "5", str(many))
    assert code == 1
    assert "not removed:" in out
    assert "Permission denied" in out
    assert len(steps(many)) == 6


def test_prune_says_what_it_could_not_look_at_and_what_it_left(ckptd, many, monkeypatch):
    (many / "job/step-000000140.i0001/COMMITTED").write_text("{}")
    code, out, _ = ckptd("prune", "--keep-last", "9", "--json", str(many))
    assert code == 1
    assert "step-000000140" in json.loads(out)["problems"][0]

    def refuse(self, path):
        raise OSError(16, "Device or resource busy", path)

    monkeypatch.setattr(FileLayer, "rmtree", refuse)
    code, out, _ = ckptd("prune", "--keep-last", "4", str(many))
    assert code == 1
    assert "problem: " in out
    assert ".trash-" in out


def test_prune_leaves_links_alone_that_a_daemon_may_be_making(ckptd, many):
    os.symlink("step-000000150.i0001", many / "job/.latest.tmp-0123456789ab")
    assert ckptd("prune", "--keep-last", "1", str(many))[0] == 0
    assert os.path.islink(many / "job/.latest.tmp-0123456789ab")


def test_pin_where_none_may_write_is_reported(ckptd, many, monkeypatch):
    def refuse(self, _temp, path):
        raise OSError(30, "Read-only file system", path)

    monkeypatch.setattr(FileLayer, "publish_once", refuse)
    code, out, err = ckptd("pin", str(many / "job/latest"))
    assert (code, out) == (1, "")
    assert "Read-only file system" in err


def test_pin_knows_latest_and_says_what_was_so_before(ckptd, many):
    for remove, changed in ((False, True), (False, False), (True, True), (True, False)):
        code, out, _ = ckptd("pin", "--json", *["--remove"] * remove, str(many / "job/latest"))
        found = json.loads(out)
        assert (code, found["changed"], found["pinned"]) == (0, changed, not remove)
        assert found["path"] == str(many / "job/step-000000150.i0001")
        if not remove:
            assert "latest, pinned" in ckptd("list", str(many))[1]
    assert "pinned" not in ckptd("list", str(many))[1]


@pytest.mark.parametrize("path", ["job", "job/step-000000777.i0001", "job/.step-000000200.i0001"])
def test_pin_of_what_is_no_committed_checkpoint(ckptd, many, path):
    code, out, err = ckptd("pin", str(many / path))
    assert (code, out) == (2, "")
    assert "hint: " in err


@pytest.mark.parametrize("verb", ["list", "verify", "prune"])
@pytest.mark.parametrize("path", ["", "none", "file"])
def test_a_path_with_nothing_in_it(ckptd, tmp_path, verb, path):
    (tmp_path / "file").touch()
    code, out, err = ckptd(verb, str(tmp_path / path))
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert "\nhint: " in err


def test_list_of_one_checkpoint_says_how_to_look_at_it(ckptd, store):
    code, _, err = ckptd("list", str(store / "job/step-000000100.i0001"))
    assert code == 2
    assert "hint: ckptd verify " in err


def test_verify_names_file_and_block(ckptd, store):
    image = store / "job/step-000000100.i0001" / file_name(0)
    image.write_bytes(b"imagf")
    code, out, _ = ckptd("verify", str(store))
    assert code == 1
    assert f"damaged: {image}: block 0 (bytes 0 to 4): digest does not match" in out


def test_verify_of_nothing_says_what_to_give(ckptd, tmp_path):
    code, _, err = ckptd("verify", str(tmp_path / "none"))
    assert code == 2
    assert err.startswith(f"error: nothing to verify in {tmp_path}/none: No such file or directory\n")
    assert "hint: give a store, a job's directory in it, a checkpoint, or an arena" in err


def test_verify_json(ckptd, store):
    code, out, _ = ckptd("verify", "--json", str(store))
    result = json.loads(out)
    assert result["schema"] == 1
    assert result["files"] == 1
    assert result["ok"] is (code == 0)


# --- the others ---


def test_doctor(ckptd, tmp_path):
    code, out, _ = ckptd("doctor", "--json", "--arena", str(tmp_path))
    found = json.loads(out)
    assert found["schema"] == 1
    verdicts = {finding["name"]: finding["verdict"] for finding in found["findings"]}
    assert verdicts["shared memory"] in {"ok", "warn", "bad"}
    assert code == int("bad" in verdicts.values())
    code, out, _ = ckptd("doctor", "--arena", str(tmp_path))
    assert "To try one:" in out


def test_run_gives_the_daemon_its_settings(ckptd, monkeypatch):
    configs = []
    daemon = SimpleNamespace(run=lambda config: configs.append(config) or 7)
    monkeypatch.setitem(sys.modules, "ckptd.daemon.serving", daemon)
    monkeypatch.setattr("ckptd.daemon.serving", daemon, raising=False)
    code, _, _ = ckptd("run", "--arena", "/x", "--budget-nbytes", "64G", "--no-exit-when-empty", "--keep-last", "5")
    assert code == 7
    (config,) = configs
    assert (config.arena, config.budget_nbytes, config.exit_when_empty, config.keep_last) == ("/x", 64 << 30, False, 5)


def test_run_with_a_setting_that_is_none(ckptd):
    code, _, err = ckptd("run", "--budget-nbytes", "much")
    assert code == 2
    assert "budget_nbytes='much' (from --budget-nbytes) is not allowed: it must be bytes, or a number with K," in err
    assert "hint: --budget-nbytes 64G" in err


def test_demo_is_the_client_s(ckptd, monkeypatch):
    ran = []
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr("os.execv", lambda path, argv: ran.append(argv))
    assert ckptd("demo", "--short", "extra")[0] == 0
    assert ran == [[sys.executable, "-m", "ckptd_client.demo", "--short", "extra"]]


def test_demo_without_torch(ckptd, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, _, err = ckptd("demo")
    assert code == 1
    assert err == "error: the demo needs torch, which is not installed\nhint: pip install 'ckptd[torch]'\n"
