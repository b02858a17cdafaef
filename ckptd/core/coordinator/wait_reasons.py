"""A session that waits to join: its ranks, for whom they wait, and what to type. Pure."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ckptd.core import events as ev
from ckptd.core.coordinator.protection_view import few_names
from ckptd.shared.base.wording import named_ranks
from ckptd.shared.protocol.messages import Cadence
from ckptd.shared.protocol.topology import Topology

RUNNING_S = 3.0  # the ranks of a job that is started again at once take a moment to end
SILENT_S = 5.0  # and those of a normal one come within seconds of each other
_MAX_SHOWN = 4


@dataclass(slots=True)
class Waiting:
    """Ranks of a session that waits to join."""

    since: float
    cadence: Cadence
    takeover: bool = False
    ranks: dict[int, tuple[str, int]] = field(default_factory=dict)  # rank -> (node, world size)
    topology: Topology | None = None
    nodes: set[str] = field(default_factory=set)  # of the ranks that stand there
    outside: set[str] = field(default_factory=set)  # nodes that the job used before and this session does not
    notified: bool = False  # it knows for whom it waits
    late: bool = False  # it was waited for them long enough
    former_node_reported: set[str] = field(default_factory=set)  # those that have reported their living ranks
    store_id: str = ""  # the store that the ranks ask for; empty: none in particular

    def heard(self, now: float, patience_s: float) -> bool:
        """Whether every node has reported its living ranks; those that the session does not use get little time."""
        if self.topology is not None and len(self.nodes) < len(self.topology.peers):
            return False
        return self.outside <= self.former_node_reported or now - self.since >= patience_s


class Reason(NamedTuple):
    """Why a session is not let in, and what to type."""

    text: str
    hint: str


def still_running(job: str, others: Sequence[ev.RankFound]) -> Reason:
    """Ranks of another session live."""
    shown = [f"rank {found.rank} (pid {found.pid} on {found.host})" for found in others[:_MAX_SHOWN]]
    more = [f"... ({len(others)} in all)"] if len(others) > _MAX_SHOWN else []
    hint = "end those processes, use another job name, or connect(..., takeover=True) to replace them"
    return Reason(f"job {job!r} is still running: {', '.join([*shown, *more])}", hint)


def unheard(here: str, topology: Topology | None, heard: Collection[str]) -> Reason:
    """No rank of some nodes has come to the daemon of this one."""
    silent = sorted(set(topology.nodes) - set(heard)) if topology is not None else []
    ranks = [rank for node in silent for rank in topology.ranks_of(node)] if topology is not None else []
    whose = f" ({named_ranks(ranks)})" if ranks else ""
    hint = "can the daemons reach each other? ckptd status on both; peer_address, peer_port, firewalls"
    return Reason(f"no rank of node {few_names(silent)}{whose} has come to the daemon of {here}", hint)


def late_at(since: float, *, running: bool) -> float:
    """When to notify a session, waiting since then, for whom it waits."""
    return since + (RUNNING_S if running else SILENT_S)


def speaker(ranks: Mapping[int, tuple[str, int]]) -> tuple[int, str]:
    """The one rank of a session that is notified, and its node: the lowest that waits there."""
    rank = min(ranks)
    return rank, ranks[rank][0]
