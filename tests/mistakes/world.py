"""What a mistake is made in: arenas, a store, a home directory, and commands, all gone afterwards."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from tests import pythons
from tests.cluster import Node

_PYTHON = """#!/bin/sh
case "$1" in *.py) exec {fork} "$@" ;; esac
exec {python} "$@"
"""
# A daemon is a process of its own, which is stopped and killed by its pid; any other command may be a fork.
_CKPTD = """#!/bin/sh
[ "$1" = run ] && exec {python} -P -m ckptd "$@"
exec {fork} -P -m ckptd "$@"
"""
# Not from the status: a daemon that was stopped cannot give it.
_DAEMON_PID = """#!{python}
import os
from ckptd.shared.files.locks import holder
from ckptd.shared.format.arena_paths import LOCK
print(holder(os.path.join(os.environ["CKPTD_ARENA"], LOCK)) or "")
"""


class World:
    """A context manager. Nodes share a store; the first one is where shells and single ranks run.

    forks: whether commands may be forked from a server, which has all rights of this process.
    """

    def __init__(self, nodes: int = 1, *, forks: bool = True) -> None:
        self.place = tempfile.mkdtemp(prefix="ckptd-mistake-")
        self.store = self._make("store")
        self.home = self._make("home")
        self.bin = self._make("bin")
        self.arenas = [tempfile.mkdtemp(prefix="ckptd-test-", dir="/dev/shm") for _ in range(nodes)]
        self.nodes = [Node(self.store, arena=arena) for arena in self.arenas]
        self._write_commands(pythons.shim() if forks else sys.executable)

    def _make(self, name: str) -> str:
        path = os.path.join(self.place, name)
        os.mkdir(path, 0o755)
        return path

    def _write_commands(self, fork: str) -> None:
        texts = {"python": _PYTHON, "ckptd": _CKPTD, "daemon-pid": _DAEMON_PID}
        for name, text in texts.items():
            path = os.path.join(self.bin, name)
            with open(path, "w", encoding="utf-8") as file:
                file.write(text.replace("{python}", sys.executable).replace("{fork}", fork))
            os.chmod(path, 0o755)  # noqa: S103 - an ordinary user runs it too

    def environ(self, node: int = 0, extra: Mapping[str, str | None] | None = None) -> dict[str, str]:
        """Of every process of this node. What extra has None for is unset."""
        variables: dict[str, str | None] = {
            **self.nodes[node].environ(CKPTD_NODE=f"node{node}"),
            "HOME": self.home,
            "PATH": f"{self.bin}:{os.environ['PATH']}",
            "STORE": self.store,
            "ARENA": self.arenas[node],
            "PLACE": self.place,
            "COLUMNS": "120",
            **{name: self.filled(value) if value else value for name, value in (extra or {}).items()},
        }
        return {name: value for name, value in variables.items() if value is not None}

    def filled(self, text: str) -> str:
        """The text with paths of this world for their names."""
        for name, path in (("$STORE", self.store), ("$ARENA", self.arenas[0]), ("$HOME", self.home)):
            text = text.replace(name, path)
        return text.replace("$PLACE", self.place)

    def shell(self, command: str) -> None:
        """What is done before anybody types: an assertion that it ends well."""
        done = subprocess.run(
            ["/bin/bash", "-e", "-c", command], cwd=self.home, env=self.environ(), capture_output=True, text=True,
            timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr

    def processes(self) -> list[int]:
        """All that run with one of our arenas in their environment or their command, but this one."""
        found = []
        marks = [os.fsencode(path) for path in (*self.arenas, self.place)]
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                text = b"".join(_read(f"/proc/{name}/{what}") for what in ("environ", "cmdline"))
                if any(mark in text for mark in marks) and int(name) != os.getpid():
                    found.append(int(name))
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        deadline = time.monotonic() + 10
        while (left := self.processes()) and time.monotonic() < deadline:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        for path in (*self.arenas, self.place, *(node.temporary for node in self.nodes)):
            _unmount_below(path)
            shutil.rmtree(path, ignore_errors=True)
        assert not left, f"processes of {self.place} do not end: {left}"


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _unmount_below(path: str) -> None:
    with open("/proc/self/mounts", encoding="utf-8") as file:
        places = [line.split()[1] for line in file]
    for place in reversed([place for place in places if place == path or place.startswith(path + "/")]):
        subprocess.run(["umount", "-l", place], check=False, capture_output=True)
