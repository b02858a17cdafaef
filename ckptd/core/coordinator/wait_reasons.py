"""A session that waits to join: its ranks, for whom they wait, and what to type. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ckptd.core import events as ev
from ckptd.core.coordinator.admission_states import Admission
from ckptd.core.coordinator.former_nodes import FormerNodes
from ckptd.core.placement import Placement, Roster
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
    former: FormerNodes
    state: Admission
    cadence: Cadence = field(default_factory=Cadence)
    takeover: bool = False
    roster: Roster = field(default_factory=Roster)
    placement: Placement | None = None  # once every rank has a node
    whole_since: float = 0.0
    outdated: bool = False  # a daemon has another address or arena since
    notified: bool = False  # it knows for whom it waits
    late: bool = False  # former nodes had their time
    store_id: str = ""  # the store that the ranks ask for; empty: none in particular

    @property
    def ranks(self) -> Mapping[int, str]:
        """Where each rank waits."""
        return self.roster.ranks

    def add(self, event: ev.NodeAttached) -> None:
        """What the ranks of a node ask for."""
        self.takeover |= event.takeover
        self.store_id = self.store_id or event.store_id
        self.cadence = event.cadence

    @property
    def topology(self) -> Topology:
        """Once every rank has a node."""
        assert self.placement is not None  # noqa: S101 - the caller looked
        return self.placement.topology

    def place(self, now: float) -> bool:
        """Makes the topology if every rank has a node. Returns whether it is another one."""
        if not self.roster.whole or (self.placement is not None and not self.outdated):
            return False
        self.whole_since = self.whole_since or now
        self.placement, self.outdated = Placement(self.roster.topology()), False
        return True

    def heard(self, now: float, patience_s: float) -> bool:
        """Whether all nodes have reported their living ranks; those that the session does not use get little time."""
        return self.placement is not None and (self.former.complete or now - self.whole_since >= patience_s)

    def late_at(self, patience_s: float) -> float | None:
        """When former nodes have had their time, while that is to come."""
        waits = self.placement is not None and not self.late and not self.former.complete
        return self.whole_since + patience_s if waits else None


class Reason(NamedTuple):
    """Why a session is not let in, and what to type."""

    text: str
    hint: str


def still_running(job: str, others: Sequence[ev.Living]) -> Reason:
    """Ranks of another session live."""
    shown = [f"rank {found.rank} (pid {found.pid} on {found.host})" for found in others[:_MAX_SHOWN]]
    more = [f"... ({len(others)} in all)"] if len(others) > _MAX_SHOWN else []
    hint = "end those processes, use another job name, or connect(..., takeover=True) to replace them"
    return Reason(f"job {job!r} is still running: {', '.join([*shown, *more])}", hint)


def unheard(here: str, roster: Roster) -> Reason:
    """Some ranks have not connected, or their nodes' daemons do not reach the one of this node."""
    missing = roster.missing
    verb = "has" if len(missing) == 1 else "have"
    hint = "do they run? can the daemons reach each other? ckptd status on both; peer_address, peer_port, firewalls"
    return Reason(f"{named_ranks(missing)} {verb} not come to the daemon of {here}", hint)


def late_at(since: float, *, running: bool) -> float:
    """When to notify a session, waiting since then, for whom it waits."""
    return since + (RUNNING_S if running else SILENT_S)


def speaker(ranks: Mapping[int, str]) -> tuple[int, str]:
    """The one rank of a session that is notified, and its node: the lowest that waits there."""
    rank = min(ranks)
    return rank, ranks[rank]
