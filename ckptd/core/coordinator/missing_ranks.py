"""Which ranks a save waits for, and since when that is worth a line: for the ranks that saved, and for status. Pure.

Ranks of a normal job differ by seconds. So a save is waited for in silence for 5 s, or for 2 s after a rank that
delivered it has delivered a later one. A rank for which memory is being allocated waits in its first save: it is not
accused, and has as long again from then on to copy its state. A daemon that has restarted counts from its start.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ckptd.core import events as ev
from ckptd.core.actions import Action, ToNode
from ckptd.core.coordinator.job_state import JobState
from ckptd.core.coordinator.save_record import Record
from ckptd.shared.base.ids import SaveId
from ckptd.shared.base.wording import named_ranks, ranges

SILENT_S = 5.0
SAVED_AGAIN_S = 2.0
LOST_S = 12.0  # by then the daemons of a node that is lost are known not to answer
_MAX_RUNS = 8
_MAX_NODES = 4
_ALLOCATED = "is being allocated (client.prepare(state) does that ahead of the first save)"
_ALONE = "(one rank alone: connect(alone=True))"


class LoadWaits:
    """A load that some ranks call and others do not. After 5 s the lowest rank that waits is notified, once.

    ``cause`` says why these ranks are missing, which ranks call what, and where the missing ones run.
    """

    def __init__(self, facts: JobState, cause: Callable[[Sequence[int], str], str]) -> None:
        self._facts, self._sessions, self._cause = facts, facts.session, cause
        self._job, self._node = facts.job, facts.node
        self._said = -1.0  # since when the load waits that was spoken of last

    def next_deadline(self) -> float | None:
        """When tick has something to do."""
        since, _ = self._facts.restore.callers
        return None if since is None or since == self._said else since + SILENT_S

    def tick(self, now: float) -> list[Action]:
        """Notifies the lowest rank that waits of those that have not called."""
        due, (since, callers) = self.next_deadline(), self._facts.restore.callers
        if due is None or since is None or now < due:
            return []
        self._said = since
        missing = sorted(set(range(self._sessions.world_size)) - callers)
        here = sorted(rank for rank in callers if rank in self._sessions.members)
        if not missing or not here:
            return []
        order = ev.SessionWaits(
            job=self._job,
            node=self._node,
            session=self._sessions.session,
            rank=here[0],
            message=f"waits for {named_ranks(missing)}",
            hint=self._cause(missing, "load"),
        )
        return [ToNode(job=self._job, node=self._sessions.members[here[0]], message=order)]


@dataclass(slots=True)
class _Said:
    """What was said of a save last, and when that is looked at again."""

    text: str
    idle: bool
    again_at: float


class MissingRanks:
    """Of the saves of one job, and of its load. Its facts are those of sessions, saves and load."""

    def __init__(self, facts: JobState) -> None:
        self._facts, self._sessions = facts, facts.session
        self._job, self._node = facts.job, facts.node
        self._load = LoadWaits(facts, self._cause)
        self._said: dict[SaveId, _Said] = {}
        self._awaited: dict[str, frozenset[int]] = {}  # node -> ranks there for which memory is being allocated
        self._granted: dict[int, float] = {}  # rank -> when that ended, while it may still copy its state

    def allocates(self, node: str, ranks: Sequence[int], now: float) -> list[Action]:
        """The node allocates memory for these ranks, which have no slot to write to yet, and for no others."""
        ended = self._awaited.get(node, frozenset()).difference(ranks)
        self._granted |= dict.fromkeys(ended, now)
        self._awaited[node] = frozenset(ranks)
        return []

    def next_deadline(self) -> float | None:
        """When tick has something to do."""
        waiting = self._waiting()
        times = [*(self._due(record, waiting) for record in waiting), self._load.next_deadline()]
        return min((time for time in times if time is not None), default=None)

    def tick(self, now: float) -> list[Action]:
        """Notifies the ranks that delivered a save of those that have not."""
        waiting = self._waiting()
        self._granted = {rank: since for rank, since in self._granted.items() if now < since + SILENT_S}
        for save in self._said.keys() - {record.save for record in waiting}:
            del self._said[save]
        actions = self._load.tick(now)
        for record in waiting:
            if now < self._due(record, waiting):
                continue
            before = self._said.get(record.save)
            said = _Said(self._text(record), self._are_idle(record, now), now + SILENT_S)
            self._said[record.save] = said
            if before is None or (before.text, before.idle) != (said.text, said.idle):
                record.waits_for = said.text
                actions += self._notify(record, idle=said.idle)
        return actions

    def _waiting(self) -> list[Record]:
        """Saves of this incarnation that some rank has delivered, and not all."""
        ours = self._sessions.incarnation
        incomplete = [r for r in self._facts.judged_incomplete if r.save.incarnation == ours and r.delivered]
        return [r for r in incomplete if not r.adopted or self._still_waits(r)]

    def _still_waits(self, found: Record) -> bool:
        """Whether a half that was found at start waits for ranks: they are here, and it is no rest of an older save."""
        newest = self._facts.newest_staged
        return self._sessions.peopled and (newest is None or newest.save < found.save)

    def _due(self, record: Record, waiting: Sequence[Record]) -> float:
        said, ranks = self._said.get(record.save), record.delivered.keys()
        granted = [since for rank, since in self._granted.items() if rank not in ranks and since > record.since]
        copying = [since + SILENT_S for since in granted]
        if said is not None:
            return max([said.again_at, *copying])
        later = [r.since for r in waiting if r.save > record.save and not ranks.isdisjoint(r.delivered)]
        return max([min([record.since + SILENT_S, *(since + SAVED_AGAIN_S for since in later)]), *copying])

    def _notify(self, record: Record, *, idle: bool) -> list[Action]:
        nodes = sorted({node for nodes in record.held.values() for node in nodes})
        order = ev.SaveWaits(job=self._job, node=self._node, save=record.save, reason=record.waits_for, idle=idle)
        return [ToNode(job=self._job, node=node, message=order) for node in nodes]

    def _text(self, record: Record) -> str:
        return f"waits for {named_ranks(record.missing)}: {self._cause(record.missing, 'save')}"

    def _cause(self, missing: Sequence[int], call: str) -> str:
        """Why, as far as is known, what to type, and where to look. call: what the others have called."""
        silent = self._silent(missing)
        absent = [rank for rank in missing if rank not in self._sessions.members and rank not in silent]
        allocating = [rank for rank in self._allocating(missing) if rank not in silent]
        idle = sorted(set(missing) - {*silent, *absent, *allocating})
        unattached = [rank for rank in absent if self._is_unattached(rank)]
        absent = [rank for rank in absent if rank not in unattached]
        causes = []
        if absent:
            who = "they have" if absent == list(missing) else f"{named_ranks(absent)} have"
            who = "it has" if len(missing) == 1 else who
            causes.append(f"{who} not connected: every rank must call connect and {call} {_ALONE}")
        elif idle or unattached:
            causes.append(f"every rank must call {call} {_ALONE}")
        if unattached:
            have, place = ("has", "its node") if len(unattached) == 1 else ("have", "their nodes")
            causes.append(f"{named_ranks(unattached)} {have} not called ckptd since the daemon of {place} restarted")
        if silent:
            nodes = sorted({self._home(rank) for rank in silent})
            more = ", ..." if len(nodes) > _MAX_NODES else ""
            verb = "does" if len(nodes) == 1 else "do"
            names = f"node{'s' * (len(nodes) > 1)} {', '.join(nodes[:_MAX_NODES])}{more}"
            causes.append(f"{names} {verb} not answer: ckptd status there")
        if allocating:
            whose = "their slots" if allocating == list(missing) else f"the slots of {named_ranks(allocating)}"
            causes.append(f"the memory of {'its slots' if len(missing) == 1 else whose} {_ALLOCATED}")
        causes += self._places(sorted([*idle, *unattached]))
        return "; ".join(causes)

    def _are_idle(self, record: Record, now: float) -> bool:
        """Whether the missing ranks are there and do not save. That another node is lost is not known at once."""
        if self._allocating(record.missing):
            return False
        here = all(self._home(rank) == self._node and not self._is_unattached(rank) for rank in record.missing)
        return not self._silent(record.missing) and (here or now >= record.since + LOST_S)

    def _allocating(self, missing: Sequence[int]) -> list[int]:
        """Those that cannot save yet, however early they called it."""
        home = self._sessions.members
        return [rank for rank in missing if rank in home and rank in self._awaited.get(home[rank], ())]

    def _silent(self, missing: Sequence[int]) -> list[int]:
        """Those whose nodes do not answer: their daemons may come back, and what they save with them."""
        return [rank for rank in missing if self._home(rank) in self._facts.links.down]

    def _is_unattached(self, rank: int) -> bool:
        """Whether its process lives, and has not come back to a daemon that restarted."""
        return rank not in self._sessions.members and self._process_of(rank) is not None

    def _process_of(self, rank: int) -> ev.Living | None:
        return self._sessions.processes.of(rank, self._sessions.session)

    def _home(self, rank: int) -> str:
        """Its node, as far as is known: this one."""
        topology = self._sessions.topology
        known = topology.home(rank) if topology is not None and rank < len(topology.homes) else self._node
        return self._sessions.members.get(rank, known)

    def _places(self, ranks: Sequence[int]) -> list[str]:
        """Where these ranks run, by node."""
        by_node: dict[str, list[tuple[int, int]]] = {}
        for rank in ranks:
            found = self._process_of(rank)
            if found is not None:
                by_node.setdefault(self._home(rank), []).append((rank, found.pid))
        shown = [_place(node, found) for node, found in list(by_node.items())[:_MAX_NODES]]
        return [*shown, *([f"... ({len(by_node)} nodes in all)"] if len(by_node) > _MAX_NODES else [])]


def _place(node: str, found: Sequence[tuple[int, int]]) -> str:
    pids = [pid for _, pid in found]
    if pids == sorted(set(pids)):
        text = ranges(pids)
    else:
        text = ", ".join(map(str, pids[:_MAX_RUNS])) + (", ..." if len(pids) > _MAX_RUNS else "")
    verb, noun = ("is", "pid") if len(pids) == 1 else ("are", "pids")
    return f"{named_ranks([rank for rank, _ in found])} {verb} {noun} {text} on {node}"
