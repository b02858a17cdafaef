"""``make unit``: a plugin of pytest. A test that starts a process, or opens a socket, fails with the reason."""

import sys
from typing import Any

import pytest

_KEPT_OUT = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec", "socket.bind", "socket.connect"}
_now: list[str] = []  # the test that runs
_installed: list[bool] = []  # a hook of the interpreter's is never taken out again


def _hear(event: str, _arguments: tuple[Any, ...]) -> None:
    if _now and event in _KEPT_OUT:
        raise RuntimeError(
            f"{event} in {_now[-1]}: what is in UNIT of the Makefile starts no process and no connection"
        )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Any:
    """Looks on while a test runs, and at no other time: xdist has processes of its own."""
    if not _installed:
        sys.addaudithook(_hear)
        _installed.append(True)
    _now.append(item.nodeid)
    try:
        return (yield)
    finally:
        _now.pop()
