"""Another user of the machine, a real one, and a daemon: reads nothing, asks nothing, ends nothing, squats nothing."""

import ctypes
import errno
import os
import pathlib
import shutil
import signal
import socket
import stat
import sys
import tempfile

import pytest
import torch

import ckptd_client
from ckptd.arena.ask import ask_status
from ckptd.shared.base.errors import CkptdError, ConfigError
from ckptd.shared.format import arena_paths
from tests import pythons
from tests.cluster import Node, wait_for
from tests.security.others import STRANGER, as_user, errno_of, needs_root

pytestmark = [needs_root, pytest.mark.faults]
REFUSED = {errno.EACCES, errno.EPERM}


@pytest.fixture(name="node", scope="module")
def fixture_node(tmp_path_factory):
    """With a job that has staged and drained something."""
    with Node(str(tmp_path_factory.mktemp("store"))) as node:
        node.start()
        with pytest.MonkeyPatch.context() as patch:
            for name in ("WORLD_SIZE", "RANK"):
                patch.delenv(name, raising=False)
            client = ckptd_client.connect("job", store=node.store, arena=node.arena, start=False)
            client.save({"w": torch.ones(1000)}, 1).wait("durable", 60)
            yield node
            client.close()


def attempts_on_files(arena, slot):
    lock = os.path.join(arena, arena_paths.LOCK)
    return {
        "list": errno_of(os.listdir, arena),
        "enter": errno_of(os.chdir, arena),
        "read a slot": errno_of(os.open, slot, os.O_RDONLY),
        "write a slot": errno_of(os.open, slot, os.O_RDWR),
        "look at a slot": errno_of(os.stat, slot),
        "link a slot": errno_of(os.link, slot, f"{arena}-link"),
        "read the identity": errno_of(os.open, os.path.join(arena, arena_paths.IDENTITY), os.O_RDONLY),
        "read the log": errno_of(os.open, os.path.join(arena, arena_paths.LOG), os.O_RDONLY),
        "take the lock": errno_of(os.open, lock, os.O_RDWR),
        "remove the lock": errno_of(os.unlink, lock),
        "make a file": errno_of(os.open, os.path.join(arena, "new"), os.O_WRONLY | os.O_CREAT),
        "move the arena away": errno_of(os.rename, arena, f"{arena}-gone"),
        "open it up": errno_of(os.chmod, arena, 0o777),
        "through a descriptor": errno_of(os.listdir, f"/proc/self/fd/{os.open(arena, os.O_PATH)}"),
    }


def test_no_file_of_an_arena_can_be_reached(node):
    found = as_user(attempts_on_files, node.arena, node.slots()[0])
    assert {what for what, error in found.items() if error not in REFUSED} == set()


def knock(path):
    with socket.socket(socket.AF_UNIX) as made:
        return errno_of(made.connect, path)


def test_the_socket_takes_no_connection_and_has_no_other_name(node):
    assert as_user(knock, os.path.join(node.arena, arena_paths.SOCKET)) == errno.EACCES
    with open("/proc/net/unix") as file:
        names = [words[7] for words in map(str.split, file) if len(words) > 7]
    assert [name for name in names if name.startswith("@") and "ckptd" in name] == []


def attempts_on_processes(pids):
    libc = ctypes.CDLL(None, use_errno=True)
    found = {}
    for pid in pids:
        for name in ("mem", "environ", "maps", "io"):
            found[f"{name} of {pid}"] = errno_of(pathlib.Path(f"/proc/{pid}/{name}").read_bytes)
        found[f"fd of {pid}"] = errno_of(os.listdir, f"/proc/{pid}/fd")
        found[f"root of {pid}"] = errno_of(os.readlink, f"/proc/{pid}/root")
        for number in (0, signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP):
            found[f"signal {int(number)} to {pid}"] = errno_of(os.kill, pid, number)
        found[f"trace {pid}"] = ctypes.get_errno() if libc.ptrace(16, pid, 0, 0) else 0
    return found


def test_daemon_and_worker_are_neither_read_nor_signalled(node):
    status = node.status()
    found = as_user(attempts_on_processes, [status.pid, status.workers[0].pid])
    assert {what for what, error in found.items() if error not in REFUSED} == set()
    assert node.daemon.poll() is None


def test_nothing_secret_stands_in_a_command_line(node):
    """Which everybody may read: of the daemon, of its worker."""
    with open(os.path.join(node.arena, arena_paths.IDENTITY), "rb") as file:
        identity = file.read()
    status = node.status()
    for pid in (status.pid, status.workers[0].pid):
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read().split(b"\0")
        assert not [word for word in words if len(word) >= 40 and word in identity]


# --- squatters: /dev/shm belongs to everybody, and the name of an arena can be guessed

KINDS = ("directory", "open directory", "link to their directory", "link to ours", "file", "pipe", "socket")


def squat(path, ours, kind):
    match kind:
        case "directory":
            os.mkdir(path, 0o700)
        case "open directory":
            os.mkdir(path)
            os.chmod(path, 0o777)  # noqa: S103 - as they would
        case "link to their directory":
            os.mkdir(f"{path}-theirs")
            os.chmod(f"{path}-theirs", 0o777)  # noqa: S103 - as they would
            os.symlink(f"{path}-theirs", path)
        case "link to ours":
            os.symlink(ours, path)
        case "file":
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o666))
        case "pipe":
            os.mkfifo(path)
        case "socket":
            with socket.socket(socket.AF_UNIX) as made:
                made.bind(path)


@pytest.fixture(name="squatted", params=KINDS)
def fixture_squatted(request):
    """A path below /dev/shm that the other user was first at."""
    ours = tempfile.mkdtemp(prefix="ckptd-test-", dir="/dev/shm")
    path = f"{ours}-squatted"
    as_user(squat, path, ours, request.param)
    yield path
    shutil.rmtree(ours)
    for made in (path, f"{path}-theirs"):
        if os.path.isdir(made) and not os.path.islink(made):
            shutil.rmtree(made)
        elif os.path.lexists(made):
            os.unlink(made)


def test_a_squatted_arena_is_refused_by_daemon_and_client_and_left_as_it_is(squatted, tmp_path):
    with pytest.raises(ConfigError, match="must be a directory of uid 0 with mode 0700") as caught:
        ckptd_client.connect("job", store=str(tmp_path), arena=squatted)
    assert "CKPTD_ARENA" in caught.value.hint
    words = [sys.executable, "-m", "ckptd", "run", "--arena", squatted]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("CKPTD_")}
    done = pythons.run(words, capture_output=True, text=True, timeout=120, check=False, env=clean)
    assert done.returncode == 2, done.stderr
    assert "must be a directory of uid 0" in done.stderr
    assert os.lstat(squatted).st_uid == STRANGER
    inside = squatted if os.path.isdir(squatted) else f"{squatted}-theirs"
    assert not os.path.isdir(inside) or os.listdir(inside) == []


def what_the_command_line_says(arena):
    try:
        ask_status(arena, 2.0)
    except CkptdError as error:
        return error.message
    return "answered"


def test_a_daemon_in_an_arena_of_another_user_is_asked_nothing(node):
    """Even if it lets everybody in, as one that waits for this user's questions would."""
    assert "belongs to somebody else" in as_user(what_the_command_line_says, node.arena)
    opened = [os.path.join(node.arena, name) for name in (arena_paths.LOCK, arena_paths.SOCKET)]
    before = {path: stat.S_IMODE(os.stat(path).st_mode) for path in (node.arena, *opened)}
    try:
        for path in before:
            os.chmod(path, 0o777)  # noqa: S103 - as they would
        assert "belongs to somebody else" in as_user(what_the_command_line_says, node.arena)
    finally:
        for path, mode in before.items():
            os.chmod(path, mode)


# --- files elsewhere


def modes(directory):
    found = set()
    for above, folders, names in os.walk(directory):
        paths = [os.path.join(above, name) for name in (*folders, *names)]
        found |= {stat.S_IMODE(os.lstat(path).st_mode) for path in paths if not os.path.islink(path)}
    return found


def test_a_umask_closes_the_store_to_others_also_while_it_is_drained_to(tmp_path, monkeypatch):
    for name in ("WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    store = tmp_path / "store"
    store.mkdir()
    before = os.umask(0o077)
    try:
        with Node(str(store)) as node:
            node.log = str(tmp_path / "log")
            node.start("--drain-bandwidth", "4M")
            client = ckptd_client.connect("job", store=str(store), arena=node.arena, start=False)
            handle = client.save({"w": torch.ones(1 << 20)}, 1)
            wait_for(lambda: [name for name in os.listdir(store / "job") if name.startswith(".step")])
            assert modes(store) <= {0o700, 0o600}
            handle.wait("durable", 60)
            node.complete(sys.executable, "-m", "ckptd", "pin", str(store / "job/step-000000001.i0001"), timeout_s=30)
            assert modes(store) == {0o700, 0o600}
            client.close()
    finally:
        os.umask(before)


def test_keys_are_for_their_owner_alone_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        path = tmp_path / "keys"
        pythons.run([sys.executable, "-m", "ckptd", "keygen", str(path)], check=True, capture_output=True, timeout=120)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
