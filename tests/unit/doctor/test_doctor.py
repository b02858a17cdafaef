"""The judgements over made-up facts, the probes on this machine and on temporary directories."""

import os
import resource
import stat
import subprocess
import sys
import time

import pytest

from ckptd.arena.budget import Budget, Limit
from ckptd.doctor import probe, probe_store, rules, run
from ckptd.doctor.rules import ArenaFacts, StoreFacts, Verdict
from ckptd.shared.files.mounts import Mount
from ckptd.store.posix.probe import SAMPLE_NBYTES

GIB = 1 << 30
SHM = Mount("/", "/dev/shm", "tmpfs", ("rw", "size=16G"))
DISK = Mount("/", "/", "ext4", ("rw",))
NEVER = "always within_size advise [never] deny force\n"
RAN = StoreFacts(
    path="/pfs",
    doing="writing",
    finished=True,
    fs_type="lustre",
    free_nbytes=100 * GIB,
    fsync_s=0.002,
    rename_error="",
    direct_error="",
    read_error="",
    sample_nbytes=64 << 20,
    sample_s=0.05,
)


def huge(option):
    return Mount("/", "/dev/shm", "tmpfs", ("rw", f"huge={option}"))


def store(**changes):
    known = {name: getattr(RAN, name) for name in StoreFacts.__struct_fields__}
    return {finding.name: finding for finding in rules.judge_store(StoreFacts(**known | changes))}


@pytest.mark.parametrize(
    ("mount", "total", "ram", "verdict"),
    [
        (SHM, 16 * GIB, 32 * GIB, Verdict.OK),
        (SHM, 0, 32 * GIB, Verdict.OK),
        (SHM, 64 << 20, 32 * GIB, Verdict.WARN),
        (DISK, 500 * GIB, 32 * GIB, Verdict.BAD),
        (None, 0, 0, Verdict.BAD),
    ],
)
def test_shared_memory(mount, total, ram, verdict):
    found = rules.judge_shm(mount, total, ram)
    assert found.verdict == verdict
    assert bool(found.fix) == (verdict != Verdict.OK)


@pytest.mark.parametrize(
    ("mount", "enabled", "verdict"),
    [
        (SHM, NEVER, Verdict.WARN),
        (huge("never"), NEVER, Verdict.WARN),
        (huge("always"), NEVER, Verdict.OK),
        (huge("within_size"), NEVER, Verdict.OK),
        (huge("advise"), NEVER, Verdict.OK),
        (huge("always"), "always never [deny] force", Verdict.WARN),
        (SHM, "always never deny [force]", Verdict.OK),
        (SHM, "", Verdict.WARN),
        (DISK, NEVER, Verdict.WARN),
    ],
)
def test_huge_pages(mount, enabled, verdict):
    assert rules.judge_huge_pages(mount, enabled).verdict == verdict


def test_huge_page_advice_never_remounts_a_disk():
    assert "huge=within_size /dev/shm " in rules.judge_huge_pages(DISK, NEVER).fix


@pytest.mark.parametrize(("nbytes", "verdict"), [(8 * GIB, "ok"), (GIB // 2, "warn"), (1 << 20, "bad")])
def test_budget_names_the_limit_to_raise(nbytes, verdict):
    limit = Limit("memory.max of cgroup /x", nbytes, "raise it")
    found = rules.judge_budget(Budget(nbytes, (limit,)))
    assert found.verdict == verdict
    assert limit.name in found.detail
    assert found.fix == ("" if verdict == "ok" else "raise it")


def test_budget_without_limits():
    assert rules.judge_budget(Budget(0, ())).verdict == Verdict.WARN


def test_limits_of_the_process():
    assert rules.judge_memlock(None, None, GIB).verdict == Verdict.OK
    assert rules.judge_memlock(8 << 20, 8 << 20, 0).verdict == Verdict.OK
    assert "limits.d" in rules.judge_memlock(8 << 20, 8 << 20, GIB).fix
    assert rules.judge_memlock(8 << 20, None, GIB).fix.startswith("ulimit -l unlimited")
    assert rules.judge_files(1024, 4096).verdict == Verdict.OK
    assert rules.judge_files(256, 4096).fix == "ulimit -n 4096"
    assert "LimitNOFILE" in rules.judge_files(256, 256).fix
    assert rules.judge_populate(works=True, kernel="6.1").verdict == Verdict.OK
    assert rules.judge_populate(works=False, kernel="5.10").verdict == Verdict.WARN
    assert rules.judge_cpus(1).verdict == Verdict.WARN
    assert rules.judge_cpus(2).verdict == Verdict.OK


@pytest.mark.parametrize(
    ("texts", "removes"),
    [
        ([], True),
        (["[Login]\n#RemoveIPC=no\n"], True),
        (["[Login]\nRemoveIPC=no\n"], False),
        (["RemoveIPC=no", "[Login]\nRemoveIPC = yes\n"], True),
        (["RemoveIPC=yes", "RemoveIPC=off"], False),
    ],
)
def test_the_settings_of_logind(texts, removes):
    assert rules.removes_ipc(texts) is removes


@pytest.mark.parametrize(
    ("facts", "verdict"),
    [
        ({}, "bad"),
        ({"logind": False}, "ok"),
        ({"removes": False}, "ok"),
        ({"lingers": True}, "ok"),
        ({"uid": 0}, "ok"),
        ({"uid": 999}, "ok"),
        ({"arena": "/run/ckptd/ann"}, "ok"),
    ],
)
def test_remove_ipc(facts, verdict):
    threatened = {
        "arena": "/dev/shm/ckptd-1000",
        "logind": True,
        "removes": True,
        "lingers": False,
        "uid": 1000,
        "user": "ann",
    }
    found = rules.judge_remove_ipc(**threatened | facts)
    assert found.verdict == verdict
    assert ("enable-linger ann" in found.fix) == (verdict == "bad")


def test_drop_ins_apply_by_name_and_etc_hides_usr(tmp_path):
    for path, text in {
        "usr/lib/systemd/logind.conf": "RemoveIPC=vendor",
        "etc/systemd/logind.conf": "main",
        "usr/lib/systemd/logind.conf.d/20-b.conf": "hidden",
        "etc/systemd/logind.conf.d/20-b.conf": "second",
        "run/systemd/logind.conf.d/10-a.conf": "first",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    assert probe.logind_texts(str(tmp_path)) == ["main", "first", "second"]


@pytest.mark.parametrize(
    ("facts", "verdict", "said"),
    [
        ({"exists": False}, "ok", "does not exist yet"),
        ({"exists": False, "parent_writable": False}, "bad", "cannot be created"),
        ({}, "ok", "ours alone"),
        ({"owner": 7}, "bad", "belongs to user 7"),
        ({"mode": stat.S_IFDIR | 0o755}, "bad", "mode 0755"),
        ({"mode": stat.S_IFREG | 0o600}, "bad", "not a directory"),
        ({"mode": stat.S_IFLNK | 0o777}, "bad", "not a directory"),
    ],
)
def test_arena(facts, verdict, said):
    ours = {"path": "/dev/shm/a", "uid": 1000, "exists": True, "owner": 1000, "mode": stat.S_IFDIR | 0o700}
    found = rules.judge_arena(ArenaFacts(**ours | facts))
    assert found.verdict == verdict
    assert said in found.detail


def test_socket_path_counts_bytes():
    assert rules.judge_socket_path("/" + "x" * 106).verdict == Verdict.OK
    assert rules.judge_socket_path("/" + "x" * 107).verdict == Verdict.BAD
    assert rules.judge_socket_path("/" + "ä" * 54).verdict == Verdict.BAD


def test_a_good_store():
    assert {finding.verdict for finding in store().values()} == {Verdict.OK}
    assert "lfs quota -h -u $USER /pfs" in store()["store space"].detail


@pytest.mark.parametrize(
    ("changes", "name", "verdict"),
    [
        ({"finished": False}, "store", "bad"),
        ({"error": "No space left on device"}, "store", "bad"),
        ({"fs_type": "tmpfs"}, "store file system", "bad"),
        ({"fs_type": "ext4", "on_root": True}, "store file system", "warn"),
        ({"free_nbytes": GIB}, "store space", "warn"),
        ({"rename_error": "Invalid argument"}, "store rename", "bad"),
        ({"fsync_s": 0.5}, "store sync", "warn"),
        ({"direct_error": "Invalid argument"}, "store O_DIRECT", "warn"),
        ({"read_error": "Invalid argument"}, "store read", "bad"),
        ({"sample_s": 10.0}, "store speed", "warn"),
    ],
)
def test_a_store_with_one_fault(changes, name, verdict):
    found = store(**changes)[name]
    assert found.verdict == verdict
    assert found.fix


def test_no_store_is_no_fault_and_is_said():
    (found,) = rules.judge_store(None)
    assert (found.name, found.verdict) == ("store", Verdict.OK)
    assert "connect(store=...) names it. To try one: ckptd doctor --store DIR" in found.detail
    (found,) = rules.judge_store(None, ["/a", "/b"])
    assert "the daemon's jobs have /a, /b. To try one: ckptd doctor --store /a" in found.detail


def test_a_report_cut_short():
    facts = probe_store.parse_report(
        "/pfs", b'{"doing": "a"}\n{"fs_type": "nfs4", "free_nbytes": 1}\n{"doing": "b"}\n{"fsy'
    )
    assert facts == StoreFacts(path="/pfs", doing="b", fs_type="nfs4", free_nbytes=1)
    assert [finding.name for finding in rules.judge_store(facts)] == ["store", "store file system", "store space"]


def test_probing_a_real_store(tmp_path):
    facts = probe_store.probe_store(str(tmp_path))
    assert facts.finished
    assert facts.on_root == (os.stat(tmp_path).st_dev == os.stat("/").st_dev)
    assert facts.error == ""
    assert facts.rename_error == ""
    assert facts.sample_nbytes == SAMPLE_NBYTES
    assert facts.fsync_s is not None
    assert facts.free_nbytes
    assert list(tmp_path.iterdir()) == []


def test_a_store_that_is_not_there_yet_is_tried_in_the_directory_above(tmp_path):
    facts = probe_store.probe_store(str(tmp_path / "missing"))
    assert facts.finished
    first = rules.judge_store(facts)[0]
    assert first.verdict == Verdict.OK
    assert "is not there yet" in first.detail
    assert list(tmp_path.iterdir()) == []


def test_a_parent_that_is_missing_is_most_likely_a_mount(tmp_path):
    facts = probe_store.probe_store(str(tmp_path / "nope/deep/x"))
    (found,) = rules.judge_store(facts)
    assert found.verdict == Verdict.BAD
    assert found.detail == f"{tmp_path}/nope is missing: is it mounted?"
    assert list(tmp_path.iterdir()) == []


def test_a_hung_store_costs_the_deadline_only(tmp_path, monkeypatch):
    """A child that never returns stands in for a hung mount: only what it said before is known."""
    hung = tmp_path / "python"
    hung.write_text('#!/bin/sh\necho \'{"doing": "opening the directory"}\'\nexec sleep 600\n')
    hung.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(hung))
    start = time.monotonic()
    facts = probe_store.probe_store("/hung", deadline_s=0.5)
    assert time.monotonic() - start < 5
    assert facts == StoreFacts(path="/hung", doing="opening the directory")
    assert "opening the directory" in rules.judge_store(facts)[0].detail


def test_arena_facts(tmp_path):
    arena = tmp_path / "arena"
    assert not probe.arena_facts(str(arena)).exists
    arena.mkdir(mode=0o700)
    assert rules.judge_arena(probe.arena_facts(str(arena))).verdict == Verdict.OK
    link = tmp_path / "link"
    link.symlink_to(arena)
    assert rules.judge_arena(probe.arena_facts(str(link))).verdict == Verdict.BAD


def test_probes_of_this_machine():
    assert probe.meminfo()["MemTotal"] > 0
    assert probe.file_limits() == resource.getrlimit(resource.RLIMIT_NOFILE)
    assert probe.versions()["Python"]
    assert probe.mount_holding("/proc/self") == probe.mount_holding("/proc/1")
    assert probe.read_text("/nonexistent") == ""
    assert isinstance(probe.populate_works(), bool)


def test_examine_runs_everything(tmp_path):
    findings = run.examine(f"/dev/shm/ckptd-test-{os.getpid()}", str(tmp_path))
    names = [finding.name for finding in findings]
    assert len(names) == len(set(names))
    assert {"shared memory", "memory budget", "arena", "socket path", "store", "store speed", "versions"} <= set(names)
    assert all(finding.fix or finding.verdict == Verdict.OK for finding in findings)


def test_doctor_never_imports_torch():
    code = "import sys; sys.modules['torch'] = None; from ckptd.doctor.run import examine; examine('/dev/shm/ckptd-x')"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)
