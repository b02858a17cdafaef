"""One mistake of a new user: what is typed, and what must be read afterwards."""

import re
from dataclasses import dataclass, field

PREAMBLE = """\
import os, time
import torch
import ckptd_client
from ckptd_client import connect

elsewhere = os.system  # what is typed in another terminal meanwhile
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters())
state = {"model": model, "optimizer": optimizer}
"""
"""Runs before what is typed, where that is Python."""


@dataclass(frozen=True, kw_only=True)
class Mistake:
    """What is typed, and which regular expressions the output must match. ``$STORE`` and the like stand for paths.

    typed: Python after PREAMBLE, or shell where it begins with "$ ". In both ``daemon-pid`` is a command.
    cause, place, hint: what is wrong; in which call, step, key, file or rank; what the user types next.
    """

    name: str
    typed: str
    cause: str
    place: str
    hint: str
    before: str = ""
    """Shell that makes the circumstances, before anything is typed."""
    ends: int | tuple[int, ...] = 1
    """Exit status, of all ranks or of each. Negative: the signal."""
    ranks: int = 1
    nodes: int = 1
    within_s: float = 90.0
    never: str = ""
    """What the output must not match."""
    raises: tuple[str, ...] = ()
    """Exceptions that are not ckptd's, and that may end it all the same."""
    environ: dict[str, str | None] = field(default_factory=dict)
    user: bool = False
    """Whether root is made to heed the modes of files, as an ordinary user must."""
    own_processes: bool = False
    """Whether what it starts must be children of it, and have its limits: no daemon of it is forked by the tests."""
    needs_root: bool = False
    waits_for: str = ""
    """The item of work that has still to be done for it."""

    def __post_init__(self) -> None:
        for pattern in (self.cause, self.place, self.hint, self.never):
            re.compile(pattern)

    @property
    def is_shell(self) -> bool:
        """Whether a shell runs it."""
        return self.typed.startswith("$ ")

    @property
    def exits(self) -> tuple[int, ...]:
        """The exit status of each process."""
        return self.ends if isinstance(self.ends, tuple) else (self.ends,) * self.ranks
