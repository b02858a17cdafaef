"""A process that has imported what tests' processes need, and forks one per request, which then is what it was asked.

python python_server.py LISTENER LIFE PADDING MODULE...    both descriptors; tests/pythons.py starts and asks it

A request is a connection: JSON in a frame, with the descriptors that the process is to have. The answers are its pid
and, when it has ended, its status as of waitpid. A process whose connection is closed first is killed.
"""

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import io
import json
import os
import random
import runpy
import select
import signal
import socket
import struct
import sys
import tempfile
import threading
import traceback
import types
import warnings
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

HEAD = struct.Struct("<I")  # bytes of a request, a pid
STATUS = struct.Struct("<i")
MOST_FDS = 64
_ABOVE = 512  # no descriptor that a test hands over has a number from here on
EXECUTABLE = "TESTS_PYTHON"  # the variable of what the process is to take for its interpreter
_PROGRAMS = (
    "ckptd.store.worker",
    "ckptd.doctor.probe_store",
)  # imported for what they import; python -m runs them again
_READS_ENVIRONMENT = "ckptd.system.failpoints"  # when it is imported
_HUGE_NBYTES = 2 << 20
_HUNG_UP = select.POLLRDHUP | select.POLLHUP | select.POLLERR


class Command(NamedTuple):
    """What a command line of Python's asks for."""

    kind: str  # "-c", "-m", or "" for a file
    what: str  # code, module, path
    words: tuple[str, ...]  # sys.argv[1:]
    safe_path: bool = False
    unbuffered: bool = False
    warnings: tuple[str, ...] = ()


def parse(words: Sequence[str]) -> Command | None:
    """The words after the interpreter's name; None for what only an interpreter of its own can do."""
    rest, chosen = list(words), []
    safe_path = unbuffered = False
    while rest:
        word = rest.pop(0)
        match word:
            case "-P":
                safe_path = True
            case "-u":
                unbuffered = True
            case "-W" if rest:
                chosen.append(rest.pop(0))
            case "-c" | "-m" if rest:
                return Command(word, rest[0], tuple(rest[1:]), safe_path, unbuffered, tuple(chosen))
            case _ if not word.startswith("-"):
                return Command("", word, tuple(rest), safe_path, unbuffered, tuple(chosen))
            case _:
                return None
    return None


def is_daemon(command: Command) -> bool:
    """Whether it is ckptd: a daemon, behind a relay too, or another command."""
    return command[:2] == ("-m", "ckptd") or command.what.endswith("/tests/faults/nodes/relayed.py")


def umask() -> int:
    """Of this process; os.umask can only be asked by a change."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        return next(int(line.split()[1], 8) for line in file if line.startswith("Umask:"))


def serve(listener: socket.socket, life: int) -> None:
    """Forks until whoever started it is gone."""
    paths = [path for path in sys.path if path not in os.environ["PYTHONPATH"].split(os.pathsep)]
    folder = os.path.dirname(listener.getsockname())
    ends: dict[int, tuple[int, socket.socket]] = {}  # pidfd -> process
    fds: dict[int, int] = {}  # connection -> pidfd
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    poll.register(life, select.POLLIN)
    while True:
        for fd, _event in poll.poll()[:1]:  # what it leads to may give a number of a descriptor to another
            if fd == life:
                os._exit(0)
            if fd == listener.fileno():
                conn, _ = listener.accept()
                pid = os.fork()
                if pid == 0:
                    _become(conn, paths, folder)
                pidfd = os.pidfd_open(pid)
                ends[pidfd], fds[conn.fileno()] = (pid, conn), pidfd
                poll.register(pidfd, select.POLLIN)
                poll.register(conn, _HUNG_UP)
                _send(conn, HEAD.pack(pid))
            elif fd in ends:
                pid, conn = ends.pop(fd)
                poll.unregister(fd)
                os.close(fd)
                if fds.pop(conn.fileno(), None) is not None:
                    poll.unregister(conn)
                _send(conn, STATUS.pack(os.waitpid(pid, 0)[1]))
                conn.close()
            elif fd in fds:
                poll.unregister(fd)
                os.kill(ends[fds.pop(fd)][0], signal.SIGKILL)


def _send(conn: socket.socket, data: bytes) -> None:
    with contextlib.suppress(OSError):  # nobody asks any more
        conn.sendall(data, socket.MSG_NOSIGNAL)


# --- over there


def _become(conn: socket.socket, paths: list[str], folder: str) -> NoReturn:
    """The process that was asked for, down to its end."""
    status = 1
    try:
        request, received = _receive(conn)
        conn.detach()
        _take_fds(dict(zip(request["fds"], received, strict=True)))
        os.chdir(request["cwd"])
        os.environ.clear()
        os.environ.update(request["env"])
        os.umask(request["umask"])
        if request["session"]:
            os.setsid()
        command = parse(request["argv"][1:])
        assert command is not None
        _show_argv(request["argv"])
        _open_streams(unbuffered=command.unbuffered or bool(os.environ.get("PYTHONUNBUFFERED")))
        _reset(command, paths)
        _adopt(request.get("parent"), command, folder)
        status = _status_of(command)
        status = _finish(status)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _adopt(parent: int | None, command: Command, folder: str) -> None:
    """Its parent is whoever asked for it, with whom it ends; what a daemon or a command starts is forked as well."""
    if parent is not None:
        os.getppid = lambda: parent
    if is_daemon(command):
        importlib.import_module("tests.pythons").forked_by(folder)


def _receive(conn: socket.socket) -> tuple[dict[str, Any], list[int]]:
    data, fds, _, _ = socket.recv_fds(conn, 1 << 16, MOST_FDS)
    while len(data) < HEAD.size or len(data) < HEAD.size + HEAD.unpack_from(data)[0]:
        more = conn.recv(1 << 20)
        if not more:
            os._exit(1)
        data += more
    return json.loads(data[HEAD.size :]), fds


def _take_fds(wanted: dict[int, int]) -> None:
    """The descriptors of the request under the numbers that it names, and no other."""
    high = {target: fcntl.fcntl(fd, fcntl.F_DUPFD, _ABOVE) for target, fd in wanted.items()}
    os.closerange(3, _ABOVE)
    for target, fd in high.items():
        os.dup2(fd, target, inheritable=True)
        os.close(fd)


def _show_argv(argv: list[str]) -> None:
    """In /proc/PID/cmdline, where tests and people look for processes: over the padding that the server began with."""
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    first, last = int(fields[45]), int(fields[46])
    text = b"".join(os.fsencode(word) + b"\0" for word in argv)[: last - first - 1]
    ctypes.memmove(first, text.ljust(last - first, b"\0"), last - first)


def _open_streams(*, unbuffered: bool) -> None:
    """As an interpreter that starts does."""
    for fd, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        raw = open(fd, mode + "b", buffering=0 if unbuffered and fd else -1, closefd=False)  # noqa: SIM115 - for the life of the process
        errors = "backslashreplace" if fd == 2 else "strict"
        lines = fd == 2 or raw.isatty()
        stream = io.TextIOWrapper(raw, "utf-8", errors, line_buffering=lines, write_through=unbuffered and fd > 0)
        stream.mode = mode
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _reset(command: Command, paths: list[str]) -> None:
    """What an interpreter derives from its command line and its environment."""
    folder = {"-c": "", "-m": os.getcwd(), "": os.path.dirname(os.path.realpath(command.what))}[command.kind]
    safe_path = command.safe_path or bool(os.environ.get("PYTHONSAFEPATH"))
    given = list(filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))
    sys.path[:] = [*([] if safe_path else [folder]), *given, *paths]
    sys.argv = [command.kind or command.what, *command.words]
    warnings._processoptions([*filter(None, os.environ.get("PYTHONWARNINGS", "").split(",")), *command.warnings])
    sys.executable = os.environ.pop(EXECUTABLE, sys.executable)
    random.seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    tempfile.tempdir = None
    if "multiprocessing.process" in sys.modules:
        sys.modules["multiprocessing.process"].ORIGINAL_DIR = os.getcwd()  # where what it spawns looks for its program
    if _READS_ENVIRONMENT in sys.modules:
        importlib.reload(sys.modules[_READS_ENVIRONMENT])
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main


def _status_of(command: Command) -> int:
    """The exit status of the program, with what is printed for an exception."""
    names = sys.modules["__main__"].__dict__
    try:
        if command.kind == "-m":
            runpy._run_module_as_main(command.what)
        elif command.kind == "-c":
            exec(compile(command.what, "<string>", "exec"), names)  # noqa: S102 - the program
        else:
            with open(command.what, "rb") as file:
                code = compile(file.read(), command.what, "exec", dont_inherit=True)
            names["__file__"], names["__cached__"] = command.what, None
            exec(code, names)  # noqa: S102 - the program
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        print(end.code, file=sys.stderr)
        return 1
    except BaseException as error:
        trace = error.__traceback__.tb_next if error.__traceback__ else None
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _finish(status: int) -> int:
    """What an interpreter does at its end, but for the objects that are left."""
    threading._shutdown()
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError) as error:
        if not isinstance(error, ValueError):
            return 120
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized():
        if not mpi.Is_finalized():
            mpi.Finalize()
        ctypes.CDLL(None).exit(status)  # with what MPI has registered there
    return status


def main() -> None:
    """Imports what is named, then serves."""
    listener, life = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    gc.disable()  # what imports make stays: there is no garbage to look for
    for name in sys.argv[4:]:
        importlib.import_module(name)
    for name in _PROGRAMS:
        sys.modules.pop(name, None)
    assert len(os.listdir("/proc/self/task")) == 1, "a thread is not forked"
    for finalizer in list(weakref.finalize._registry):
        finalizer.atexit = False  # torch's dispatcher taken to pieces is most of what an end costs
    gc.collect()
    gc.freeze()
    gc.enable()
    _end_heap_at_huge_page()
    serve(listener, life)


def _end_heap_at_huge_page() -> None:
    """The heap of a fork is a mapping that grows no more, and another one behind it: no huge page lies in both."""
    libc = ctypes.CDLL(None)
    libc.sbrk.restype, libc.sbrk.argtypes = ctypes.c_void_p, (ctypes.c_ssize_t,)
    libc.sbrk(-libc.sbrk(0) % _HUGE_NBYTES)


if __name__ == "__main__":
    main()
