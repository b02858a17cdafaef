"""The units are what systemd can read, and say what the rest of ckptd relies on."""

import configparser
import pathlib
import shutil
import subprocess

import pytest

UNITS = pathlib.Path(__file__).parents[2] / "systemd"
NAMES = ("ckptd@.service", "ckptd-user.service")


def parse(name):
    parser = configparser.RawConfigParser(strict=True, delimiters=("=",), comment_prefixes=("#",))
    parser.optionxform = str
    parser.read_string((UNITS / name).read_text())
    return parser


@pytest.mark.parametrize("name", NAMES)
def test_what_the_daemon_relies_on(name):
    unit = parse(name)
    service = unit["Service"]
    assert service["Type"] == "notify"
    assert service["NotifyAccess"] == "main"
    assert service["Restart"] == "on-failure"
    assert service["KillMode"] == "mixed"
    assert service["WatchdogSec"] == "30"
    assert service["ExecStart"] == "/usr/bin/env ckptd run"
    assert int(service["TimeoutStopSec"]) > 20, "longer than stop_drain_s"
    assert "MemoryMax" not in service
    assert unit.has_section("Install")


def test_the_system_unit_runs_as_its_user_and_spares_the_arena():
    service = parse("ckptd@.service")["Service"]
    assert service["User"] == "%i"
    assert service["EnvironmentFile"] == "-/etc/ckptd/%i.env"
    assert service["RemoveIPC"] == "no"
    assert service["LimitMEMLOCK"] == "infinity"
    assert service["NoNewPrivileges"] == "yes"
    for hides in ("PrivateTmp", "PrivateDevices", "ProtectHome", "PrivateUsers", "DynamicUser", "PrivateIPC"):
        assert hides not in service, "would hide the arena or the store"
    assert service["ProtectSystem"] == "full", "strict would make the store read-only"


def test_the_user_unit_asks_for_nothing_that_needs_root():
    service = parse("ckptd-user.service")["Service"]
    for privileged in ("User", "OOMScoreAdjust", "CapabilityBoundingSet", "LimitMEMLOCK", "ProtectKernelModules"):
        assert privileged not in service


@pytest.mark.parametrize(
    ("name", "copy"),
    [
        ("ckptd@.service", "ckptd@root.service"),
        ("ckptd-user.service", "ckptd.service"),
        ("ckptd-metrics@.service", "ckptd-metrics@root.service"),
    ],
)
def test_systemd_finds_no_fault(name, copy, tmp_path):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    unit = tmp_path / copy
    unit.write_bytes((UNITS / name).read_bytes())
    mode = ["--user"] if "user" in name else []
    command = ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", *mode, str(unit)]
    environ = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environ)
    complaints = [line for line in done.stderr.splitlines() if copy in line]
    assert done.returncode == 0, done.stderr
    assert complaints == []
