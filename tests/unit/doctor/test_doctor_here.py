"""``ckptd doctor`` under real conditions: small mounts, limits, cgroups, ports and keys, daemons of other versions."""

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ckptd.arena.ask import Daemon
from ckptd.peers.keys import make_keys, write_keys
from ckptd.shared.base.ids import JobKey
from ckptd.shared.protocol.topology import Rendezvous
from tests.cluster import ROOT, Node, wait_for
from tests.signals import resume, stop
from tests.unit.daemon.test_rank_gateway import Rank
from tests.unit.peers.test_daemon import ask_node

DOCTOR = f"{sys.executable} -m ckptd doctor --json"


def clean_environ(**more):
    kept = {k: v for k, v in os.environ.items() if not k.startswith("CKPTD_")}
    return kept | {"CKPTD_CONFIG": "/dev/null", "CKPTD_PEER_ADDRESS": "127.0.0.1"} | more


def doctor(shell=DOCTOR, **environ):
    """Exit code and findings by name of a shell command that ends with a doctor's report."""
    done = subprocess.run(
        ["sh", "-c", shell], env=clean_environ(**environ), cwd=ROOT, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    assert done.stdout, done.stderr
    found = {finding["name"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert all(finding["fix"] or finding["verdict"] == "ok" for finding in found.values())
    assert done.returncode == int(any(finding["verdict"] == "bad" for finding in found.values()))
    return done.returncode, found


def can_mount():
    done = subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False)
    return os.getuid() == 0 and done.returncode == 0


mounts = pytest.mark.skipif(not can_mount(), reason="mounting takes root and a mount namespace")


def mounted(directory, options):
    """A shell command that looks at an arena on a tmpfs of its own, which nobody else sees."""
    return f"unshare -m sh -c 'mount -t tmpfs -o {options} tmpfs {directory} && {DOCTOR} --arena {directory}/arena'"


@mounts
def test_a_shm_that_is_too_small(tmp_path):
    code, found = doctor(mounted(tmp_path, "size=16m"))
    assert code == 1
    assert (found["shared memory"]["verdict"], found["memory budget"]["verdict"]) == ("warn", "bad")
    assert f"{tmp_path}: 16.0 MiB" in found["shared memory"]["detail"]
    assert f"mount -o remount,size=75% {tmp_path}" in found["memory budget"]["fix"]


@mounts
def test_huge_pages_are_what_the_mount_says(tmp_path):
    _, found = doctor(mounted(tmp_path, "size=2g"))
    if found["huge pages"]["detail"].startswith("this kernel"):
        pytest.skip("a kernel without huge pages for tmpfs")
    assert found["huge pages"]["verdict"] == "warn"
    assert f"mount -o remount,huge=within_size {tmp_path}" in found["huge pages"]["fix"]
    _, found = doctor(mounted(tmp_path, "size=2g,huge=within_size"))
    assert found["huge pages"]["verdict"] == "ok"


def test_locked_memory_and_open_files_are_those_of_the_shell():
    _, found = doctor(f"ulimit -l 64 && ulimit -n 512 && {DOCTOR}")
    assert found["locked memory"]["detail"].startswith("64.0 KiB may be locked")
    assert found["open files"]["verdict"] == "warn"


@contextlib.contextmanager
def cgroup(limit_nbytes):
    """A memory cgroup below our own, of version 1 or 2, with this limit; the command that puts a shell into it."""
    for line in Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines():
        _, controllers, path = line.split(":", 2)
        for base in ("/sys/fs/cgroup", "/sys/fs/cgroup/memory"):
            file = "memory.max" if controllers == "" else "memory.limit_in_bytes"
            directory = f"{base}{path.rstrip('/')}/ckptd-test-{os.getpid()}"
            if controllers not in ("", "memory") or not os.access(os.path.dirname(directory), os.W_OK):
                continue
            try:
                os.mkdir(directory)
            except OSError:
                continue
            try:
                if os.path.exists(f"{directory}/{file}"):
                    with open(f"{directory}/{file}", "w", encoding="ascii") as limit:
                        limit.write(str(limit_nbytes))
                    yield directory, file
                    return
            finally:
                wait_for(lambda directory=directory: _removed(directory))
    pytest.skip("no memory cgroup may be made here")


def _removed(directory):
    with contextlib.suppress(OSError):
        os.rmdir(directory)
    return not os.path.exists(directory)


def test_a_cgroup_that_leaves_little():
    with cgroup(256 << 20) as (directory, file):
        _, found = doctor(f"echo $$ > {directory}/cgroup.procs && {DOCTOR} --arena /dev/shm/ckptd-test-none")
    assert found["cgroup"]["verdict"] == "warn"
    assert f"left below {file} of cgroup" in found["cgroup"]["detail"]
    assert found["memory budget"]["verdict"] in ("warn", "bad")
    assert f"{file} of cgroup" in found["memory budget"]["detail"]


def test_a_key_file_that_others_may_read_and_a_port_that_is_taken(tmp_path):
    key = str(tmp_path / "key.toml")
    write_keys(key, make_keys())
    assert doctor(CKPTD_KEY_FILE=key)[1]["keys"]["verdict"] == "ok"
    os.chmod(key, 0o644)
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, found = doctor(CKPTD_KEY_FILE=key, CKPTD_PEER_PORT=str(port), CKPTD_BULK_PORT="0")
    assert code == 1
    assert (found["keys"]["verdict"], found["peer port"]["verdict"]) == ("bad", "bad")
    assert f"chmod 600 {key}" in found["keys"]["fix"]
    assert "set peer_port to a free port" in found["peer port"]["fix"]


def test_an_arena_that_others_may_enter_and_a_store_in_memory():
    directory = f"/dev/shm/ckptd-test-{os.getpid()}"
    os.mkdir(directory, 0o755)
    try:
        code, found = doctor(f"{DOCTOR} --arena {directory} --store {directory}")
    finally:
        os.rmdir(directory)
    assert code == 1
    assert found["arena"]["fix"] == f"chmod 700 {directory}"
    assert (found["store file system"]["verdict"], found["store"]["verdict"]) == ("bad", "ok")


# --- daemons ---


def another_version(directory, version, protocol=None):
    """A copy of the daemon's code that calls itself another version."""
    shutil.copytree(os.path.join(ROOT, "ckptd"), directory / "ckptd", ignore=shutil.ignore_patterns("__pycache__"))
    change(directory / "ckptd" / "__init__.py", r'__version__ = ".*"', f'__version__ = "{version}"')
    if protocol is not None:
        change(directory / "ckptd" / "peers" / "packets.py", r"(?m)^VERSION = \d+$", f"VERSION = {protocol}")
    return str(directory)


def change(path, pattern, text):
    new, count = re.subn(pattern, text, path.read_text())
    assert count == 1
    path.write_text(new)


@pytest.fixture(name="pair")
def fixture_pair(tmp_path):
    """Two daemons; start(node, code) starts one, with the code of a directory."""
    store = tmp_path / "store"
    store.mkdir()
    with Node(str(store)) as one, Node(str(store)) as two:
        yield one, two


def a_job_on(nodes, store):
    """A rank on each, in one job; closed by the caller."""
    rendezvous = Rendezvous(ask_node(nodes[0]).peer, os.urandom(32))
    job = JobKey(str(store), "job")
    with ThreadPoolExecutor(len(nodes)) as pool:
        words = [(node, job, rank, len(nodes)) for rank, node in enumerate(nodes)]
        return list(pool.map(lambda word: Rank(*word, rendezvous=rendezvous), words))


def test_a_daemon_and_its_peer_of_another_version(pair, tmp_path):
    one, two = pair
    one.start(CKPTD_NODE="n1")
    two.start(CKPTD_NODE="n2", PYTHONPATH=another_version(tmp_path / "other", "0.0.9"))
    ranks = a_job_on(pair, one.store)
    try:
        _, found = doctor(CKPTD_ARENA=one.arena)
        assert found["daemon"]["verdict"] == "ok"
        assert found["peers of job"]["verdict"] == "warn"
        assert found["peers of job"]["detail"].startswith("version 0.0.9 on n2; here ")
        assert "restart its daemon" in found["peers of job"]["fix"]
        _, found = doctor(CKPTD_ARENA=two.arena)
        assert found["daemon"]["verdict"] == "warn"
        assert found["daemon"]["detail"].startswith("version 0.0.9 runs")
    finally:
        for rank in ranks:
            rank.close()


def test_a_peer_that_speaks_another_protocol_and_one_that_is_gone(pair, tmp_path):
    one, two = pair
    one.start(CKPTD_NODE="n1", CKPTD_PEER_TIMEOUT_S="1", CKPTD_REDUNDANCY="none")
    two.start(CKPTD_NODE="n2", CKPTD_PEER_TIMEOUT_S="1", CKPTD_REDUNDANCY="none")
    ranks = a_job_on(pair, one.store)
    try:
        assert doctor(CKPTD_ARENA=one.arena)[1]["peers of job"]["detail"].startswith("1 answer, all of version")
        two.kill()
        two.start(CKPTD_NODE="n2", PYTHONPATH=another_version(tmp_path / "other", "9.0", protocol=99))
        wait_for(
            lambda: "n2 (protocol 99, ckptd 9.0) cannot speak with this daemon" in " ".join(one.status().errors), 30
        )
        code, found = doctor(CKPTD_ARENA=one.arena)
        assert code == 1
        assert found["peers of job"]["verdict"] == "bad"
        assert "not heard of: n2" in found["peers of job"]["detail"]
        assert "install one version of ckptd on all nodes" in found["peers of job"]["detail"]
    finally:
        for rank in ranks:
            rank.close()


def test_a_daemon_that_hangs_is_found_and_costs_seconds(pair):
    one, _ = pair
    one.start(CKPTD_NODE="n1")
    stop(one.daemon.pid)
    try:
        began = time.monotonic()
        code, found = doctor(CKPTD_ARENA=one.arena)
        assert time.monotonic() - began < 30
        assert code == 1
        assert "did not answer in 5 s" in found["daemon"]["detail"]
    finally:
        resume(one.daemon.pid)
    wait_for(lambda: one.try_status() is not None)
    with Daemon(one.arena) as daemon:
        assert daemon.status(nodes=True).jobs == []
