"""Small records in an arena, msgpack each: written in one piece, also where memory is full, and read with a limit."""

import contextlib
import logging
import os
from typing import TypeVar

import msgspec

from ckptd.shared.base.decoding import MALFORMED
from ckptd.shared.base.log_line import line
from ckptd.shared.files import spare_pages
from ckptd.shared.files.regular import contents

log = logging.getLogger("ckptd")
T = TypeVar("T")


def put_record(arena: str, path: str, record: object) -> None:
    """Writes it in one piece, or leaves the one before. Where memory is full it takes spare pages. Raises OSError."""
    raw = msgspec.msgpack.encode(record)
    spare_pages.write(arena, lambda: _put(path, raw))


def record_at(path: str, kind: type[T], most_nbytes: int, fault: str) -> T | None:
    """The record; None when there is none, or none that is whole: the log then says the fault."""
    try:
        return msgspec.msgpack.decode(contents(path, most_nbytes), type=kind)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, *MALFORMED) as error:
        log.warning(line(fault, path=path, error=error))
        return None


def _put(path: str, raw: bytes) -> None:
    new = f"{path}.new"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(new)
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(raw)
    os.replace(new, path)
