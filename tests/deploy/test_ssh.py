"""deploy/ssh, by a real sshd on loopback with keys of its own; two addresses are two hosts."""

import getpass
import os
import shutil
import subprocess

import pytest

from tests.cluster import ROOT, wait_for
from tests.deploy.homes import Homes
from tests.ports import free_ports

SCRIPT = os.path.join(ROOT, "deploy/ssh/ckptd-hosts.sh")
SSHD = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:/sbin")
PRIVATE = "/run/sshd"  # where root's sshd puts what has no privileges, empty
ADDRESSES = {"n1": "127.0.0.2", "n2": "127.0.0.3"}
pytestmark = pytest.mark.skipif(
    SSHD is None or shutil.which("ssh-keygen") is None, reason="no sshd is installed (Debian: openssh-server)"
)


@pytest.fixture
def homes():
    with Homes("$TEST_HOST") as homes:
        yield homes


@pytest.fixture
def server(homes):
    """An sshd that serves n1 and n2, each with its own environment, and an ssh_config that knows them."""
    here, port = homes.where, free_ports(1)[0]
    for key in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", here / key], check=True, timeout=120)
    matches = "".join(
        f"Match LocalAddress {address}\n  SetEnv TEST_HOST={name} HOME={here} PATH={homes.bin}:/usr/bin:/bin\n"
        for name, address in ADDRESSES.items()
    )
    (here / "sshd_config").write_text(
        f"HostKey {here}/host\nAuthorizedKeysFile {here}/user.pub\nStrictModes no\nUsePAM no\nPidFile none\n"
        f"PasswordAuthentication no\nPermitRootLogin prohibit-password\n{matches}"
    )
    (here / "ssh_config").write_text(
        "".join(f"Host {name}\n  HostName {address}\n" for name, address in ADDRESSES.items())
        + f"Host *\n  Port {port}\n  User {getpass.getuser()}\n  IdentityFile {here}/user\n  IdentitiesOnly yes\n"
        f"  StrictHostKeyChecking accept-new\n  UserKnownHostsFile {here}/known_hosts\n  LogLevel ERROR\n"
    )
    made = os.geteuid() == 0 and not os.path.isdir(PRIVATE)
    if made:
        os.mkdir(PRIVATE, 0o755)
    listening = [word for address in ADDRESSES.values() for word in ("-o", f"ListenAddress={address}:{port}")]
    log = here / "sshd.log"
    daemon = subprocess.Popen([SSHD, "-D", "-f", here / "sshd_config", "-E", log, *listening])
    try:
        wait_for(lambda: log.exists() and log.read_text().count("listening on") == len(ADDRESSES))
        yield log
    finally:
        daemon.terminate()
        daemon.wait(60)
        if made:
            os.rmdir(PRIVATE)


def on_hosts(homes, *words):
    environ = homes.environ(SSH_OPTIONS=f"-F {homes.where}/ssh_config", REMOTE_PATH=str(homes.bin))
    return subprocess.run([SCRIPT, *words], env=environ, capture_output=True, text=True, timeout=120, check=False)


def test_daemons_outlive_the_session_that_started_them(homes, server):
    started = on_hosts(homes, "start", "n1", "n2")
    assert started.returncode == 0, started.stdout + started.stderr + server.read_text()
    assert sorted(started.stdout.splitlines()) == ["n1: started", "n2: started"]
    pids = homes.arenas()
    assert None not in pids.values()
    assert sorted(on_hosts(homes, "start", "n1", "n2").stdout.splitlines()) == ["n1: runs already", "n2: runs already"]
    shown = on_hosts(homes, "status", "n1", "n2")
    assert f"n1: arena   {homes.shm}/n1" in shown.stdout
    assert f"n2: arena   {homes.shm}/n2" in shown.stdout
    stopped = on_hosts(homes, "stop", "n1")
    assert stopped.returncode == 0, stopped.stdout
    assert homes.arenas() == {"n1": None, "n2": pids["n2"]}
    half = on_hosts(homes, "status", "n1", "n2")
    assert half.returncode == 1, "one of them has none"
    assert "n1: error: no daemon" in half.stdout
    assert on_hosts(homes, "stop", "n2").returncode == 0
    assert (homes.where / ".ckptd.log").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("words", [[], ["start"], ["strat", "n1"]])
def test_what_is_no_command_learns_how_to_type_one(homes, words):
    done = on_hosts(homes, *words)
    assert done.returncode == 2
    assert "ckptd-hosts.sh start node1 node2" in done.stderr
    assert "verb=" not in done.stderr
