"""Python processes for tests, forked from a server that has imported what they need: they are there in a moment.

``Popen`` and ``run`` are subprocess's. A command that begins with this interpreter, and asks it for nothing but a
program, becomes a fork; any other is carried out as it is. A test of how an interpreter starts or ends uses subprocess.
Where several processes run tests, the first of them has servers of which the others and their servers are forked, so
that what all of them need is imported once.
"""

import atexit
import functools
import json
import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tests.python_server import EXECUTABLE, HEAD, MOST_FDS, STATUS, Command, is_daemon, parse, umask

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
CODE = os.pathsep.join((ROOT, os.path.join(ROOT, "client")))  # where a process finds ckptd and the client of this tree
ENVIRON = {"PYTHONPATH": CODE, "OMP_NUM_THREADS": "1"}
_PADDING = " " * 8000  # room for the words that /proc shows of a process
_LISTENING = 128
_MPIEXEC, _TORCHRUN = "mpiexec", "torch.distributed.run"
_MODULES = {
    "plain": (
        "ckptd.cli", "ckptd.cli.run", "ckptd.cli.status", "ckptd.cli.drain", "ckptd.cli.listing", "ckptd.cli.verify",
        "ckptd.daemon.serving", "ckptd.store.worker", "ckptd.store.posix.store", "ckptd.doctor.probe_store",
        "encodings.ascii", "encodings.idna", "numpy", "rich.console", "rich.table",
        "tests.pythons",
    ),
    "torch": (
        "torch", "torch.distributed.checkpoint", "torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp",
        "torch.distributed.tensor.parallel", "torch.utils.data", "torch.distributed.launcher.api", "torch._dynamo",
        "torch.utils.serialization.config", "fsspec.core", "msgpack", "numpy.random", "pytest", "safetensors.torch",
        "ckptd_client", "ckptd_client.dcp", "ckptd.parity.encode", "ckptd.parity.rebuild", "tests.faults.nodes.trainer",
        "tests.faults.nodes.zygote", "tests.interop.launch", "tests.mistakes.play",
    ),
    "tests": ("tests.collected",),
}  # fmt: skip
_BEGINS_AS = {"tests": "torch"}  # the kind of server that this kind is forked of
ASKED = "TESTS_ASKED_FOR"  # the variable with the words that name tests, for tests/collected.py
_FOLDER = "TESTS_PYTHONS"  # the variable that says where the sockets of the servers are
_KIND = "TESTS_PYTHON_KIND"  # that names the kind of server to the shim
_FIRST = "TESTS_FIRST_PYTHONS"  # and where those are of which others are forked


def inherited(*left_out: str) -> dict[str, str]:
    """Variables of this process but those that begin so; another thread may change them meanwhile, as pytest does."""
    found = {name: os.environ.get(name) for name in list(os.environ) if not name.startswith(left_out)}
    return {name: value for name, value in found.items() if value is not None}


class _Server(NamedTuple):
    """One that this process started: it ends when its life, a descriptor, is closed."""

    pid: int
    life: int
    wait: Callable[[], object]


class _Servers:
    """One of each kind, started when it is first asked for something; those of the process that had this one forked."""

    def __init__(self) -> None:
        self._starting = threading.RLock()
        self._owner = 0
        self._folder = ""
        self._started: list[_Server] = []

    def folder(self) -> str:
        """Where their sockets are: another process of these tests that is given it asks the same ones."""
        if self._owner != os.getpid():
            self._owner, self._started = os.getpid(), []
            self._folder = os.environ.get(_FOLDER, "")
            if not os.path.isdir(self._folder):
                self._folder = tempfile.mkdtemp(prefix="ckptd-pythons-")
                atexit.register(self._forget, self._owner, self._folder)
        return self._folder

    def belong_to(self, folder: str) -> None:
        """This process was forked by a server whose socket is in this folder: it asks the same ones."""
        self._owner, self._started, self._folder = os.getpid(), [], folder

    def shim(self) -> str:
        """The path of a program that takes an interpreter's arguments, and has a server fork it."""
        for kind in ("plain", "torch"):
            path = os.path.join(os.path.dirname(self._socket(kind)), "python")
        if not os.path.exists(path):
            with open(os.path.join(os.path.dirname(__file__), "python_shim.py"), encoding="utf-8") as file:
                text = file.read()
            made = f"{path}.{os.getpid()}-{threading.get_ident()}"  # others may do the same at the same time
            with open(made, "w", encoding="utf-8") as file:
                file.write(f"#!{sys.executable} -SE\n{text}")
            os.chmod(made, 0o700)
            os.rename(made, path)
        return path

    def ask(self, kind: str, request: dict[str, Any], fds: Sequence[int]) -> tuple[int, socket.socket]:
        """Pid and connection of a process that it forks."""
        return _ask(self._socket(kind), request, fds)

    def own(self) -> list[int]:
        """Pids of those that this process started."""
        return [server.pid for server in self._started] if self._owner == os.getpid() else []

    def have_collected(self, asked: Sequence[str]) -> None:
        """Has a server with the tests that are asked for; those of processes that this one starts are forked of its."""
        os.environ[ASKED] = json.dumps(list(asked))
        self._socket("tests")
        del os.environ[ASKED]
        os.environ[_FIRST] = self.folder()

    def _socket(self, kind: str) -> str:
        with self._starting:
            path = os.path.join(self.folder(), kind)
            if not os.path.exists(path):
                self._start(kind, path)
            return path

    def _origin(self, kind: str) -> str:
        """The socket of the server of which one of this kind is forked, where there is one."""
        if kind in _BEGINS_AS:
            return self._socket(_BEGINS_AS[kind])
        path = os.path.join(os.environ.get(_FIRST, ""), kind)
        return path if os.path.exists(path) else ""

    def _start(self, kind: str, path: str) -> None:
        environ = inherited("CKPTD_", "NOTIFY_", "WATCHDOG_", "PYTHONW") | ENVIRON
        environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(os.path.dirname(path), "inductor")
        origin = self._origin(kind)
        theirs, ours = os.pipe()
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen(_LISTENING)
            fds = [listener.fileno(), theirs]
            program = os.path.join(os.path.dirname(__file__), "python_server.py")
            argv = [sys.executable, "-P", program, *map(str, fds), _PADDING]
            argv += _MODULES[kind] if kind in _BEGINS_AS or not origin else ()
            if origin:
                request = {"argv": argv, "env": environ, "cwd": ROOT, "session": False, "umask": umask(), "fds": fds}
                pid, conn = _ask(origin, request, fds)
                server = _Server(pid, ours, functools.partial(_wait, conn))
            else:
                process = subprocess.Popen(argv, env=environ, stdin=subprocess.DEVNULL, pass_fds=fds, cwd=ROOT)
                server = _Server(process.pid, ours, process.wait)
        os.close(theirs)
        self._started.append(server)

    def _forget(self, owner: int, folder: str) -> None:
        if owner == os.getpid():
            for server in self._started:
                os.close(server.life)
                server.wait()
            shutil.rmtree(folder)


def _ask(path: str, request: dict[str, Any], fds: Sequence[int]) -> tuple[int, socket.socket]:
    """Pid and connection of a process that the server at a socket forks."""
    data = json.dumps(request).encode()
    conn = socket.socket(socket.AF_UNIX)
    try:
        conn.connect(path)
        sent = socket.send_fds(conn, [HEAD.pack(len(data))], list(fds))
        assert sent == HEAD.size
        conn.sendall(data)
        (pid,) = HEAD.unpack(conn.recv(HEAD.size, socket.MSG_WAITALL))
    except BaseException:
        conn.close()
        raise
    return pid, conn


def _wait(conn: socket.socket) -> None:
    with conn:
        conn.recv(STATUS.size)


_servers = _Servers()


def fork_workers(asked: Sequence[str]) -> str:
    """The interpreter, in a shell's words, of pytest's workers, which are forked with the tests that are asked for.

    Their own servers are forked of this process's.
    """
    _servers.have_collected(asked)
    return f"env {_KIND}=tests {_servers.shim()}"


def servers() -> list[int]:
    """Pids of this process's own, which may be another's children."""
    return _servers.own()


def forked_by(folder: str) -> None:
    """What a daemon or a command starts is forked as well, by the servers whose sockets are in this folder."""
    _servers.belong_to(folder)
    subprocess.Popen = Popen  # type: ignore[misc]


def shim() -> str:
    """What a launcher is given in place of sys.executable, so that its ranks are forked too."""
    return _servers.shim()


def with_forks() -> dict[str, str]:
    """Variables of a program whose own Python processes are to be forked too, where it starts sys.executable."""
    return {EXECUTABLE: shim()}


def _kind_of(command: Command) -> str:
    """The daemon's side never has torch."""
    if command.kind == "-m":
        plain = command.what == "ckptd" or command.what.startswith("ckptd.")
    elif command.kind == "":
        plain = is_daemon(command)
    else:
        plain = not any(name in command.what for name in ("torch", "ckptd_client", "tests."))
    return "plain" if plain else "torch"


def _is_other_code(environ: Mapping[str, str]) -> bool:
    """Whether modules are looked for elsewhere before they are in this tree: the servers have this tree's."""
    return environ.get("PYTHONPATH", ROOT).split(os.pathsep)[0] not in ("", ROOT)


class Popen(subprocess.Popen[Any]):
    """subprocess.Popen; the process is no child of this one, but the server's, and ends with this one."""

    _conn: socket.socket | None = None

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, close_fds: bool, *more: Any) -> None:
        pass_fds, cwd, env, _startup, _flags, shell, *rest = more
        pipes, (_signals, gid, gids, uid, asked_umask, session, group) = rest[:6], rest[6:]
        plain = preexec_fn is None and not shell and executable is None and close_fds and asked_umask == -1
        plain = plain and (gid, gids, uid) == (None, None, None) and group in (None, -1) and not isinstance(args, str)
        words = [os.fsdecode(word) for word in args] if plain else []
        command = parse(words[1:]) if words and words[0] == sys.executable else None
        if words and os.path.basename(words[0]) == _MPIEXEC:
            args = [shim() if word == sys.executable else word for word in words]
        environ = dict(os.environ) if env is None else {os.fsdecode(k): os.fsdecode(v) for k, v in env.items()}
        if command is None or len(pass_fds) > MOST_FDS - 3 or _is_other_code(environ):
            super()._execute_child(args, executable, preexec_fn, close_fds, *more)
            return
        streams = [pipe if pipe != -1 else fd for fd, pipe in enumerate((pipes[0], pipes[3], pipes[5]))]
        environ[_FOLDER] = _servers.folder()
        if command.what == _TORCHRUN:
            environ["PYTHON_EXEC"] = shim()
        request = {
            "argv": words, "env": environ, "cwd": os.path.abspath(os.fsdecode(cwd or ".")), "session": session,
            "umask": umask(), "fds": [0, 1, 2, *pass_fds], "parent": os.getpid(),
        }  # fmt: skip
        self.pid, self._conn = _servers.ask(_kind_of(command), request, [*streams, *pass_fds])
        self._child_created = True
        self._close_pipe_fds(*pipes)

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        """As waitpid, of a process whose status comes from the server."""
        if self._conn is None:
            return super()._try_wait(wait_flags)
        if wait_flags & os.WNOHANG and not select.select([self._conn], [], [], 0)[0]:
            return 0, 0
        data = self._conn.recv(STATUS.size, socket.MSG_WAITALL)
        self._conn.close()
        return self.pid, STATUS.unpack(data)[0] if data else 9

    def _internal_poll(self, _deadstate: Any = None, **_waits: Any) -> int | None:
        if self._conn is None:
            return super()._internal_poll(_deadstate)
        if self.returncode is None and self._waitpid_lock.acquire(blocking=False):
            try:
                if self.returncode is None and self._conn.fileno() >= 0:
                    pid, status = self._try_wait(os.WNOHANG)
                    if pid == self.pid:
                        self._handle_exitstatus(status)
            finally:
                self._waitpid_lock.release()
        return self.returncode


def run(
    words: Sequence[Any], *, capture_output: bool = False, check: bool = False, timeout: float | None = None,
    input: Any = None, **more: Any,  # noqa: A002 - subprocess's name
) -> subprocess.CompletedProcess[Any]:  # fmt: skip
    """subprocess.run."""
    if capture_output:
        more |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    if input is not None:
        more["stdin"] = subprocess.PIPE
    with Popen(words, **more) as process:
        try:
            out, errors = process.communicate(input, timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(words, process.returncode, out, errors)
    if check:
        done.check_returncode()
    return done
