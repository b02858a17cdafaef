"""``python -m bench.journal``: what a job's journal costs: the stall of a save, the daemon's memory, an idle daemon.

The same job on daemons of their own at the same time: one that keeps a journal, one that drops each record at once
(``off``), and with ``--against DIR`` one of another checkout of ckptd, its client too. Each step saves once on each of
them, in another order each time; the idle time is the same for all. Processes are those of a job: nothing is forked
from another program. What is said is the median of the differences, and their quartiles: on a busy machine single
figures differ by more than what is sought.
"""

import argparse
import contextlib
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from tests.faults.campaigns import ended_by_signals

ON, OFF, OTHER = "journal", "off", "other"
_ROOT = Path(__file__).resolve().parent.parent
_MIB = 1 << 20
_MEMORY = "/dev/shm"  # noqa: S108 - directories of its own, 0700
_FLUSHED_S: Final = 35.0  # after this the journal of the last save is on the store
_WARM_UP: Final = 20  # saves that count for nothing: slots and plans are made
_DROPPING = """
import ckptd.daemon.accounts as accounts, ckptd.daemon.journals as journals, ckptd.daemon.step_marks as marks
journals.Journals.keep = lambda self, action: None
accounts.Accounts.expect = lambda self, action: None
marks.StepMarks.next_deadline = lambda self: None
from ckptd.cli import main
main()
"""
_RANK = """
import sys, time, torch, ckptd_client
arena, store, nbytes = sys.argv[1], sys.argv[2], int(sys.argv[3])
client = ckptd_client.connect("job", store=store, arena=arena, drain_every=10)
state = {f"w{i}": torch.zeros(nbytes // 16) for i in range(4)}
print("ready", flush=True)
for line in sys.stdin:
    began = time.perf_counter()
    handle = client.save(state, int(line))
    took = time.perf_counter() - began
    handle.wait("staged", 60)
    print(took, flush=True)
client.close()
"""


class Cost(NamedTuple):
    """Of a daemon and its store worker after a round: bytes of their own, seconds of the processor per second."""

    daemon_nbytes: int
    worker_nbytes: int
    idle: float


class Job:
    """A daemon with a rank of its own. tree: the checkout that both run."""

    def __init__(self, name: str, tree: Path, arena: Path, store: Path, nbytes: int) -> None:
        self.name, self._arena, self._store = name, arena, store
        store.mkdir()
        environ = {k: v for k, v in os.environ.items() if not k.startswith("CKPTD_")}
        environ |= {"PYTHONPATH": f"{tree}:{tree}/client", "CKPTD_NO_AUTOSTART": "1", "OMP_NUM_THREADS": "1"}
        program = ("-c", _DROPPING) if name == OFF else ("-m", "ckptd")
        self._log = (store.parent / f"{name}.log").open("wb")
        words = [sys.executable, "-P", *program, "run", "--arena", str(arena), "--keep-last", "2"]
        self._daemon = subprocess.Popen(words, env=environ, stdout=self._log, stderr=self._log, cwd=tree)
        words = [sys.executable, "-P", "-c", _RANK, str(arena), str(store), str(nbytes)]
        pipe = subprocess.PIPE
        self._rank = subprocess.Popen(words, env=environ, stdin=pipe, stdout=pipe, stderr=self._log, text=True)

    def await_rank(self) -> None:
        """Blocks until it has connected."""
        self._answer("ready")

    def save(self, step: int) -> float:
        """Seconds for which the rank was held up. Blocks until the save is staged."""
        assert self._rank.stdin is not None  # noqa: S101 - it is a pipe
        self._rank.stdin.write(f"{step}\n")
        self._rank.stdin.flush()
        return float(self._answer())

    def _answer(self, expected: str = "") -> str:
        assert self._rank.stdout is not None  # noqa: S101 - it is a pipe
        line = self._rank.stdout.readline().strip()
        if not line or (expected and line != expected):
            raise RuntimeError(f"{self.name}: {Path(self._log.name).read_text(errors='replace')[-2000:]}")
        return line

    def cpu_s(self) -> float:
        """Of the daemon and its worker so far."""
        return sum(map(_cpu_s, (self._daemon.pid, *_children(self._daemon.pid))))

    def memory(self) -> tuple[int, int]:
        """Bytes that the daemon has of its own, and its worker."""
        return _anonymous(self._daemon.pid), sum(map(_anonymous, _children(self._daemon.pid)))

    def records_nbytes(self) -> int:
        """Of its journal, in the arena and on the store."""
        found = [*self._arena.glob("**/*.journal"), *self._store.glob("job/.journal/*")]
        return sum(path.stat().st_size for path in found)

    def close(self) -> None:
        """Ends both, the rank by itself."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._rank.communicate(timeout=20)
        for process in (self._rank, self._daemon):
            process.terminate()
            process.wait(60)
        self._log.close()


def _children(pid: int) -> list[int]:
    return [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]


def _cpu_s(pid: int) -> float:
    return sum(int((task / "schedstat").read_text().split()[0]) for task in Path(f"/proc/{pid}/task").iterdir()) / 1e9


def _anonymous(pid: int) -> int:
    """Bytes of memory that no file backs, the process's share."""
    found = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
    return int(found["Pss_Anon"].split()[0]) << 10


@contextlib.contextmanager
def _jobs(trees: dict[str, Path], nbytes: int) -> Iterator[list[Job]]:
    with (
        tempfile.TemporaryDirectory(prefix="ckptd-journal-", dir=_MEMORY) as arenas,
        tempfile.TemporaryDirectory(prefix="ckptd-journal-") as stores,
        contextlib.ExitStack() as stack,
    ):
        found = []
        for name, tree in trees.items():
            found.append(Job(name, tree, Path(arenas, name), Path(stores, name), nbytes))
            stack.callback(found[-1].close)
        for job in found:
            job.await_rank()
        yield found


def play(
    trees: dict[str, Path], saves: int, idle_s: float, nbytes: int
) -> tuple[dict[str, list[float]], dict[str, Cost]]:
    """One round: seconds of each save by job, and what each cost after them."""
    stalls: dict[str, list[float]] = {name: [] for name in trees}
    with _jobs(trees, nbytes) as jobs:
        for step in range(1, _WARM_UP + saves + 1):
            for job in random.sample(jobs, len(jobs)):
                stalls[job.name].append(job.save(step))
        time.sleep(_FLUSHED_S)
        began, before = time.monotonic(), {job.name: job.cpu_s() for job in jobs}
        time.sleep(idle_s)
        costs = {}
        for job in jobs:
            idle = (job.cpu_s() - before[job.name]) / (time.monotonic() - began)
            costs[job.name] = Cost(*job.memory(), idle)
            print(
                f"  {_told(job.name, stalls[job.name], costs[job.name])}, {job.records_nbytes()} B on record",
                flush=True,
            )
    return {name: found[_WARM_UP:] for name, found in stalls.items()}, costs


def _mib(nbytes: float) -> str:
    return f"{nbytes / _MIB:.2f}"


def difference(first: Sequence[float], second: Sequence[float], scale: float) -> str:
    """Median and quartiles of the differences of pairs."""
    found = sorted(scale * (a - b) for a, b in zip(first, second, strict=True))
    if len(found) < 4:
        return f"{statistics.median(found):+.3f}"
    low, middle, high = statistics.quantiles(found, n=4)
    return f"{middle:+.3f} ({low:+.3f} to {high:+.3f})"


def main() -> int:
    """Plays rounds, and prints what the journal adds."""
    parser = argparse.ArgumentParser(prog="python -m bench.journal", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--saves", type=int, default=300, help="of each round (300)")
    parser.add_argument("--idle", type=float, default=30.0, help="seconds in which nothing happens (30)")
    parser.add_argument("--nbytes", type=int, default=4 * _MIB, help="of the state (4 MiB)")
    parser.add_argument("--against", type=Path, help="another checkout of ckptd")
    options = parser.parse_args()
    trees = {ON: _ROOT, OFF: _ROOT} | ({OTHER: options.against.resolve()} if options.against else {})
    stalls: dict[str, list[float]] = {name: [] for name in trees}
    costs: dict[str, list[Cost]] = {name: [] for name in trees}
    with ended_by_signals():
        for number in range(options.rounds):
            print(f"round {number + 1}", flush=True)
            found, cost = play(trees, options.saves, options.idle, options.nbytes)
            for name in trees:
                stalls[name] += found[name]
                costs[name].append(cost[name])
    report(stalls, costs)
    return 0


def _told(name: str, stalls: Sequence[float], cost: Cost) -> str:
    memory = f"daemon {_mib(cost.daemon_nbytes)} MiB, worker {_mib(cost.worker_nbytes)} MiB"
    return f"{name:8} save {1000 * statistics.median(stalls):.3f} ms, {memory}, idle {100 * cost.idle:.3f} %"


def report(stalls: dict[str, list[float]], costs: dict[str, list[Cost]]) -> None:
    """Medians of each, and of what the journal adds to the others."""
    for name, found in stalls.items():
        middle = Cost(*(statistics.median(column) for column in zip(*costs[name], strict=True)))
        print(_told(name, found, middle))
    ours = list(zip(*costs[ON], strict=True))
    for name in [name for name in stalls if name != ON]:
        theirs = list(zip(*costs[name], strict=True))
        scales = 1 / _MIB, 1 / _MIB, 100
        daemon, worker, idle = (difference(a, b, scale) for a, b, scale in zip(ours, theirs, scales, strict=True))
        save = difference(stalls[ON], stalls[name], 1000)
        print(f"{ON} - {name}: save {save} ms, daemon {daemon} MiB, worker {worker} MiB, idle {idle} %")


if __name__ == "__main__":
    sys.exit(main())
