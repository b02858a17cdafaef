"""Types a mistake in a world of its own, and keeps what came of it."""

import atexit
import contextlib
import ctypes
import functools
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess

from tests import forks, pythons
from tests.cluster import wait_for
from tests.mistakes.mistake import PREAMBLE, Mistake
from tests.mistakes.world import World
from tests.ports import free_port

# Root without the right to pass by the modes of files: what it may not read it cannot, as an ordinary user.
_PASSES_BY = (1, 2)  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
_AS_USER = ("setpriv", "--bounding-set", "-dac_override,-dac_read_search", "--")
_PR_CAPBSET_DROP = 24
_BEGIN_S = 120.0  # the first one has torch imported
_starting = threading.Lock()


@dataclass(frozen=True)
class Outcome:
    """What each process printed, its exit status (None: it had to be killed), and the seconds until the last ended."""

    texts: tuple[str, ...]
    exits: tuple[int | None, ...]
    seconds: float

    @property
    def text(self) -> str:
        """What all printed, with ranks told apart."""
        if len(self.texts) == 1:
            return self.texts[0]
        lines = [f"[rank {i}] {line}" for i, text in enumerate(self.texts) for line in text.splitlines()]
        return "\n".join(lines)


def play(mistake: Mistake) -> Outcome:
    """Makes it; nothing is left behind."""
    with World(mistake.nodes, forks=not mistake.user) as world:
        if mistake.before:
            world.shell(world.filled(mistake.before))
        exits, seconds = _shell(mistake, world) if mistake.is_shell else _python(mistake, world)
        texts = tuple(_text(world, rank) for rank in range(len(exits)))
    return Outcome(texts, exits, seconds)


def _log(world: World, rank: int) -> str:
    return os.path.join(world.bin, f"rank{rank}.log")


def _text(world: World, rank: int) -> str:
    with open(_log(world, rank), encoding="utf-8", errors="replace") as file:
        return file.read().replace(world.place, "/place")


@functools.cache
def _await_forks() -> None:
    """Until the server that forks has torch: it is no time of a mistake's."""
    pythons.run([sys.executable, "-c", "import torch"], check=True)


def _shell(mistake: Mistake, world: World) -> tuple[tuple[int | None, ...], float]:
    _await_forks()
    forked = {} if mistake.user or mistake.own_processes else pythons.with_forks()
    environ = world.environ(extra=forked | mistake.environ)
    began = time.monotonic()
    typed = mistake.typed[2:].replace("\n$ ", "\n")
    with open(_log(world, 0), "wb") as log:
        process = subprocess.Popen(
            [*(_AS_USER if mistake.user else ()), "/bin/bash", "-c", world.filled(typed)],
            cwd=world.home, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            start_new_session=True,
        )  # fmt: skip
    try:
        return (process.wait(mistake.within_s),), time.monotonic() - began
    except subprocess.TimeoutExpired:
        return (None,), mistake.within_s
    finally:
        _kill_session(process.pid)
        process.wait()


def _python(mistake: Mistake, world: World) -> tuple[tuple[int | None, ...], float]:
    script = os.path.join(world.home, "train.py")
    with open(script, "w", encoding="utf-8") as file:
        file.write(PREAMBLE + world.filled(mistake.typed))
    shared = _launched(mistake.ranks) if mistake.ranks > 1 else {}
    begun = []
    interpreter = sys.executable if mistake.user or mistake.own_processes else pythons.shim()
    for rank in range(mistake.ranks):
        node = rank * mistake.nodes // mistake.ranks
        variables = world.environ(node, {**shared, **({"RANK": str(rank)} if shared else {}), **mistake.environ})
        with _starting:
            begun.append(forks.start(_run, variables, _log(world, rank), world.home, mistake.user, interpreter))
    wait_for(lambda: all(os.path.exists(_log(world, rank)) for rank in range(mistake.ranks)), _BEGIN_S)
    began = time.monotonic()
    exits = tuple(_exit_of(process, began + mistake.within_s) for process in begun)
    seconds = time.monotonic() - began
    for process, status in zip(begun, exits, strict=True):
        if status is None:
            process.kill()
            _exit_of(process, time.monotonic() + _BEGIN_S)
    return exits, seconds


def _exit_of(process: BaseProcess, until: float) -> int | None:
    """Its exit status, None if it runs on. Under the lock: whoever starts a process asks after all, once for each."""
    while True:
        with _starting:
            status = process.exitcode
        if status is not None or time.monotonic() >= until:
            return status
        wait([process.sentinel], min(0.5, max(0.0, until - time.monotonic())))


def _launched(ranks: int) -> dict[str, str]:
    """What a launcher sets, before init_process_group."""
    port = free_port()
    return {
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": f"run{port}",
        "LOCAL_WORLD_SIZE": str(ranks),
    }


def _kill_session(session: int) -> None:
    """What a shell of ours left running: each process of its session."""
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if os.getsid(int(name)) == session:
                os.kill(int(name), signal.SIGKILL)


def _run(variables: dict[str, str], log: str, home: str, user: bool, interpreter: str) -> None:
    """In a forked process that has torch already: as `python train.py` from here on, down to its end."""
    os.setsid()
    out = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.close(out)
    forks.begin({})
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(home)
    if user:
        _drop_roots_rights()
    warnings.resetwarnings()
    warnings.simplefilter("default")
    sys.executable = interpreter
    sys.argv = ["train.py"]
    sys.path.insert(0, home)
    status = _status_of_script()
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _drop_roots_rights() -> None:
    """Here and in all that is started from here; nothing where this is an ordinary user already."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    words = (ctypes.c_uint32 * 6)()
    assert libc.capget(header, words) == 0, os.strerror(ctypes.get_errno())
    if os.geteuid() == 0:
        for capability in _PASSES_BY:
            assert libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) == 0, os.strerror(ctypes.get_errno())
            for word in range(3):  # effective, permitted, inheritable
                words[word] &= ~(1 << capability)
        assert libc.capset(header, words) == 0, os.strerror(ctypes.get_errno())


def _status_of_script() -> int:
    try:
        runpy.run_path("train.py", run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != "train.py":
            trace = trace.tb_next
        traceback.print_exception(error.with_traceback(trace))
        return 1
    return 0
