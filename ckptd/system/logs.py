"""The daemon's log: one line per event on stderr, as journald and people want it.

An event is a few words and then facts, ``key=value``; a value that is not a plain word is quoted, with what is
not printable escaped, so that nothing that comes from outside can begin a line of its own. Under journald each line
begins with its priority (sd-daemon(3)) and has no time of its own: the journal keeps both.
"""

import contextlib
import json
import logging
import os
import sys
import time
from collections.abc import Mapping
from typing import TextIO

from ckptd.shared.base.log_line import quoted

_PRIORITIES = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3, logging.CRITICAL: 2}
_MAX_CHARS = 32 << 10  # of a line; journald breaks longer ones


class LineFormatter(logging.Formatter):
    """Each record one line, its traceback a fact of it."""

    def __init__(self, *, journal: bool) -> None:
        super().__init__()
        self._journal = journal

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        text = record.getMessage()
        if record.exc_info:
            text = f"{text} trace={quoted(self.formatException(record.exc_info))}"
        if not text.isprintable():
            text = "".join(char if char.isprintable() else json.dumps(char)[1:-1] for char in text)
        if len(text) > _MAX_CHARS:
            text = f"{text[:_MAX_CHARS]}... ({len(text)} characters)"
        if self._journal:
            return f"<{_PRIORITIES.get(record.levelno, 6)}>{text}"
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        return f"{at}.{int(record.msecs):03d}Z {record.levelname} {text}"


def is_journal(stream: TextIO, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether what is written to the stream goes to journald, as systemd says in JOURNAL_STREAM."""
    with contextlib.suppress(OSError, ValueError):
        found = os.fstat(stream.fileno())
        return environ.get("JOURNAL_STREAM") == f"{found.st_dev}:{found.st_ino}"
    return False


def configure(level: str, stream: TextIO = sys.stderr) -> None:
    """From now on everything is logged there. level: as in ``log_level``."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(LineFormatter(journal=is_journal(stream)))
    logging.basicConfig(level=level.upper(), handlers=[handler])
