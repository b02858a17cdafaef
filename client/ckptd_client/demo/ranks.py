"""Starts, follows and kills the training ranks, as a launcher such as torchrun would."""

import errno
import itertools
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from ckptd_client.demo import DemoError
from ckptd_client.demo.journal import Reader, Record
from ckptd_client.demo.plan import RANKS_PER_NODE, WORLD_SIZE, Plan, Task
from ckptd_client.demo.workspace import ADDRESS, Node, Workspace

JOB = "demo-gpt"
_POLL_S = 0.02
_SILENCE_S = 150.0
_NOTICE_S = 5.0  # limit for a rank to notice that its peer ended, before the launcher ends it
_SHOWN_LINES = 30
_PORTS = 20_000, 32_768


class Ranks:
    """One start of the training: its processes, and their records so far.

    The ranks run on places, in order, RANKS_PER_NODE on each; without places they train without ckptd.
    """

    def __init__(
        self,
        name: str,
        space: Workspace,
        plan: Plan,
        *,
        places: Sequence[Node] = (),
        settings: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.began = time.time()
        self.ended: float | None = None  # once all processes have; both in seconds since 1970
        self.records: list[list[Record]] = [[] for _ in range(WORLD_SIZE)]
        self._journals = [space.path(f"{name}.rank{rank}.jsonl") for rank in range(WORLD_SIZE)]
        self._readers = [Reader(path) for path in self._journals]
        self._logs = [space.path(f"{name}.rank{rank}.log") for rank in range(WORLD_SIZE)]
        port = free_port()
        self._processes = []
        for rank, journal in enumerate(self._journals):
            node = places[rank // RANKS_PER_NODE] if places else None
            extra = {**_torchrun(rank, port), **(settings or {}), **(node.settings() if node else {})}
            task = _task(space, plan, journal, node.arena if node else None)
            self._processes.append(self._start(rank, space, task, extra))

    def _start(self, rank: int, space: Workspace, task: Task, extra: dict[str, str]) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "ckptd_client.demo.train", msgspec.json.encode(task).decode()]
        with open(self._logs[rank], "wb") as log:
            return subprocess.Popen(
                command,
                env=space.environment(extra),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,  # the orchestrator handles the terminal's Ctrl-C
            )

    @property
    def pids(self) -> list[int]:
        """Process ids, by rank."""
        return [process.pid for process in self._processes]

    def follow(self) -> Iterator[Record]:
        """Yields new records of rank 0 until all ranks have ended. Raises DemoError for an exit code other than 0."""
        last_record = time.monotonic()
        while True:
            running = any(process.poll() is None for process in self._processes)  # first, so that no record is missed
            for record in self.read():
                last_record = time.monotonic()
                yield record
            self._check()
            if not running:
                self.ended = self.ended or time.time()
                return
            if time.monotonic() - last_record > _SILENCE_S:
                raise DemoError(f"{self.name}: nothing was heard of the ranks for {_SILENCE_S:.0f} s\n{self._tail()}")
            time.sleep(_POLL_S)

    def read(self) -> list[Record]:
        """Reads the new records of all ranks; returns those of rank 0."""
        new_records = [reader.poll() for reader in self._readers]
        for known, new in zip(self.records, new_records, strict=True):
            known.extend(new)
        return new_records[0]

    def kill(self, rank: int) -> list[int]:
        """Kills one rank, then acts as a launcher: waits for the others to notice, and ends those that do not.

        Returns the exit codes by rank, negative for a signal.
        """
        self._processes[rank].send_signal(signal.SIGKILL)
        deadline = time.monotonic() + _NOTICE_S
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
        return self.reap()

    def reap(self) -> list[int]:
        """Exit codes by rank, negative for a signal. Waits until all ranks have ended, and reads their last records."""
        codes = [process.wait() for process in self._processes]
        self.ended = self.ended or time.time()
        self.read()
        return codes

    def _check(self) -> None:
        codes = [process.poll() for process in self._processes]
        if any(codes):
            raise DemoError(f"{self.name}: the ranks ended with exit codes {codes}\n{self._tail()}")

    def _tail(self) -> str:
        return "\n".join(itertools.chain.from_iterable(_last_lines(path) for path in self._logs))


def free_port() -> int:
    """A free port of the loopback interface, below those that the kernel gives to connections until ranks listen."""
    while True:
        port = random.randrange(*_PORTS)
        try:
            with socket.create_server((ADDRESS, port)):
                return port
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise


def _torchrun(rank: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % RANKS_PER_NODE),
        "WORLD_SIZE": str(WORLD_SIZE),
        "MASTER_ADDR": ADDRESS,
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
    }


def _task(space: Workspace, plan: Plan, journal: str, arena: str | None) -> Task:
    return Task(
        steps=plan.steps,
        save_every=plan.save_every,
        work=plan.work,
        journal=journal,
        store=space.store,
        job=JOB,
        arena=arena,
    )


def _last_lines(path: str) -> list[str]:
    with open(path, errors="replace") as file:
        lines = file.read().splitlines()[-_SHOWN_LINES:]
    return [f"{os.path.basename(path)}: {line}" for line in lines]
