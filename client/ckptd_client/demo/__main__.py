"""A small GPT is trained on two nodes, killed twice, the second time with a node lost, and compared bit for bit."""

import argparse
import signal
import sys
from types import FrameType

from rich.console import Console
from rich.markup import escape

from ckptd_client.demo import DemoError
from ckptd_client.demo.orchestrate import Story
from ckptd_client.demo.plan import FULL, SHORT
from ckptd_client.demo.workspace import Workspace

_PIPED_COLUMNS = 110
_INTERRUPTED = 130


def main() -> int:
    """Runs the demo. Exit code 0: all promises hold; 1, with a message: one does not; 130: Ctrl-C."""
    parser = argparse.ArgumentParser(prog="ckptd demo", description=__doc__)
    parser.add_argument("--short", action="store_true", help=f"{SHORT.steps} steps instead of {FULL.steps}")
    plan = SHORT if parser.parse_args().short else FULL
    console = Console(highlight=False, width=None if sys.stdout.isatty() else _PIPED_COLUMNS)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    try:
        with Workspace() as space:
            Story(console, space, plan).run()
        console.print('Everything it made is removed. Next: "A first save" in README.md')
    except DemoError as error:
        console.print(f"[bold red]The demo failed:[/] {escape(str(error))}")
        return 1
    except KeyboardInterrupt:
        console.print("interrupted; nothing is left behind")
        return _INTERRUPTED
    return 0


def _interrupt(number: int, frame: FrameType | None) -> None:
    del number, frame
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
