"""A bit of a file that turns over: what a bad disk, or bad memory, does."""

import os
from pathlib import Path


def flip(path: Path | str, at: int, bit: int = 4) -> None:
    """at: of the byte; from the end where it is negative."""
    with open(path, "r+b", buffering=0) as file:
        at = file.seek(at, os.SEEK_END if at < 0 else os.SEEK_SET)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << bit]))
