"""The parallel file system of the machines: a GlusterFS volume of three replicas, mounted on all of them over FUSE."""

from collections.abc import Sequence

from tests.cluster import wait_for
from tests.machines.machine import Machine
from tests.machines.tree import USER

MOUNT = "/pfs"
STORE = f"{MOUNT}/{USER}"
_VOLUME = "pfs"


def create(bricks: Sequence[Machine]) -> None:
    """A volume over the disks of three machines, started. The bricks' servers are up when this returns."""
    for machine in bricks:
        machine.root_does("systemctl start glusterd")
    first = bricks[0]
    for other in bricks[1:]:
        first.root_does(f"gluster --mode=script peer probe {other.name}")
    wait_for(lambda: first.root_does("gluster pool list").count("Connected") == len(bricks), 20)
    where = " ".join(f"{machine.name}:/disk/brick" for machine in bricks)
    for line in (
        f"volume create {_VOLUME} replica {len(bricks)} {where} force",
        # A machine that is gone is given up after seconds, not after the 42 s of the default.
        f"volume set {_VOLUME} network.ping-timeout 5",
        f"volume start {_VOLUME}",
    ):
        first.root_does(f"gluster --mode=script {line}")


def mount(machine: Machine) -> None:
    """On one machine, and the user's store in it."""
    machine.root_does(f"mkdir -p {MOUNT} && mount -t glusterfs n1,n2,n3:/{_VOLUME} {MOUNT}")
    machine.root_does(f"install -d -o {USER} -g {USER} -m 700 {STORE}")


def take_brick(machine: Machine) -> None:
    """Kills the server of its brick."""
    machine.root_does("pkill -KILL -x glusterfsd")


def return_brick(machine: Machine) -> None:
    """Starts it again; returns when all clients of the volume see it."""
    machine.root_does(f"gluster --mode=script volume start {_VOLUME} force")
    wait_for(lambda: _is_whole(machine), 90, every_s=1)


def _is_whole(machine: Machine) -> bool:
    """Whether every brick is there; what changed a moment ago is always on some list of what is to be healed."""
    answer = machine.root_does(f"gluster volume heal {_VOLUME} info", check=False)
    bricks = [brick for brick in answer.split("Brick ") if "Status:" in brick]
    return bool(bricks) and all("Status: Connected" in brick for brick in bricks)


def hang(machine: Machine) -> None:
    """The file system's client process stops: every call into the mount waits."""
    machine.root_does(f"pkill -STOP -f 'glusterfs.*{MOUNT}$'")


def resume(machine: Machine) -> None:
    """It goes on."""
    machine.root_does(f"pkill -CONT -f 'glusterfs.*{MOUNT}$'")
