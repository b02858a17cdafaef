"""Which run is this job's for each incarnation number, and which runs are strangers. Pure.

Numbers are counted in the store: when its directory was emptied, or another disk lay at its path, a number is given
again. What two runs of one number saved has different run ids and is never put together; which of them is the job's
is decided here, from facts alone:

1. the run that the user named,
2. the run of the present session, for its own numbers,
3. the run that has a committed checkpoint on the store, if one alone has,
4. the run of the store's incarnation record,
5. the only run that anybody has seen, unless the store has counted past the number and never gave it: then another
   store did, or this one before it was emptied, and a higher number says nothing of age.

Else the number is in dispute: no checkpoint of it is restored, drained or given up until the user names a run.
"""

from collections import defaultdict
from collections.abc import Container, Iterable

from ckptd.shared.base.ids import NO_RUN, Run, RunId, SaveId, is_counted

_WHOLE = -1  # in place of a rank: parity, or all that a node has of a save


class Lineage:
    """Facts about runs, and the decision for each number."""

    def __init__(self) -> None:
        self._named: list[RunId] = []  # by the user, the last one first
        self._own: dict[int, RunId] = {}  # of the present session
        self._committed: dict[int, set[RunId]] = {}
        self._recorded: dict[int, RunId] = {}
        self._gave = range(0)  # numbers from the oldest record that was counted to the newest
        self._held: defaultdict[str, set[tuple[SaveId, int]]] = defaultdict(set)  # by node: segments in its arena
        self._holders: defaultdict[int, defaultdict[RunId, set[str]]] = defaultdict(lambda: defaultdict(set))

    # --- facts

    def begins(self, incarnation: int, run: RunId) -> None:
        """The present session has this number."""
        if run != NO_RUN:
            self._own[incarnation] = run

    def on_store(self, saves: Iterable[SaveId], recorded: Iterable[Run]) -> None:
        """All committed checkpoints of the job, and the store's incarnation records."""
        committed = defaultdict(set)
        for save in saves:
            committed[save.incarnation].add(save.run)
        self._committed, self._recorded = dict(committed), dict(recorded)
        counted = [number for number in self._recorded if is_counted(number)]
        self._gave = range(min(counted), max(counted)) if counted else range(0)

    def committed(self, save: SaveId) -> None:
        """One more checkpoint of this job is on the store."""
        self._committed.setdefault(save.incarnation, set()).add(save.run)

    def held(self, node: str, saves: Iterable[SaveId], segments: Iterable[tuple[SaveId, int]] = ()) -> None:
        """What lies in the node's arena, and nothing else: something of these saves, and these segments."""
        for save, _ in self._held.pop(node, set()):
            self._holders[save.incarnation][save.run].discard(node)
        for save, rank in [*((save, _WHOLE) for save in saves), *segments]:
            self.holds_too(node, save, rank)

    def holds_too(self, node: str, save: SaveId, rank: int = _WHOLE) -> None:
        """One more segment lies in the node's arena."""
        self._held[node].add((save, rank))
        self._holders[save.incarnation][save.run].add(node)

    def released(self, node: str, save: SaveId, rank: int) -> bool:
        """A segment lies there no longer. Returns whether it was the last that the node had of its run."""
        held = self._held.get(node, set())
        if (save, rank) not in held:
            return False
        held.discard((save, rank))
        if any(other.owner == save.owner for other, _ in held):
            return False
        self._holders[save.incarnation][save.run].discard(node)
        return True

    def known_nodes(self, nodes: Container[str]) -> None:
        """What lies elsewhere is out of reach."""
        for node in [node for node in self._held if node not in nodes]:
            self.held(node, ())

    def new_session(self) -> None:
        """Another session is the job: the numbers of the one before are judged as everybody else's."""
        self._own, self._named = {}, []

    def name(self, run: RunId) -> None:
        """The user says that this run is the job's, for all numbers that it has, also where it is seen only later."""
        self._named = [run, *(r for r in self._named if r != run)]

    # --- decisions

    def run_of(self, incarnation: int) -> RunId | None:
        """The job's own run of this number; None: in dispute, or nobody has seen one."""
        if self._named:
            rivals = self.rivals(incarnation)
            named = next((run for run in self._named if run in rivals), None)
            if named is not None:
                return named
        if incarnation in self._own:
            return self._own[incarnation]
        committed = self._committed.get(incarnation, set())
        if committed:
            return next(iter(committed)) if len(committed) == 1 else None
        if incarnation in self._recorded:
            return self._recorded[incarnation]
        runs = self.rivals(incarnation)
        return runs[0] if len(runs) == 1 and not self.is_of_another_count(incarnation) else None

    def is_of_another_count(self, incarnation: int) -> bool:
        """Whether the store has gone past this number, and never gave it, as far as its records say."""
        return incarnation in self._gave and incarnation not in self._recorded

    def is_ours(self, save: SaveId) -> bool:
        """Whether the save belongs to this job's line of runs, as far as is known now."""
        run = self.run_of(save.incarnation)
        return run == save.run or (run is None and not self.is_disputed(save))

    def is_disputed(self, save: SaveId) -> bool:
        """Whether its number was had by several runs, or in another count, and no record shows which is the job's."""
        if self.run_of(save.incarnation) is not None:
            return False
        return self.is_of_another_count(save.incarnation) or bool(set(self.rivals(save.incarnation)) - {save.run})

    def rivals(self, incarnation: int) -> tuple[RunId, ...]:
        """All runs that are known to have had this number."""
        held = {run for run, nodes in self._holders[incarnation].items() if nodes}
        told = {runs[incarnation] for runs in (self._recorded, self._own) if incarnation in runs}
        return tuple(sorted(held | told | self._committed.get(incarnation, set())))

    @property
    def disputed(self) -> frozenset[Run]:
        """Strangers of which no record shows that they are not the job's."""
        return frozenset((number, run) for number, run in self.strangers if self.run_of(number) is None)

    @property
    def strangers(self) -> frozenset[Run]:
        """Runs of which something lies in arenas, and that are not the job's, or in dispute."""
        return frozenset(
            (number, run)
            for number, runs in self._holders.items()
            for run, nodes in runs.items()
            if nodes and self.run_of(number) != run
        )
