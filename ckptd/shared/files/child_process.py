"""How a process of ckptd starts another one: with its own interpreter and from its own copy of the code."""

import os
import site
import sys

import ckptd


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
