"""The topology of each job, kept in the job's directory of the arena for the next process of this daemon."""

import contextlib
import logging
import os

import msgspec

from ckptd.shared.base.errors import ProtocolError
from ckptd.shared.base.ids import Incarnation, JobKey, NodeName, Session
from ckptd.shared.base.log_line import line
from ckptd.shared.files.records import put_record, record_at
from ckptd.shared.format import arena_paths
from ckptd.shared.protocol.columns import Packed
from ckptd.shared.protocol.topology import Peer, Topology

log = logging.getLogger("ckptd")
_MAX_NBYTES = 64 << 20


class Kept(msgspec.Struct, frozen=True):
    """What is kept of a job; epochs as in act.KeepTopology."""

    job: JobKey
    session: str
    topology: Topology
    epoch: int
    since: int
    outside: tuple[Peer, ...] = ()
    former: tuple[str, ...] = ()


class _Record(msgspec.Struct, frozen=True, array_like=True):
    job: JobKey
    session: Session
    topology: Packed
    epoch: Incarnation
    since: Incarnation
    outside: tuple[Peer, ...] = ()
    former: tuple[NodeName, ...] = ()


def keep_topology(arena: str, kept: Kept) -> None:
    """Writes it in one piece, or leaves the one before. Raises OSError."""
    directory = os.path.join(arena, arena_paths.job_dir(kept.job))
    os.makedirs(directory, mode=0o700, exist_ok=True)
    path = os.path.join(directory, arena_paths.TOPOLOGY)
    packed = kept.topology.packed
    put_record(arena, path, _Record(kept.job, kept.session, packed, kept.epoch, kept.since, kept.outside, kept.former))


def kept_topologies(arena: str) -> list[Kept]:
    """What earlier daemons kept here. One that cannot be read is left out: nodes report theirs again."""
    found = []
    with contextlib.suppress(FileNotFoundError):
        for name in sorted(os.listdir(os.path.join(arena, arena_paths.JOBS))):
            path = os.path.join(arena, arena_paths.JOBS, name, arena_paths.TOPOLOGY)
            record = record_at(path, _Record, _MAX_NBYTES, "topology cannot be read")
            if record is None or arena_paths.job_dir(record.job) != f"{arena_paths.JOBS}/{name}":
                continue
            try:
                topology = Topology.unpacked(record.topology)
            except ProtocolError as error:
                log.warning(line("topology cannot be read", path=path, error=error))
                continue
            found.append(
                Kept(record.job, record.session, topology, record.epoch, record.since, record.outside, record.former)
            )
    return found
