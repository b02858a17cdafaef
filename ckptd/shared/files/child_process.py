"""How a process of ckptd starts another one: with its own interpreter and from its own copy of the code."""

import os
import site
import subprocess
import sys

import ckptd

_GRACE_S = 0.5


def command(module: str, *arguments: str) -> list[str]:
    """The command line of ``python -m module``. -P: a file in the current directory is no module of ckptd's."""
    return [sys.executable, "-P", "-m", module, *arguments]


def environment() -> dict[str, str]:
    """This process's variables, with the directory of its ckptd first in PYTHONPATH where it is not installed.

    Where it is, the interpreter finds it, and the other packages there must not come before Python's own.
    """
    root = os.path.dirname(os.path.dirname(os.path.abspath(ckptd.__file__)))
    if root in (*site.getsitepackages(), site.getusersitepackages()):
        return dict(os.environ)
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}


def told_within(seconds: float, module: str, *arguments: str) -> tuple[bytes, bool]:
    """What ``python -m module`` printed by then, and whether it had ended. Blocks for that long, and half a second.

    For calls into a mount that may hang: a child that is stuck in the kernel is left to die later. Raises OSError.
    """
    child = subprocess.Popen(
        command(module, *arguments),
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    try:
        return child.communicate(timeout=seconds)[0], True
    except subprocess.TimeoutExpired:
        child.kill()
        return _last_words(child), False


def _last_words(child: "subprocess.Popen[bytes]") -> bytes:
    """Output of a killed child. One stuck in the kernel outlives SIGKILL."""
    try:
        output, _ = child.communicate(timeout=_GRACE_S)
    except subprocess.TimeoutExpired as error:
        if child.stdout is not None:
            child.stdout.close()
        return error.output or b""
    return output
