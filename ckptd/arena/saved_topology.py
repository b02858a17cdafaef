"""The topology of each job, kept in the job's directory of the arena for the next process of this daemon."""

import contextlib
import os

import msgspec

from ckptd.shared.base.ids import Incarnation, JobKey, NodeName
from ckptd.shared.files.records import put_record, record_at
from ckptd.shared.format import arena_paths
from ckptd.shared.protocol.topology import Peer, Topology

_MAX_NBYTES = 64 << 20


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
    put_record(arena, path, kept)


def kept_topologies(arena: str) -> list[Kept]:
    """What earlier daemons kept here. One that cannot be read is left out: ranks bring another."""
    found = []
    with contextlib.suppress(FileNotFoundError):
        for name in sorted(os.listdir(os.path.join(arena, arena_paths.JOBS))):
            path = os.path.join(arena, arena_paths.JOBS, name, arena_paths.TOPOLOGY)
            kept = record_at(path, Kept, _MAX_NBYTES, "topology cannot be read")
            if kept is not None and arena_paths.job_dir(kept.job) == f"{arena_paths.JOBS}/{name}":
                found.append(kept)
    return found
