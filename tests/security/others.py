"""Another user of the same machine: a process of another uid, without root's rights and without groups."""

import contextlib
import json
import os
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
STRANGER = 65534


def a_free_uid() -> int:
    """One that has no process and no arena."""
    for uid in range(40_000 + os.getpid() % 10_000, 60_000):
        if not os.path.lexists(f"/dev/shm/ckptd-{uid}"):
            return uid
    raise AssertionError("no uid is free")


def as_user(call: Callable[..., Any], *args: Any, uid: int = STRANGER) -> Any:
    """What call(*args) returns in a process of that user; must go through JSON. A failure there is one here."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            os.close(ours)
            _say(theirs, _carry_out(call, args, uid))
        os._exit(0)
    os.close(theirs)
    with os.fdopen(ours, "rb") as pipe:
        said = pipe.read()
    os.waitpid(pid, 0)
    assert said, "the other user's process ended without a word"
    good, value = json.loads(said)
    assert good, value
    return value


@contextlib.contextmanager
def acting_as(uid: int = STRANGER) -> Iterator[None]:
    """This process has that user's rights on files inside: cheaper than a process, for tests with no other thread."""
    groups = os.getgroups()
    os.setgroups([])
    os.setegid(uid)
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(groups)


def _carry_out(call: Callable[..., Any], args: tuple[Any, ...], uid: int) -> tuple[bool, Any]:
    try:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        return True, call(*args)
    except BaseException:
        return False, traceback.format_exc()


def _say(pipe: int, words: tuple[bool, Any]) -> None:
    with os.fdopen(pipe, "wb") as file:
        file.write(json.dumps(words).encode())


def errno_of(call: Callable[..., Any], *args: Any) -> int:
    """Of the OSError that it raises; 0 when it raises none."""
    try:
        call(*args)
    except OSError as error:
        return error.errno or -1
    return 0
