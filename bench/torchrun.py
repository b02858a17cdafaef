"""Ranks on this machine, started as torchrun would, in a process group of their own, which ends with them."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from ckptd_client.demo.ranks import free_port

_END_S = 5.0
_PERIOD_S = 0.05


def run(command: Sequence[str], ranks: int, folder: Path, patience_s: float, more: Mapping[str, str]) -> str:
    """Runs all ranks to their end. Why there is no result; empty if there is one.

    folder: its name is unique and names the run; it has the log. more: further environment variables.
    """
    port, log = free_port(), folder / "log"
    processes: list[subprocess.Popen[bytes]] = []
    with log.open("wb") as output:
        try:
            for rank in range(ranks):
                group = processes[0].pid if processes else 0
                environment = os.environ | more | _variables(rank, ranks, port, folder.name)
                processes.append(
                    subprocess.Popen(command, env=environment, stdout=output, stderr=output, process_group=group)
                )
            problem = _wait(processes, patience_s)
        finally:
            _end_group(processes)
    return f"{problem}: {_last_words(log)}" if problem else ""


def _variables(rank: int, ranks: int, port: int, name: str) -> dict[str, str]:
    """The variables of torchrun."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": name,
        "OMP_NUM_THREADS": "1",
    }


def _wait(processes: Sequence[subprocess.Popen[bytes]], patience_s: float) -> str:
    """Waits until all ranks have ended, or one has failed. The failure; empty: none."""
    deadline = time.monotonic() + patience_s
    while any(process.poll() is None for process in processes):
        if any(process.poll() for process in processes):
            break
        if time.monotonic() > deadline:
            return f"it did not end in {patience_s:g} s"
        time.sleep(_PERIOD_S)
    return "it failed" if any(process.poll() for process in processes) else ""


def _end_group(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ends the process group of the ranks."""
    if not processes:
        return
    group = processes[0].pid  # kept by the kernel as long as the group has members
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, number)
        deadline = time.monotonic() + _END_S
        while _group_lives(group, processes) and time.monotonic() < deadline:
            time.sleep(_PERIOD_S)
    for process in processes:
        process.wait()


def _group_lives(group: int, processes: Sequence[subprocess.Popen[bytes]]) -> bool:
    for process in processes:
        process.poll()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, 0)
        return True
    return False


def _last_words(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line]
    return (errors or lines or ["it said nothing"])[-1].strip()[:200]
