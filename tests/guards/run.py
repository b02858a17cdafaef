"""``make guards``: removes guards of the product, one at a time and in a copy, and looks whether their tests fail.

python -m tests.guards.run [NAME ...] [--share K/N] [--count N] [--seed S]

Without a name: all of tests/guards/table.py. A test that passes without its guard is a finding, and so is one that
fails for another reason: because the copy is no program any more, or before the test itself has begun. A row with a
finding is played once more, and that is printed: where a race decides whether the fault shows, a test may miss it.
"""

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence

from tests.guards.guard import Guard, function_of
from tests.guards.outcome import ARENAS, FAILURES, FOLDER
from tests.guards.table import GUARDS

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_PRODUCED = {"build", "dist", "shared", "site"}  # beside what is hidden: environments, caches, the history
_TEST_S = 60  # for pytest-timeout, where a test names no other
_ROW_S = 240.0
_PLAYS = 2
_NO_PROGRAM = r"ModuleNotFoundError|ImportError|SyntaxError|IndentationError|NameError|UnboundLocalError"
_SHOWN = 150
_LAST_CHARS = 2000


def copy(into: str) -> str:
    """The tree, but for what was built in it."""
    path = os.path.join(into, "tree")
    os.mkdir(path)
    for name in sorted(set(os.listdir(ROOT)) - _PRODUCED):
        there = os.path.join(ROOT, name)
        if name.startswith("."):
            continue
        if os.path.isdir(there):
            shutil.copytree(there, os.path.join(path, name), ignore=shutil.ignore_patterns("out"), symlinks=True)
        else:
            shutil.copy2(there, path)
    return path


class RowError(Exception):
    """The row is not in step with the tree."""


@contextlib.contextmanager
def removed(tree: str, guard: Guard) -> Iterator[None]:
    """The copy without the guard, for a while."""
    with contextlib.ExitStack() as stack:
        for file, text, instead in guard.edits:
            path = os.path.join(tree, file)
            before = _read(path)
            if before.count(text) != 1:
                raise RowError(f"its text stands {before.count(text)} times in {file}: change the row: {text}")
            stack.callback(_write, path, before)
            _write(path, before.replace(text, instead))
        yield


def _read(path: str) -> str:
    with open(path, encoding="utf-8") as file:
        return file.read()


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


def play(tree: str, guard: Guard) -> list[str]:
    """What is wrong with the row: a line for each of its tests that did not fail as it must."""
    folder = tempfile.mkdtemp(prefix="ckptd-guard-")
    try:
        with removed(tree, guard):
            output, ended = _run(tree, guard.tests, folder)
        failures = _failures(folder)
        problems = [problem for test in guard.tests if (problem := _judge(test, failures))]
        if problems:
            problems.append(f"pytest {'ended' if ended else 'was stopped'}:\n{output[-_LAST_CHARS:]}")
    except RowError as error:
        return [str(error)]
    else:
        return problems
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run(tree: str, tests: Sequence[str], folder: str) -> tuple[str, bool]:
    """What pytest prints, and whether it ended in time. Leaves no process of the row."""
    left_out = ("CKPTD_", "NOTIFY_", "WATCHDOG_", "SHARE", "FAULTS", "MUTANTS", "TESTS_PYTHON", "PYTEST_")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
    environ |= {FOLDER: folder, "TMPDIR": folder, "PYTHONPATH": os.pathsep.join((tree, os.path.join(tree, "client")))}
    words = ["-q", "-p", "no:cacheprovider", "-p", "tests.guards.outcome", f"--timeout={_TEST_S}", *tests]
    with open(os.path.join(folder, "output"), "w+", encoding="utf-8", errors="replace") as output:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "pytest", *words],
            env=environ, cwd=tree, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
        try:
            process.wait(_ROW_S)
            ended = True
        except subprocess.TimeoutExpired:
            ended = False
        finally:
            _end(folder, process)
        output.seek(0)
        return output.read(), ended


def _end(folder: str, process: subprocess.Popen[bytes]) -> None:
    """Ends every process that was started with this row's folder, and gives the memory of their arenas back."""
    while pids := _processes(folder):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if process.poll() is None:
            process.wait()
        time.sleep(0.05)
    process.wait()
    with contextlib.suppress(FileNotFoundError), open(os.path.join(folder, ARENAS), encoding="utf-8") as file:
        for arena in file.read().splitlines():
            shutil.rmtree(arena, ignore_errors=True)


def _processes(folder: str) -> list[int]:
    """Those that live, by their environment: a test may give them other sessions and parents."""
    wanted, found = f"{FOLDER}={folder}".encode(), []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:
            if wanted in file.read().split(b"\0"):
                found.append(int(name))
    return found


def _failures(folder: str) -> list[dict[str, str]]:
    with contextlib.suppress(FileNotFoundError), open(os.path.join(folder, FAILURES), encoding="utf-8") as file:
        return [json.loads(line) for line in file]
    return []


def _judge(test: str, failures: Iterable[dict[str, str]]) -> str:
    """Empty when the test failed as it must; prints how."""
    mine = [one for one in failures if test in (one["test"], function_of(one["test"]))]
    own = [one for one in mine if one["when"] != "setup"]
    if not own:
        early = next((f": {one['kind']}: {one['message']}" for one in mine), "")
        return f"{test} {'failed before it began' if mine else 'did not fail'}{early[:_SHOWN]}"
    broken = [found for one in own if (found := re.search(rf"\b({_NO_PROGRAM}): .*", f"{one['kind']}: {one['text']}"))]
    if broken:
        return f"{test} failed, and not for the guard: the copy is no program: {broken[0][0][:_SHOWN]}"
    first = own[0]
    message = " ".join(first["message"].split())
    print(f"    {first['test'].rpartition('/')[2]}: {first['kind']}: {message[:_SHOWN]}", flush=True)
    return ""


def chosen(names: Sequence[str], share: str, count: int, seed: int) -> list[Guard]:
    """The rows to play. Raises SystemExit for a name that none has."""
    known = {guard.name: guard for guard in GUARDS}
    unknown = sorted(set(names) - known.keys())
    if unknown:
        raise SystemExit(f"no guard is called {', '.join(unknown)}: see tests/guards/table.py")
    rows = [known[name] for name in names] if names else list(GUARDS)
    if share:
        number, _, shares = share.partition("/")
        rows = rows[int(number) % int(shares) :: int(shares)]
    return rows if count < 0 else random.Random(seed).sample(rows, min(count, len(rows)))


def main() -> int:
    """0 when every test failed without its guard, else 1."""
    parser = argparse.ArgumentParser(prog="python -m tests.guards.run", description="remove guards, see tests fail")
    parser.add_argument("names", nargs="*", metavar="NAME", help="of a row of tests/guards/table.py; none: all rows")
    parser.add_argument("--share", default="", metavar="K/N", help="every Nth row, from the Kth")
    parser.add_argument("--count", type=int, default=-1, metavar="N", help="that many rows, drawn at random")
    parser.add_argument("--seed", type=int, default=0, help="of that draw")
    given = parser.parse_args()
    rows = chosen(given.names, given.share, given.count, given.seed)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # which cleans up
    folder, findings = tempfile.mkdtemp(prefix="ckptd-guards-"), 0
    try:
        tree = copy(folder)
        for guard in rows:
            print(f"{guard.name}: {', '.join(edit.file for edit in guard.edits)}", flush=True)
            began, problems, plays = time.monotonic(), play(tree, guard), 1
            while problems and plays < _PLAYS:
                print(f"    played again: {problems[0]}", flush=True)
                problems, plays = play(tree, guard), plays + 1
            for problem in problems:
                print(f"    FINDING: {problem}", flush=True)
            findings += bool(problems)
            print(f"    {time.monotonic() - began:.0f} s", flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"{len(rows)} guards removed, one at a time: {findings} rows with findings")
    return min(findings, 1)


if __name__ == "__main__":
    sys.exit(main())
