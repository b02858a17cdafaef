"""Prints the story: titles, lines with the time, commands with their output."""

import time

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.text import Text

from ckptd_client.demo import DemoError, report
from ckptd_client.demo.daemon import ckptd
from ckptd_client.demo.journal import Record, Saved, TorchSaved
from ckptd_client.demo.ranks import Ranks
from ckptd_client.demo.workspace import Workspace

_INDENT = 4


class Narrator:
    """Prints to the console, with the time since its construction."""

    def __init__(self, console: Console, space: Workspace) -> None:
        self._console = console
        self._space = space
        self._began = time.monotonic()

    def title(self, text: str) -> None:
        """Prints the title of an act."""
        self._console.print()
        self._console.rule(f"[bold]{text}", align="left")

    def say(self, text: str) -> None:
        """Prints a line of the story."""
        self._console.print(f"[dim]{time.monotonic() - self._began:5.1f} s[/]  {text}")

    def step(self, record: Record, ranks: Ranks) -> None:
        """Prints a line for a record of a save; nothing for other records of rank 0."""
        match record:
            case Saved(step=step, stall_s=seconds):
                what = f"ckptd took it over in {report.ms([seconds])}"
            case TorchSaved(step=step, seconds=seconds, synced_s=synced_s):
                what = f"torch.save: {report.ms([seconds])}, with fsync {report.ms([synced_s])}"
            case _:
                return
        loss = float.fromhex(report.losses(ranks.records[0])[step])
        self.say(f"step {step:3}  loss {loss:.4f}  [dim]{what}[/]")

    def show(self, *args: str, expected: int = 0) -> None:
        """Runs a ckptd command and prints it with its output. Raises DemoError for another exit code."""
        color = self._console.is_terminal and not self._console.no_color
        code, output = ckptd(self._space, *args, columns=self._console.width - _INDENT, color=color)
        self.say(f"[bold]$ ckptd {' '.join(args)}[/]")
        self.print(Text.from_ansi(output))
        if code != expected:
            raise DemoError(f"ckptd {args[0]} ended with exit code {code}, not {expected}")

    def print(self, what: RenderableType) -> None:
        """Prints a larger item, indented."""
        self._console.print(Padding(what, (0, 0, 0, _INDENT), expand=False))

    def blank(self) -> None:
        """Prints an empty line."""
        self._console.print()
