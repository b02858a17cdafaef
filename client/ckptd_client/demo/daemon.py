"""Watches the daemons by ``ckptd status`` alone, and kills them."""

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Generator, Sequence

import msgspec

from ckptd.shared.base.ids import SaveId
from ckptd.shared.protocol.status import DrainStatus, JobStatus, Status
from ckptd_client.demo import DemoError
from ckptd_client.demo.workspace import Node, Workspace

_WATCH_S = 60.0
_INTERVAL_S = 0.1  # the minimum of `ckptd status --watch`
_DEATH_S = 10.0

_decoder = msgspec.json.Decoder(Status)


def ckptd(space: Workspace, *args: str, columns: int, color: bool) -> tuple[int, str]:
    """Exit code and output of ``ckptd ARGS``: stdout, or stderr if that is empty."""
    extra = {"COLUMNS": str(columns), **({"FORCE_COLOR": "1"} if color else {})}
    done = subprocess.run(
        _command(*args),
        env=space.environment(extra),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, (done.stdout or done.stderr).rstrip()


def kill_in_drain(space: Workspace, nodes: Sequence[Node], ranks: Sequence[int]) -> tuple[list[int], DrainStatus]:
    """Waits for the first half of a drain of a protected checkpoint, then kills the ranks and all nodes' daemons.

    ranks: their process ids; they are killed first, because a rank without a daemon starts another.

    Watches ``ckptd status --json`` of the first node. Returns the daemons' process ids, by node, and the state of the
    drain; all processes have ended then. Raises DemoError if there is no such drain.
    """
    others = [_pid(space, node) for node in nodes[1:]]  # now: during the drain there is no time for it
    with contextlib.closing(_watch(space, nodes[0])) as watched:  # ends first, else it would report the kill
        seen = ((status.pid, job) for status in watched for job in status.jobs)
        found = next(((pid, drain) for pid, job in seen if (drain := _drain_to_hit(job)) is not None), None)
    if found is None:
        text = "ckptd status --watch showed no drain of a protected checkpoint, or ended before"
        raise DemoError(f"{text} {_WATCH_S:.0f} s were over")
    daemons = [found[0], *others]
    _kill([*ranks, *daemons])
    return daemons, found[1]


def _drain_to_hit(job: JobStatus) -> DrainStatus | None:
    drain = job.drain
    if drain is None or not 0 < drain.nbytes_done < drain.nbytes / 2:
        return None
    return drain if _is_protected(job, drain.save) else None


def _is_protected(job: JobStatus, save: SaveId) -> bool:
    known = [one for one in job.checkpoints if (one.incarnation, one.counter) == (save.incarnation, save.counter)]
    return any(one.protected for one in known)


def _kill(pids: Sequence[int]) -> None:
    """Kills all at once; returns when all have ended, our children not yet reaped."""
    with contextlib.ExitStack() as stack:
        processes = [os.pidfd_open(pid) for pid in pids]
        for process in processes:
            stack.callback(os.close, process)
            signal.pidfd_send_signal(process, signal.SIGKILL)
        for pid, process in zip(pids, processes, strict=True):
            poll = select.poll()
            poll.register(process, select.POLLIN)
            if not poll.poll(_DEATH_S * 1000):
                raise DemoError(f"process {pid} is still there {_DEATH_S:.0f} s after SIGKILL")


def _pid(space: Workspace, node: Node) -> int:
    done = subprocess.run(
        _command("status", "--arena", node.arena, "--json"),
        env=space.environment({}),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )
    if done.returncode != 0:
        raise DemoError(f"the daemon of {node.name} does not answer: {done.stderr.decode(errors='replace').strip()}")
    return _decoder.decode(done.stdout).pid


def _watch(space: Workspace, node: Node) -> Generator[Status]:
    """Yields one status after another, for _WATCH_S at most."""
    command = _command("status", "--arena", node.arena, "--json", "--watch", "--interval", str(_INTERVAL_S))
    with subprocess.Popen(
        command, env=space.environment({}), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, process_group=0
    ) as process:
        timer = threading.Timer(_WATCH_S, process.kill)
        timer.start()
        try:
            yield from map(_decoder.decode, process.stdout or ())
        finally:
            timer.cancel()
            process.kill()


def _command(*args: str) -> list[str]:
    return [sys.executable, "-m", "ckptd", *args]
