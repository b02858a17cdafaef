"""One machine: systemd as its first process, in namespaces of its own, from an overlay that is its disk."""

import os
import shutil
import signal
import subprocess

from tests.cluster import wait_for
from tests.machines.network import Network
from tests.machines.tree import USER

_BOOT_S = 60
_CGROUPS_1 = "/sys/fs/cgroup/memory"  # where the memory controller is one of version 1
_MEMORY = "/memory-cgroup"  # where a machine finds the cgroup that it has there


class Machine:
    """Number index of the network. ``layers``: its trees, topmost first; ``directory``: for what it writes and says."""

    def __init__(self, network: Network, index: int, layers: list[str], directory: str) -> None:
        self.name = f"n{index}"
        self.index = index
        self.address = network.address(index)
        self._network = network
        self._layers = layers
        self._directory = os.path.join(directory, self.name)
        self.disk = os.path.join(self._directory, "disk")  # survives what happens to the machine: a brick lies here
        self.root = os.path.join(self._directory, "root")
        self._nspawn: subprocess.Popen[bytes] | None = None
        os.makedirs(self.disk)

    # --- power

    def boot(self) -> None:
        """From an empty overlay: what an earlier life wrote is gone, but for its disk. Returns when systemd is up."""
        upper, work = (os.path.join(self._directory, part) for part in ("upper", "work"))
        for path in (upper, work, self.root):
            shutil.rmtree(path, ignore_errors=True)
            os.makedirs(path)
        os.makedirs(os.path.join(upper, "etc"))
        with open(os.path.join(upper, "etc", "hostname"), "w") as file:
            file.write(f"{self.name}\n")
        options = f"lowerdir={':'.join(self._layers)},upperdir={upper},workdir={work}"
        subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, self.root], check=True)
        command = ["setpriv", "--pdeathsig=KILL", "systemd-nspawn", "--quiet", "--register=no", "--keep-unit", "--boot"]
        command += [f"--directory={self.root}", f"--machine={self._network.namespace(self.index)}"]
        command += [f"--hostname={self.name}", "--console=pipe", "--bind=/dev/fuse", f"--bind={self.disk}:/disk"]
        command += [f"--network-namespace-path=/run/netns/{self._network.namespace(self.index)}"]
        if os.path.isdir(_CGROUPS_1):
            os.makedirs(self._cgroup, exist_ok=True)
            command.append(f"--bind={self._cgroup}:{_MEMORY}")
        with open(os.path.join(self._directory, "console.log"), "ab") as console:
            self._nspawn = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
                start_new_session=True,
                # The machines' own systemd manages version 2 alone, also where the machine out here still mixes both.
                env=os.environ | {"SYSTEMD_NSPAWN_UNIFIED_HIERARCHY": "1"},
            )
        wait_for(lambda: self.root_does("systemctl is-system-running", check=False) in {"running", "degraded"}, _BOOT_S)
        self.root_does("systemctl start ssh")

    def power_off(self) -> None:
        """As when the cable is pulled: nothing on it gets to say a word."""
        if self._nspawn is not None:
            leader = self._leader()
            if leader:
                os.kill(leader, signal.SIGKILL)
            else:
                self._nspawn.kill()
            self._nspawn.wait(20)
            self._nspawn = None
        subprocess.run(["umount", "-l", self.root], check=False, stderr=subprocess.DEVNULL)
        if os.path.isdir(self._cgroup):
            os.rmdir(self._cgroup)

    def _leader(self) -> int:
        """Its first process, as it is numbered out here; 0 while there is none."""
        if self._nspawn is None or self._nspawn.poll() is not None:
            return 0
        with open(f"/proc/{self._nspawn.pid}/task/{self._nspawn.pid}/children") as file:
            children = file.read().split()
        return int(children[0]) if children else 0

    @property
    def _cgroup(self) -> str:
        return os.path.join(_CGROUPS_1, self._network.namespace(self.index))

    # --- what is done on it

    def root_does(self, script: str, *, check: bool = True, timeout_s: float = 60) -> str:
        """What a shell script prints that root runs on it."""
        leader = self._leader()
        if not leader:
            assert not check, f"{self.name} is off"
            return ""
        command = ["nsenter", f"--target={leader}", "--mount", "--uts", "--ipc", "--net", "--pid", "--cgroup", "--root"]
        clean = {"PATH": "/opt/ckptd/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root"}
        return _output([*command, "bash", "-c", f"cd /\n{script}"], check=check, timeout_s=timeout_s, env=clean)

    def login(self, script: str) -> list[str]:
        """The command that logs the user in from out here and runs script: a session as people have."""
        key = os.path.join(self.root, "home", USER, ".ssh", "id_ed25519")
        options = ["-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null", "-o", "LogLevel=ERROR"]
        options += ["-o", "ServerAliveInterval=10", "-o", "ServerAliveCountMax=6", "-o", "ConnectTimeout=10"]
        ssh = ["ip", "netns", "exec", self._network.hub, "ssh", "-i", key, *options, f"{USER}@{self.address}"]
        return [*ssh, f"bash -lc {_quoted(script)}"]

    def user_does(self, script: str, *, check: bool = True, timeout_s: float = 60) -> str:
        """What a shell script prints that the user runs in a session of its own."""
        return _output(self.login(script), check=check, timeout_s=timeout_s)

    def limit_memory(self, unit: str, nbytes: int) -> None:
        """The unit's processes, and what memory they touch from now on, may be no more than that; 0: no limit.

        Where the controller is of version 1 the machines' systemd does not have it: the same is done by hand.
        """
        if not os.path.isdir(_CGROUPS_1):
            self.root_does(f"systemctl set-property --runtime {unit} MemoryMax={nbytes or 'infinity'}")
            return
        main = f"$(systemctl show -p MainPID --value {unit})"
        self.root_does(f"echo {nbytes or -1} > {_MEMORY}/memory.limit_in_bytes; echo {main} > {_MEMORY}/cgroup.procs")


def _output(command: list[str], *, check: bool, timeout_s: float, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False, env=env)
    if check:
        assert done.returncode == 0, f"{command[-1]}: {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout.strip()


def _quoted(script: str) -> str:
    return "'" + script.replace("'", "'\\''") + "'"
