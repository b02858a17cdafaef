"""Processes that run a function of the tests, forked from the server that has torch and the client."""

import ctypes
import io
import multiprocessing.context
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing import popen_spawn_posix, reduction, resource_tracker, spawn, util
from multiprocessing.context import SpawnProcess, set_spawning_popen
from multiprocessing.process import BaseProcess
from typing import Any

from tests import pythons

_PR_SET_PDEATHSIG = 1
_ENVIRON = os.environ | pythons.ENVIRON  # before a test changes it


class _Popen(popen_spawn_posix.Popen):
    """A spawned process as multiprocessing has it, but for the interpreter: that is forked."""

    def _launch(self, process_obj: BaseProcess) -> None:
        tracker = resource_tracker.getfd()
        data = io.BytesIO()
        set_spawning_popen(self)
        try:
            reduction.dump(spawn.get_preparation_data(process_obj.name), data)
            reduction.dump(process_obj, data)
        finally:
            set_spawning_popen(None)
        self.sentinel, ends_with_it = os.pipe()
        theirs, ours = os.pipe()
        program = f"multiprocessing.spawn.spawn_main(tracker_fd={tracker}, pipe_handle={theirs})"
        self._process = pythons.Popen(
            [sys.executable, "-c", f"import torch, multiprocessing.spawn; {program}", "--multiprocessing-fork"],
            env=_ENVIRON,
            pass_fds={tracker, theirs, ends_with_it, *self._fds},
        )
        os.close(theirs)
        os.close(ends_with_it)
        self.pid = self._process.pid
        self.finalizer = util.Finalize(self, util.close_fds, (self.sentinel, ours))
        with open(ours, "wb", closefd=False) as file:
            file.write(data.getbuffer())

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        """Its exit status, None while it runs."""
        self.returncode = self._process.poll() if flag & os.WNOHANG else self._process.wait()
        return self.returncode


class _Process(SpawnProcess):
    @staticmethod
    def _Popen(process_obj: BaseProcess) -> _Popen:  # noqa: N802 - multiprocessing's name
        return _Popen(process_obj)


class _Context(multiprocessing.context.SpawnContext):
    Process = _Process  # type: ignore[assignment]


context = _Context()  # of processes that are forked, for an executor too


def start(target: Callable[..., None], *args: Any) -> BaseProcess:
    """A process that runs target(*args). It should begin() first."""
    process = _Process(target=target, args=args)
    process.start()
    return process


def begin(variables: dict[str, str]) -> None:
    """To be called first by the process: it ends with its parent, and has these variables and no other of CKPTD_."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for name in [name for name in os.environ if name.startswith("CKPTD_")]:
        del os.environ[name]
    os.environ.update(variables)
