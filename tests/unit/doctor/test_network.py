"""A faster interface than the one in use: found among interfaces as the kernel shows them."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from ckptd.doctor.network import Interface, interfaces, judge_network
from ckptd.doctor.rules import Verdict
from tests.cluster import ROOT

SLOW = Interface(name="eth0", mbit_s=1000, addresses=("10.0.0.1",))
FAST = Interface(name="ib0", mbit_s=200_000, addresses=("10.1.0.1", "fd00::1"))


def sysfs(root, **found):
    """A sysfs with these interfaces: name -> (operstate, speed, whether it is a device)."""
    for name, (state, speed, real) in found.items():
        at = root / "class/net" / name
        at.mkdir(parents=True)
        (at / "operstate").write_text(f"{state}\n")
        (at / "type").write_text("772\n" if name == "lo" else "1\n")
        if speed is not None:
            (at / "speed").write_text(f"{speed}\n")
        if real:
            (at / "device").mkdir()
    return str(root)


@pytest.mark.parametrize("host", ["10.0.0.1", "eth0"])
def test_a_faster_one_that_is_up_and_has_an_address_is_named_with_what_to_set(host):
    found = judge_network(host, [SLOW, FAST])
    assert (found.verdict, found.detail) == (
        Verdict.WARN, "peers use eth0 (1 Gbit/s), and ib0 is up with 200 Gbit/s"
    )  # fmt: skip
    assert found.fix.startswith("CKPTD_PEER_ADDRESS=ib0 on all nodes")


@pytest.mark.parametrize("host", ["10.1.0.1", "fd00:0::1", "ib0"])
def test_the_fastest_is_fine(host):
    found = judge_network(host, [SLOW, FAST])
    assert (found.verdict, found.detail) == (Verdict.OK, "ib0, 200 Gbit/s: no faster interface is up")


@pytest.mark.parametrize(
    "found",
    [
        [SLOW, Interface(name="ib0", mbit_s=200_000, addresses=())],
        [SLOW, Interface(name="ib0", mbit_s=None, addresses=("10.1.0.1",))],
        [Interface(name="eth0", mbit_s=None, addresses=("10.0.0.1",)), FAST],
        [FAST],
    ],
)
def test_what_is_not_known_is_no_warning(found):
    assert judge_network("10.0.0.1", found).verdict == Verdict.OK


def test_interfaces_are_those_that_are_up_and_real(tmp_path):
    root = sysfs(
        tmp_path, lo=("unknown", None, False), eth0=("up", 1000, True), eth1=("down", 100_000, True),
        docker0=("up", 10_000, False), bond0=("up", 50_000, False), eth2=("up", -1, True),
    )  # fmt: skip
    (tmp_path / "class/net/bond0/bonding").mkdir()
    assert [(one.name, one.mbit_s) for one in interfaces(root)] == [("bond0", 50_000), ("eth0", 1000), ("eth2", None)]


def test_infiniband_says_its_rate_elsewhere(tmp_path):
    root = sysfs(tmp_path, ib0=("up", None, True))
    port = tmp_path / "class/net/ib0/device/infiniband/mlx5_0/ports/1"
    port.mkdir(parents=True)
    (port / "rate").write_text("200 Gb/sec (4X HDR)\n")
    assert interfaces(root)[0].mbit_s == 200_000


def can_unshare():
    if os.geteuid() != 0 or shutil.which("unshare") is None or shutil.which("ip") is None:
        return False
    made = "unshare --net sh -c 'ip link add one0 type veth peer name one1'"
    return subprocess.run(["sh", "-c", made], capture_output=True, check=False).returncode == 0


@pytest.mark.process
@pytest.mark.skipif(not can_unshare(), reason="takes root, iproute2 and a network namespace")
def test_addresses_are_found_on_real_interfaces(tmp_path):
    """Interfaces of a network namespace; their speeds, which no virtual one has, stand in a directory."""
    root = sysfs(tmp_path, slow0=("up", 1000, True), fast0=("up", 100_000, True))
    steps = (
        "ip link add {0} type veth peer name {0}-end", "ip link set {0}-end up", "ip addr add {1}/24 dev {0}",
        "ip addr add {2}/64 dev {0} nodad", "ip link set {0} up",
    )  # fmt: skip
    named = (("slow0", "10.7.0.1", "fd07::1"), ("fast0", "10.8.0.1", "fd08::1"))
    made = " && ".join(step.format(*one) for one in named for step in steps)
    code = (
        "import json, sys; from ckptd.doctor.network import interfaces, judge_network\n"
        "found = interfaces(sys.argv[1])\n"
        "told = [judge_network(host, found) for host in ('10.7.0.1', 'fd07::1', '10.8.0.1')]; "
        "print(json.dumps([[list(one.addresses) for one in found], [[t.verdict, t.fix[:25]] for t in told]]))"
    )
    command = ["unshare", "--net", "sh", "-c", f'{made} && exec "$0" "$@"', sys.executable, "-c", code, root]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    addresses, told = json.loads(done.stdout)
    assert addresses == [["10.8.0.1", "fd08::1"], ["10.7.0.1", "fd07::1"]]
    assert told == [["warn", "CKPTD_PEER_ADDRESS=fast0 "]] * 2 + [["ok", ""]]
