"""What a program starts in place of an interpreter: has a server fork one, and is as alive as that is.

tests/pythons.py writes it beside the servers' sockets, with a first line that makes it a program.
"""

import contextlib
import json
import os
import signal
import socket
import struct
import sys
from typing import Any

_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def main() -> None:
    """Descriptors, variables and arguments go over; signals follow, and the status comes back."""
    kind = os.environ.pop("TESTS_PYTHON_KIND", "") or _kind()
    fds = sorted(int(name) for name in os.listdir("/proc/self/fd") if _is_inherited(int(name)))
    argv = [sys.executable, *sys.argv[1:]]
    mask = os.umask(0)
    os.umask(mask)
    request = {"argv": argv, "env": dict(os.environ), "cwd": os.getcwd(), "session": False, "umask": mask, "fds": fds}
    data = json.dumps(request).encode()
    conn = socket.socket(socket.AF_UNIX)
    conn.connect(os.path.join(os.path.dirname(__file__), kind))
    socket.send_fds(conn, [struct.pack("<I", len(data))], fds)
    conn.sendall(data)
    (pid,) = struct.unpack("<I", conn.recv(4, socket.MSG_WAITALL))

    def pass_on(number: int, _frame: Any) -> None:
        with contextlib.suppress(ProcessLookupError):  # it ends just now
            os.kill(pid, number)

    for number in _PASSED_ON:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, pass_on)
    (status,) = struct.unpack("<i", conn.recv(4, socket.MSG_WAITALL))
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status))


def _kind() -> str:
    """Of the server: the daemon's side has no torch."""
    words = iter(sys.argv[1:])
    module = next((next(words, "") for word in words if word == "-m"), "")
    return "plain" if module.split(".")[0] == "ckptd" else "torch"


def _is_inherited(fd: int) -> bool:
    try:
        return os.get_inheritable(fd) or fd < 3
    except OSError:
        return False


main()
