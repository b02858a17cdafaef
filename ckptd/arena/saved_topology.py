"""The topology of each job, kept in the job's directory of the arena for the next process of this daemon."""

import contextlib
import logging
import os

import msgspec

from ckptd.shared.base.decoding import MALFORMED
from ckptd.shared.base.ids import Incarnation, JobKey, NodeName
from ckptd.shared.base.log_line import line
from ckptd.shared.files import spare_pages
from ckptd.shared.files.regular import contents
from ckptd.shared.format import arena_paths
from ckptd.shared.protocol.topology import Peer, Topology

log = logging.getLogger("ckptd")
_MAX_NBYTES = 64 << 20
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class Kept(msgspec.Struct, frozen=True, array_like=True):
    """What is kept of a job; epochs as in act.KeepTopology."""

    job: JobKey
    topology: Topology
    epoch: Incarnation
    since: Incarnation
    outside: tuple[Peer, ...] = ()
    former: tuple[NodeName, ...] = ()


def keep_topology(arena: str, kept: Kept) -> None:
    """Writes it in one piece, or leaves the one before. Raises OSError."""
    directory = os.path.join(arena, arena_paths.job_dir(kept.job))
    os.makedirs(directory, mode=0o700, exist_ok=True)
    path = os.path.join(directory, arena_paths.TOPOLOGY)
    raw = msgspec.msgpack.encode(kept)
    spare_pages.write(arena, lambda: _put(path, raw))


def _put(path: str, raw: bytes) -> None:
    fd = os.open(f"{path}.new", _FLAGS, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(raw)
    os.replace(f"{path}.new", path)


def kept_topologies(arena: str) -> list[Kept]:
    """What earlier daemons kept here. One that cannot be read is left out: ranks bring another."""
    found = []
    with contextlib.suppress(FileNotFoundError):
        for name in sorted(os.listdir(os.path.join(arena, arena_paths.JOBS))):
            path = os.path.join(arena, arena_paths.JOBS, name, arena_paths.TOPOLOGY)
            try:
                kept = msgspec.msgpack.decode(contents(path, _MAX_NBYTES), type=Kept)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except (OSError, *MALFORMED) as error:
                log.warning(line("topology cannot be read", path=path, error=error))
                continue
            if arena_paths.job_dir(kept.job) == f"{arena_paths.JOBS}/{name}":
                found.append(kept)
    return found
