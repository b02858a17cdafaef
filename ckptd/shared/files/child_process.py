"""How a process of ckptd starts another one: with its own interpreter and from its own copy of the code."""

import os
import sys

import ckptd


def command(module: str, *arguments: str) -> list[str]:
    """The command line of ``python -m module``. -P: a file in the current directory is no module of ckptd's."""
    return [sys.executable, "-P", "-m", module, *arguments]


def environment() -> dict[str, str]:
    """This process's variables, with the directory of its ckptd first in PYTHONPATH, installed or not."""
    paths = [os.path.dirname(os.path.dirname(os.path.abspath(ckptd.__file__))), os.environ.get("PYTHONPATH")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
