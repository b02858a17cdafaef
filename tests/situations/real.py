"""Situations of real daemons and ranks: what the command prints there. Paths of the run become those of a site."""

import contextlib
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator

from tests import pythons
from tests.cluster import Node, wait_for
from tests.faults.mounts import FuseStore, mounted
from tests.faults.nodes.capture import ARENA, STORE
from tests.faults.ranks import JOB, MB, Ranks, told

_NAME = "gpu01"
_SLOTS = 3  # of a rank
_FULL_NBYTES, _LARGE_NBYTES = 24 * MB, 8 * MB
_SHORT = "/tmp/ck-"  # eight random characters follow: as long as STORE, so that lines break as at a site


@contextlib.contextmanager
def _a_store() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix=os.path.basename(_SHORT), dir=os.path.dirname(_SHORT)) as store:
        assert len(store) == len(STORE), store
        yield store


@contextlib.contextmanager
def _a_node(base: pathlib.Path, store: str = "", **environ: str) -> Iterator[Node]:
    with contextlib.nullcontext(store) if store else _a_store() as at, told(at, logs=str(base)) as node:
        node.start(CKPTD_NODE=_NAME, **environ)
        yield node


def _command(node: Node, *args: str, code: int = 0) -> str:
    command = (sys.executable, "-P", "-m", "ckptd", "status", "--arena", node.arena, *args)
    done = pythons.run(
        command,
        env=node.environ(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == code, done.stdout
    text = done.stdout.replace(node.store, STORE).replace(node.arena, ARENA)
    return text.replace(socket.gethostname(), _NAME).rstrip()


def _saved(node: Node, ranks: Ranks, step: int, milestone: str = "durable") -> None:
    """And the ranks have all their slots: the last one comes when it is there."""
    ranks.call("save", step)
    ranks.call("wait", step, milestone)
    wait_for(lambda: (job := node.job(JOB)) and all(rank.slots == _SLOTS for rank in job.ranks))


def healthy(base: pathlib.Path) -> str:
    """Every save became durable."""
    with _a_node(base) as node, Ranks(node, 2) as ranks:
        ranks.call("connect")
        _saved(node, ranks, 50)
        _saved(node, ranks, 100)
        wait_for(lambda: (job := node.job(JOB)) and job.checkpoints[0].milestone == "durable")
        return _command(node)


def rank_missing(base: pathlib.Path) -> str:
    """One rank of four does not call save."""
    with _a_node(base) as node, Ranks(node, 4) as ranks:
        ranks.call("connect")
        _saved(node, ranks, 50)
        for rank in (0, 1, 3):
            ranks[rank].call("save", 100)
        wait_for(lambda: (job := node.job(JOB)) and job.checkpoints[0].reason, every_s=0.1)
        return _command(node)


def store_full(base: pathlib.Path) -> str:
    """The store has room for two checkpoints."""
    with (
        _a_store() as store,
        mounted(store, "-t", "tmpfs", "-o", f"size={_FULL_NBYTES}", "none"),
        _a_node(base, store, CKPTD_KEEP_LAST="8") as node,
        Ranks(node, nbytes=_LARGE_NBYTES) as ranks,
    ):
        ranks.call("connect")
        for step in (50, 100):
            _saved(node, ranks, step)
        ranks.call("save", 150)
        wait_for(lambda: (job := node.job(JOB)) and job.drain and job.drain.last_error, every_s=0.01)
        return _command(node)


def store_hung(base: pathlib.Path) -> str:
    """Calls into the store's mount do not return."""
    with (
        FuseStore(str(base)) as fuse,
        _a_node(base, fuse.path, CKPTD_STORE_TIMEOUT_S="600", CKPTD_STOP_DRAIN_S="1") as node,
        Ranks(node, nbytes=_LARGE_NBYTES) as ranks,
    ):
        ranks.call("connect")
        _saved(node, ranks, 50)
        ranks.call("save", 100)
        wait_for(lambda: (job := node.job(JOB)) and job.drain is not None, every_s=0.001)
        fuse.hang()
        try:
            wait_for(lambda: any(worker.silent for worker in node.status().workers), every_s=0.2)
            return _command(node)
        finally:
            fuse.go_on()


def unprotected(base: pathlib.Path) -> str:
    """Parity was asked for, and there is one node."""
    with _a_node(base) as node, Ranks(node, 2) as ranks:
        ranks.call("connect", redundancy="xor")
        _saved(node, ranks, 50)
        wait_for(lambda: (job := node.job(JOB)) and job.checkpoints[0].milestone == "durable")
        return _command(node)


def no_daemon(base: pathlib.Path) -> str:
    """It was killed; the ranks live, and what is staged is in the arena. And what is known of the job."""
    with _a_node(base) as node, Ranks(node, 2) as ranks:
        ranks.call("connect", drain_every="3600s")  # drains the first one alone
        _saved(node, ranks, 50)
        _saved(node, ranks, 150, "staged")
        node.kill()
        last = _command(node, f"{node.store}/{JOB}")
        return f"{_command(node, code=3)}\n\n$ ckptd status {STORE}/{JOB}\n{last}"


SITUATIONS: dict[str, Callable[[pathlib.Path], str]] = {
    "healthy": healthy,
    "rank missing": rank_missing,
    "store hung": store_hung,
    "store full": store_full,
    "unprotected": unprotected,
    "no daemon": no_daemon,
}
