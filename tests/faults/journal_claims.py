"""What a job's journal says, held against what a campaign knows of the job. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from ckptd.shared.protocol import journal as log
from ckptd.shared.protocol.messages import End

MOST_NBYTES = 200  # of the records of a save
Place = tuple[int, int]  # incarnation and counter of a save; in order
_OF_SAVES = log.Staged | log.Protected | log.Durable | log.Ended


@dataclass(frozen=True)
class Loaded:
    """What a load gave: the incarnation and the step of what was saved, and how many ranks read from which tier."""

    incarnation: int
    step: int
    tiers: Mapping[str, int]


@dataclass
class Known:
    """What is known. Runs go by their incarnations; one that was never loaded has saved nothing."""

    homes: str  # the node of each rank
    nodes: str
    since: float
    steps: dict[int, set[int]] = field(default_factory=dict)  # that each rank of the run may have saved
    loads: dict[int, Loaded | None] = field(default_factory=dict)  # that all ranks came out of; None: with nothing
    closed: set[int] = field(default_factory=set)
    lost_nodes: int = 0


def lies(
    entries: Sequence[log.Entry], known: Known, stored: AbstractSet[Place], keep_last: int, now: float
) -> list[str]:
    """Each record that is not true. stored: on the store, once the journal was read."""
    return list(_Reader(known, stored, keep_last, now).lies(entries))


def nbytes_of_saves(entries: Sequence[log.Entry]) -> tuple[int, int]:
    """Of the records of saves, and how many saves these are."""
    places, nbytes, incarnation = set[Place](), 0, 0
    for entry in entries:
        if isinstance(entry, log.RunBegan):
            incarnation = entry.incarnation
        elif isinstance(entry, _OF_SAVES):
            nbytes += len(log.framed(entry))
            places.add((getattr(entry, "incarnation", 0) or incarnation, entry.counter))
    return nbytes, len(places)


class _Reader:
    def __init__(self, known: Known, stored: AbstractSet[Place], keep_last: int, now: float) -> None:
        self._known, self._stored, self._now = known, stored, now
        newest = sorted(stored)[-keep_last:]
        self._kept_from: Place = newest[0] if newest else (0, 0)  # nothing above it was removed
        self._steps: dict[Place, int] = {}  # as records say
        self._began: log.RunBegan | None = None

    def lies(self, entries: Sequence[log.Entry]) -> Iterator[str]:
        for entry in entries:
            began = self._began
            if not self._known.since <= entry.at <= self._now:
                yield f"not in the time of the campaign: {entry}"
            if isinstance(entry, log.RunBegan):
                self._began = entry
                yield from self._of_run(entry)
            elif began is None:
                yield f"of no run: {entry}"
            else:
                for what in self._of(entry, began):
                    yield f"{what}: {entry} of incarnation {began.incarnation}"
        arenas = sum(isinstance(entry, log.Lost) and entry.what == "arena" for entry in entries)
        if arenas > self._known.lost_nodes:
            yield f"{arenas} lost arenas, of {self._known.lost_nodes} lost nodes"

    def _of_run(self, began: log.RunBegan) -> Iterator[str]:
        homes, nodes = self._known.homes, self._known.nodes
        wrong = began.world_size != len(homes) or not 1 <= began.nodes <= len(nodes)
        if wrong or began.coordinator not in nodes:
            yield f"not a run of this job: {began}"

    def _of(self, entry: log.Entry, began: log.RunBegan) -> Iterator[str]:
        known = self._known
        match entry:
            case log.Staged() | log.Protected() | log.Durable() | log.Ended():
                yield from self._of_save(entry, began)
            case log.Restored():
                yield from self._of_load(entry, began)
            case log.RunEnded(how=how):
                if how == "closed" and began.incarnation not in known.closed:
                    yield "its ranks were killed"
                if how not in {"closed", "lost", "taken over", "loaded"}:
                    yield "no such end"
            case log.Lost(node=node, what=what, ranks=ranks):
                if what not in log.LOSSES or (node in known.nodes and ranks > known.homes.count(node)):
                    yield "no such loss"
                if node not in known.nodes and not node.endswith(" more"):
                    yield "no such node"

    def _of_save(self, entry: _OF_SAVES, began: log.RunBegan) -> Iterator[str]:
        place = (getattr(entry, "incarnation", 0) or began.incarnation, entry.counter)
        steps = self._known.steps.get(place[0], set())
        if isinstance(entry, log.Staged | log.Ended):
            if self._steps.setdefault(place, entry.step) != entry.step:
                yield f"was step {self._steps[place]} before"
            if entry.step not in steps:
                yield "nobody saved that"
        elif not steps:
            yield "nobody saved that"
        if isinstance(entry, log.Ended) and entry.end is End.DURABLE:
            yield "durable has a record of its own"
        if isinstance(entry, log.Durable) and place not in self._stored and place > self._kept_from:
            yield f"not on the store, which has {sorted(self._stored)}"

    def _of_load(self, entry: log.Restored, began: log.RunBegan) -> Iterator[str]:
        if entry.step not in self._known.steps.get(entry.incarnation, set()):
            yield "nobody saved that"
        if began.incarnation not in self._known.loads:
            return
        found = self._known.loads[began.incarnation]
        if found != Loaded(entry.incarnation, entry.step, {str(tier): count for tier, count in entry.tiers.items()}):
            yield f"the ranks got {found}"
