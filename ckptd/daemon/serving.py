"""A daemon in this process: from its settings to its exit status, or one line of why it does not start."""

import contextlib
import gc
import os
import resource
import sys

from ckptd.daemon.loop import Daemon
from ckptd.shared.base.errors import ConfigError
from ckptd.shared.files import spare_pages
from ckptd.system.config import Config
from ckptd.system.logs import configure

_MAX_FILES = 65536


def _raise_file_limit() -> None:
    """A coordinator has three descriptors for each other node."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def run(config: Config) -> int:
    """The daemon in the foreground; returns its exit status. Raises ConfigError when it cannot start."""
    configure(config.log_level)
    _raise_file_limit()
    try:
        with spare_pages.told_when_full(config.arena, "the daemon's small files"):
            daemon = Daemon(config)
    except OSError as error:
        text = f"the daemon cannot start: {error.filename or config.arena}: {error.strerror or error}"
        raise ConfigError(text, hint="ckptd doctor looks at the arena and at what it lies in") from None
    gc.freeze()  # what was imported stays: no collection in a turn of the loop looks through it
    status = daemon.run()
    with contextlib.suppress(OSError):  # the log may lie in a memory that is full
        sys.stderr.flush()
    os._exit(status)  # a thread that blocks in a hung file system must not hold the process
