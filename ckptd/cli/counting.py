"""How far a verb has come that reads or writes many bytes, drawn while it runs."""

import contextlib
from collections.abc import Iterator
from typing import Protocol

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from ckptd.cli import common


class Count(Protocol):
    """Receives the bytes done so far, and in all once that is known."""

    def __call__(self, done: int, total: int | None = None) -> None:
        """Draws it."""


@contextlib.contextmanager
def counting(title: str, *, quiet: bool) -> Iterator[Count]:
    """Draws on stderr, if that is a terminal; nothing is left there at the end."""
    console = common.console(stderr=True)
    if quiet or not console.is_terminal:
        yield lambda _done, _total=None: None
        return
    columns = (
        TextColumn(title), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(),
        TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(title, total=None)
        yield lambda done, total=None: progress.update(task, completed=done, total=total)
