"""A plugin of pytest, in ``make test``, that writes what each test costs: seconds, and seconds of a core's time.

The core's time is that of the test and of all processes below it that live or were waited for. The second tells what a
test costs where all cores are busy, the first what it costs where they wait. A table of the costliest is printed, and
all of them are in the file that ``DURATIONS`` names, one test a line: core seconds, seconds, processes started, test.
"""

import collections
import contextlib
import os
import re
import resource
import sys
import time
from typing import Any

import pytest

from tests import pythons

_GROUP = re.compile(r"@[^]@]*$")  # pytest-xdist's, after the name of the test
_TICKS = os.sysconf("SC_CLK_TCK")
_SHOWN = 15
_PROPERTY = "costs"
_starts = [0]
_below: set[int] = set()  # processes
_ended: list[float] = []  # core seconds at the end of the last test, which is the beginning of the next one


def _count_start(event: str, _arguments: tuple[Any, ...]) -> None:
    if event in {"subprocess.Popen", "os.fork"}:
        _starts[0] += 1


def _used() -> float:
    """Core seconds of this process, of what it has waited for, and of what lives below it."""
    of_kinds = [resource.getrusage(kind) for kind in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in of_kinds) + _living() / _TICKS


def _living() -> int:
    """Ticks of all processes below this one: a list of children that is read while one of them ends may lack others."""
    _below.update(_children(os.getpid()), pythons.servers())
    looked, ticks = set[int](), 0
    while pids := _below - looked:
        for pid in pids:
            try:
                with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
                    ticks += sum(map(int, file.read().rpartition(b")")[2].split()[11:15]))
                _below.update(_children(pid))
            except OSError:
                _below.discard(pid)
        looked |= pids
    return ticks


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", "rb", buffering=0) as file:
                found += map(int, file.read().split())
    return found


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Any:
    """Costs of a test with its fixtures; a fixture of many tests is the cost of the first and the last of them."""
    began, starts = time.monotonic(), _starts[0]
    used = _ended.pop() if _ended else _used()

    def costs() -> tuple[float, float, int]:
        _ended[:] = [_used()]
        return _ended[0] - used, time.monotonic() - began, _starts[0] - starts

    item.user_properties.append((_PROPERTY, costs))
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """The teardown's report has the sum of all."""
    report = yield
    costs = [value for name, value in item.user_properties if name == _PROPERTY]
    report.user_properties = [pair for pair in report.user_properties if pair[0] != _PROPERTY]
    if report.when == "teardown" and costs:
        report.user_properties.append((_PROPERTY, costs[0]()))
    return report


class _Table:
    """The costs of all tests, in the process that has the terminal."""

    def __init__(self) -> None:
        self.rows: list[tuple[float, float, int, str]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = _GROUP.sub("", report.nodeid)
        self.rows.extend((*value, test) for name, value in report.user_properties if name == _PROPERTY)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """The file, and its head."""
        self.rows.sort(reverse=True)
        path = os.environ.get("DURATIONS", "durations.tsv")
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        lines = [f"{used:.2f}\t{seconds:.2f}\t{starts}\t{name}" for used, seconds, starts, name in self.rows]
        with open(path, "w", encoding="utf-8") as file:
            file.write("\n".join(["core s\ts\tstarts\ttest", *lines, ""]))
        total = [sum(column) for column in zip(*(row[:3] for row in self.rows), strict=True)] or [0, 0, 0]
        terminalreporter.section(f"{total[0]:.0f} s of a core, {total[1]:.0f} s, {total[2]} starts: {path}")
        areas: collections.Counter[str] = collections.Counter()
        for used, _seconds, _count, name in self.rows:
            areas["/".join(name.partition("::")[0].split("/")[:3])] += used
        for area, used in areas.most_common(_SHOWN):
            terminalreporter.write_line(f"{used:8.1f}  {area}")
        for line in lines[:_SHOWN]:
            terminalreporter.write_line(line)


def pytest_configure(config: pytest.Config) -> None:
    """Measures where tests run, and collects where the terminal is."""
    sys.addaudithook(_count_start)
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Table())
