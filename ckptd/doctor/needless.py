"""What pages or runs for nothing on this node: a unit that restarts, a daemon without jobs, an alert of no fault."""

import contextlib
import glob
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterable, Iterator
from itertools import pairwise

from ckptd.doctor.rules import Finding, Verdict
from ckptd.shared.format import arena_paths
from ckptd.shared.protocol.status import Status
from ckptd.system import human

_IDLE_S = 3 * 24 * 3600.0
_MANY_RESTARTS = 3
_SYSTEMCTL_S = 5.0
_FIELDS = ("Id", "ActiveState", "SubState", "NRestarts", "Result")
_RULES = ("etc/prometheus/*.y*ml", "etc/prometheus/*/*.y*ml", "etc/prometheus/*.rules")
_MAX_RULES_NBYTES = 4 << 20
# An alert of a daemon that is not there, unless it also asks for a rank that needs one.
_EXPR_RE = re.compile(r"^\s*(?:-\s*)?expr:\s*(?P<one>[^\n]*(?:\n(?!\s*(?:-\s*)?[a-z_]+:)[^\n]*)*)", re.MULTILINE)
_DOWN_RE = re.compile(r"\bckptd_up\b|\babsent\(\s*ckptd_")
_RULE_RE = re.compile(r"^\s*-\s", re.MULTILINE)  # where an item of a list begins, such as a rule
_ALERT_RE = re.compile(r"^\s*(?:-\s*)?alert:", re.MULTILINE)
_NEEDED_RE = re.compile(r"\bckptd_ranks")


def unit_states(user: str) -> list[str]:
    """What systemd says of ckptd's units of this user, a text each; none where there is no systemd."""
    if shutil.which("systemctl") is None:
        return []
    found = []
    for words in (["show", f"ckptd@{user}.service"], ["--user", "show", "ckptd.service"]):
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            command = ["systemctl", *words, "--property", ",".join(_FIELDS)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=_SYSTEMCTL_S, check=True)
            found.append(done.stdout)
    return found


def judge_units(texts: Iterable[str]) -> Iterator[Finding]:
    """A unit that fails, or is started again and again. Nothing for one that is not there, or is fine."""
    for text in texts:
        said = dict(line.partition("=")[::2] for line in text.splitlines())
        unit, restarts = said.get("Id", ""), said.get("NRestarts", "")
        times = int(restarts) if restarts.isdigit() else 0
        if said.get("ActiveState") == "failed":
            detail = f"{unit} has failed ({said.get('Result', 'no reason')})"
        elif said.get("SubState") == "auto-restart" or times >= _MANY_RESTARTS:
            detail = f"systemd has started {unit} again {human.counted(times, 'time')}"
        else:
            continue
        which = "--user -u" if unit == "ckptd.service" else "-u"
        fix = f"journalctl {which} {unit} -n 50 says why; systemctl reset-failed {unit} afterwards"
        yield Finding("unit", Verdict.WARN, detail, fix)


def unused_s(status: Status | None, now: float) -> float | None:
    """How long no job has used the daemon that runs; None: one does, or none runs. now: seconds since 1970."""
    if status is None or status.jobs:
        return None
    since = now - status.uptime_s
    with contextlib.suppress(OSError):  # a job's directory comes and goes with it
        since = max(since, os.stat(os.path.join(status.arena, arena_paths.JOBS)).st_mtime)
    return max(0.0, now - since)


def judge_idle(seconds: float | None) -> Iterator[Finding]:
    """A daemon that no training needs: a monitor of it pages for nothing when it ends."""
    if seconds is not None and seconds >= _IDLE_S:
        detail = f"no job has used the daemon for {human.duration(seconds)}"
        fix = "ckptd stop, and disable its unit: connect() starts one when a training needs it"
        yield Finding("idle daemon", Verdict.WARN, detail, fix)


def rule_files(root: str = "/") -> dict[str, str]:
    """Rules of a Prometheus on this node, by path."""
    found = {}
    for path in sorted({path for pattern in _RULES for path in glob.glob(os.path.join(root, pattern))}):
        with contextlib.suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
            found[path] = file.read(_MAX_RULES_NBYTES)
    return found


def _alerts(text: str) -> Iterator[str]:
    """The rules of a file that are alerts; a rule that records a series fires nothing."""
    starts = [found.start() for found in _RULE_RE.finditer(text)]
    rules = (text[begin:end] for begin, end in pairwise([*starts, len(text)]))
    return (rule for rule in rules if _ALERT_RE.search(rule))


def judge_alerts(files: dict[str, str]) -> Iterator[Finding]:
    """Rules that fire whenever no daemon answers: between jobs that is no fault."""
    for path, text in files.items():
        for rule in _alerts(text):
            match = _EXPR_RE.search(rule)
            expr = " ".join(match["one"].split()) if match else ""
            if _DOWN_RE.search(expr) and not _NEEDED_RE.search(expr):
                detail = f"{path}: '{expr}' fires between jobs, when no training needs a daemon"
                fix = "expr: ckptd_ranks_unserved > 0, as in deploy/prometheus/alerts.yml"
                yield Finding("alerts", Verdict.WARN, detail, fix)


def examine(status: Status | None, user: str, root: str = "/") -> list[Finding]:
    """All of it. Blocks for systemctl, up to 10 s."""
    idle = judge_idle(unused_s(status, time.time()))
    return [*judge_units(unit_states(user)), *idle, *judge_alerts(rule_files(root))]
