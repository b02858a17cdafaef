"""A verb of the command line, in this process."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptd import cli

Verb = Callable[..., tuple[int, str, str]]


def in_process(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, home: Path, **environ: str) -> Verb:
    """ckptd(*args) -> (exit code, stdout, stderr), in an environment without settings, and with these variables."""
    for name in [name for name in os.environ if name.startswith("CKPTD_")]:
        monkeypatch.delenv(name)
    for name, value in {"HOME": str(home), **environ}.items():
        monkeypatch.setenv(name, value)

    def run(*args: object) -> tuple[int, str, str]:
        code = cli.invoke([str(arg) for arg in args])
        out, err = capsys.readouterr()
        return code, out, err

    return run
