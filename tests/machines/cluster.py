"""Four machines, their network and their file system, as a context that leaves nothing behind."""

import contextlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator

from tests.machines import filesystem, tree
from tests.machines.machine import Machine
from tests.machines.network import Network

COUNT = 4
_BRICKS = 3  # the fourth machine may be lost whole, disk and all
_DIRECTORIES = "/var/tmp"  # overlays need a real disk: /tmp may be one itself
_PREFIX = "ckptd-machines-"
SETTINGS = {"CKPTD_STORE": filesystem.STORE, "CKPTD_PEER_TIMEOUT_S": "5"}


class Machines:
    """All of them, by name or by number from 1."""

    def __init__(self, network: Network, machines: list[Machine]) -> None:
        self.network = network
        self.all = machines

    def __getitem__(self, number: int) -> Machine:
        return self.all[number - 1]

    def start_daemons(self) -> None:
        """By the unit, as an administrator does."""
        for machine in self.all:
            furnish_user(machine)


def furnish_user(machine: Machine) -> None:
    """What the documents tell an administrator to do for a user, once per machine."""
    machine.root_does(f"loginctl enable-linger {tree.USER}")
    machine.root_does(f"systemctl enable -q --now ckptd@{tree.USER}")


@contextlib.contextmanager
def booted(count: int = COUNT) -> Iterator[Machines]:
    """Machines with the file system mounted and a daemon each, from this checkout."""
    sweep()
    below = tree.base()
    directory = tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=_DIRECTORIES)
    name = f"ckptd-{os.getpid()}"
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, directory)
        network = stack.enter_context(Network(name, count))
        layer = _furnished(below, directory, network)
        machines = []
        for index in range(1, count + 1):
            machine = Machine(network, index, [layer, below], directory)
            stack.callback(machine.power_off)
            machines.append(machine)
        for machine in machines:
            machine.boot()
        filesystem.create(machines[:_BRICKS])
        for machine in machines:
            filesystem.mount(machine)
        cluster = Machines(network, machines)
        cluster.start_daemons()
        yield cluster


def _furnished(below: str, directory: str, network: Network) -> str:
    """The layer of this run: what is under test."""
    layer, work, merged = (os.path.join(directory, part) for part in ("layer", "work", "merged"))
    for path in (layer, work, merged):
        os.makedirs(path)
    options = f"lowerdir={below},upperdir={layer},workdir={work}"
    subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, merged], check=True)
    try:
        tree.furnish(merged, {f"n{i}": network.address(i) for i in range(1, network.count + 1)}, SETTINGS)
    finally:
        subprocess.run(["umount", merged], check=True)
    return layer


def sweep() -> None:
    """Removes what a run left that was killed: its mounts, namespaces and directory. Its machines died with it."""
    for name in os.listdir(_DIRECTORIES):
        found = re.match(rf"{_PREFIX}(\d+)-", name)
        if found is None or os.path.exists(f"/proc/{found.group(1)}"):
            continue
        directory = os.path.join(_DIRECTORIES, name)
        with open("/proc/self/mounts") as file:
            mounts = [line.split()[1] for line in file if line.split()[1].startswith(directory)]
        for mount in reversed(mounts):
            subprocess.run(["umount", "-l", mount], check=True)
        for namespace in os.listdir("/run/netns"):
            if namespace.startswith(f"ckptd-{found.group(1)}-"):
                subprocess.run(["ip", "netns", "del", namespace], check=True)
        shutil.rmtree(directory)
