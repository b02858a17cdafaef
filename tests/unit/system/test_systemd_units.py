"""The units are what systemd can read, and say what the rest of ckptd relies on."""

import configparser
import pathlib
import re
import shutil
import signal
import socket
import subprocess

import pytest

from ckptd.cli import scrub
from ckptd.system.config import FOREIGN_VARIABLES, PREFIX, Config, load_config
from tests.cluster import Node

UNITS = pathlib.Path(__file__).parents[3] / "systemd"
NAMES = ("ckptd@.service", "ckptd-user.service")
INSTANCES = {
    "ckptd@.service": "ckptd@root.service",
    "ckptd-user.service": "ckptd.service",
    "ckptd-metrics@.service": "ckptd-metrics@root.service",
    "ckptd-scrub@.service": "ckptd-scrub@root.service",
    "ckptd-scrub@.timer": "ckptd-scrub@root.timer",
    "run-ckptd.mount": "run-ckptd.mount",
}
MAX_EXPOSURE = 2.5
needs_analyze = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed (Debian: systemd)"
)


def parse(name):
    """Sections of a unit; a key that stands twice keeps the last value."""
    parser = configparser.RawConfigParser(strict=False, delimiters=("=",), comment_prefixes=("#",))
    parser.optionxform = str
    parser.read_string((UNITS / name).read_text())
    return parser


def assignments(name):
    """Lines of a file in the form of an environment file."""
    lines = [line for line in (UNITS / name).read_text().splitlines() if line and not line.startswith("#")]
    return dict(line.split("=", 1) for line in lines)


def tmpfiles():
    """Fields of the lines of tmpfiles.conf."""
    lines = (UNITS / "tmpfiles.conf").read_text().splitlines()
    return [line.split() for line in lines if line and not line.startswith("#")]


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
    assert int(service["TimeoutStopSec"]) > Config().stop_drain_s
    assert "MemoryMax" not in service
    assert unit.has_section("Install")


def test_the_system_unit_runs_as_its_user_and_spares_the_arena():
    service = parse("ckptd@.service")["Service"]
    assert service["User"] == "%i"
    assert service["EnvironmentFile"] == "-/etc/ckptd/%i.env"
    assert service["RemoveIPC"] == "no"
    assert service["LimitMEMLOCK"] == "infinity"
    for hides in ("PrivateTmp", "ProtectHome", "PrivateUsers", "DynamicUser", "PrivateIPC", "ProcSubset"):
        assert hides not in service, "would hide the arena, the store, or what memory there is"
    assert service["ProtectSystem"] == "full", "strict would make the store read-only"


def test_the_user_unit_asks_for_nothing_that_needs_root():
    service = parse("ckptd-user.service")["Service"]
    for privileged in ("User", "OOMScoreAdjust", "CapabilityBoundingSet", "LimitMEMLOCK"):
        assert privileged not in service
    assert not [key for key in service if key.startswith(("Private", "Protect", "Device"))], "wants a mount namespace"


def test_the_scrub_is_what_the_command_line_takes_and_writes_where_stores_are():
    service = parse("ckptd-scrub@.service")["Service"]
    arguments = service["Environment"].strip('"').partition("=")[2].split()
    assert service["ExecStart"] == "/usr/bin/env ckptd scrub --all $SCRUB_ARGS"
    with scrub.command.make_context("scrub", ["--all", *arguments]) as context:
        assert context.params["limit"] == "6h"
    assert service["ProtectSystem"] == "full", "strict would make the store read-only"
    assert "ProtectHome" not in service
    assert service["User"] == "%i"


def test_mount_drop_in_and_tmpfiles_agree_where_arenas_are():
    mount = parse("run-ckptd.mount")["Mount"]
    assert mount["Where"] == "/run/ckptd", "systemd wants the unit to be called after it"
    options = mount["Options"].split(",")
    assert mount["Type"] == "tmpfs"
    assert {"mode=1777", "nosuid", "nodev", "huge=within_size"} <= set(options)
    dropped = parse("huge-arena.conf")
    assert dropped["Unit"]["RequiresMountsFor"] == mount["Where"]
    variable, _, arena = dropped["Service"]["Environment"].partition("=")
    assert load_config({}, {variable: arena}, "/dev/null")[0].arena == "/run/ckptd/%i"
    assert tmpfiles() == [["d", "/run/ckptd/ann", "0700", "ann", "-", "-"]]


def test_the_example_of_an_environment_file_is_one(tmp_path):
    given = assignments("example.env")
    ours = {name: value for name, value in given.items() if name.startswith(PREFIX)}
    assert set(given) - set(ours) == {"PATH", "METRICS_ARGS", "SCRUB_ARGS"}
    assert not FOREIGN_VARIABLES & set(ours), "the clients' are read from the ranks' environment"
    _, sources = load_config({}, ours, "/dev/null")
    assert len([source for source in sources.values() if source != "default"]) == len(ours)


@needs_analyze
@pytest.mark.parametrize(("name", "copy"), INSTANCES.items())
def test_systemd_finds_no_fault(name, copy, tmp_path):
    unit = tmp_path / copy
    unit.write_bytes((UNITS / name).read_bytes())
    if name == "ckptd@.service":
        drop_ins = tmp_path / f"{copy}.d"
        drop_ins.mkdir()
        shutil.copy(UNITS / "huge-arena.conf", drop_ins)
        shutil.copy(UNITS / "run-ckptd.mount", tmp_path)
    if name == "ckptd-scrub@.timer":
        shutil.copy(UNITS / "ckptd-scrub@.service", tmp_path)
    mode = ["--user"] if "user" in name else []
    command = ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", *mode, str(unit)]
    environ = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path)}
    environ["SYSTEMD_UNIT_PATH"] = f"{tmp_path}:"
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environ)
    complaints = [line for line in done.stderr.splitlines() if str(tmp_path) in line or "ckptd" in line]
    assert done.returncode == 0, done.stderr
    assert complaints == []


@needs_analyze
@pytest.mark.parametrize("name", ["ckptd@.service", "ckptd-metrics@.service", "ckptd-scrub@.service"])
def test_how_much_of_the_machine_a_bug_could_reach(name, tmp_path):
    unit = tmp_path / name.replace("@", "@ann")
    unit.write_bytes((UNITS / name).read_bytes())
    command = ["systemd-analyze", "security", "--offline=true", "--no-pager", str(unit)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    found = re.search(r"exposure level for \S+: ([0-9.]+)", done.stdout)
    assert found, done.stdout + done.stderr
    assert float(found[1]) <= MAX_EXPOSURE, done.stdout


@pytest.mark.skipif(shutil.which("systemd-tmpfiles") is None, reason="systemd-tmpfiles is not installed")
def test_tmpfiles_makes_a_directory_that_a_daemon_takes(tmp_path):
    """For root's own uid, below another root directory: ann need not exist here."""
    lines = (UNITS / "tmpfiles.conf").read_text().replace(" ann ", f" {tmp_path.owner()} ")
    config = tmp_path / "ckptd.conf"
    config.write_text(lines)
    command = ["systemd-tmpfiles", "--create", f"--root={tmp_path}", str(config)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    made = tmp_path / "run/ckptd/ann"
    assert made.is_dir()
    assert made.stat().st_mode & 0o7777 == 0o700


def test_what_a_real_daemon_reports_to_its_manager(tmp_path):
    """In this order; and that a stop may take as long as stop_drain_s says, whatever TimeoutStopSec is."""
    heard = b""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager, Node(str(tmp_path)) as node:
        manager.bind(node.temporary + "/notify")
        manager.settimeout(20)
        node.start("--stop-drain-s", "100", NOTIFY_SOCKET=node.temporary + "/notify", WATCHDOG_USEC="2000000")
        assert manager.recv(4096) == b"READY=1\nSTATUS=serving"
        while not (b"WATCHDOG=1" in heard and b"STATUS=no jobs" in heard):
            heard += manager.recv(4096)
        node.daemon.send_signal(signal.SIGTERM)
        while b"STOPPING=1" not in heard:
            heard = manager.recv(4096)
        assert b"\nEXTEND_TIMEOUT_USEC=125000000\n" in heard
        assert node.daemon.wait(60) == 0
