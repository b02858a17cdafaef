"""The runs of a job at its coordinator: those of the job, those isolated, and the nodes that know. Pure.

All that nodes and the store tell of saves comes through here first. Only saves of the job's own line of runs reach the
tables of saves, parity and restores: nothing there has to ask which run something is of.
"""

from collections.abc import Container, Iterable

from ckptd.core import events as ev
from ckptd.core.actions import Action, ToNode
from ckptd.core.coordinator.job_state import JobState
from ckptd.core.coordinator.lineage import Lineage
from ckptd.core.coordinator.strangers import Strangers
from ckptd.shared.base.ids import Run, RunId, SaveId

_NOTHING: tuple[frozenset[Run], frozenset[Run]] = (frozenset(), frozenset())


class Runs:
    """Facts and decision (``lineage``), what is not the job's (``strangers``), and what each node knows of it."""

    def __init__(self, facts: JobState) -> None:
        self._facts = facts
        self._job, self._node = facts.job, facts.node
        self.lineage = Lineage()
        self.strangers = Strangers(self.lineage)
        self._told: dict[str, tuple[frozenset[Run], frozenset[Run]]] = {}  # by node: runs isolated, those in dispute
        self._foreign: frozenset[Run] = frozenset()  # as of the last sort
        self._back = False  # something isolated turned out to be the job's: its nodes are to report what they have

    def sift(self, node: str, has: ev.NodeHas) -> tuple[tuple[ev.HeldSegment, ...], tuple[ev.HeldChunk, ...]]:
        """The segments and parity chunks at a node that are the job's."""
        self.lineage.held(node, {p.save for p in has.chunks}, [(s.save, s.rank) for s in has.segments])
        ours = self.lineage.is_ours
        self.strangers.heard(node, [(s.save, s.rank) for s in has.segments if not ours(s.save)])
        return tuple(s for s in has.segments if ours(s.save)), tuple(p for p in has.chunks if ours(p.save))

    def admits(self, node: str, staged: ev.SegmentsStaged) -> bool:
        """Whether more segments at a node are the job's."""
        for segment in staged.segments:
            self.lineage.holds_too(node, staged.save, segment.rank)
        if self.lineage.is_ours(staged.save):
            return True
        for segment in staged.segments:
            self.strangers.add(node, staged.save, segment.rank)
        return False

    def released(self, node: str, gone: ev.SegmentsReleased) -> bool:
        """A node has given segments up. Returns whether they were the last that it had of their run."""
        last = False
        for rank in gone.ranks:
            self.strangers.released(node, gone.save, rank)
            last |= self.lineage.released(node, gone.save, rank)
        return last

    def attached(self, event: ev.NodeAttached, answers: Iterable[Action]) -> None:
        """Ranks that came with a number bring their run, if they were let in."""
        if not any(isinstance(a, ToNode) and isinstance(a.message, ev.SessionOpened) for a in answers):
            return
        came = {(one.incarnation, one.run) for one in event.waiting}
        came |= {(event.incarnation, event.run)} if event.members else set()
        for incarnation, run in sorted(came):
            if incarnation:
                self.lineage.begins(incarnation, run)

    def new_session(self, incarnation: int, run: RunId, nodes: Container[str]) -> None:
        """It runs on these nodes, or visits them: what lies elsewhere disputes nothing until it is seen again."""
        self.lineage.new_session()
        self.lineage.begins(incarnation, run)
        self.lineage.known_nodes(nodes)
        self.strangers.known_nodes(nodes)

    def scanned(self, event: ev.StoreScanned) -> None:
        """What lies on the store decides between runs of one number."""
        recorded = [(record.incarnation, record.run) for record in event.records]
        self.lineage.on_store([found.save for found in event.committed], recorded)

    def peer_up(self, node: str) -> None:
        """It may be another process, which knows nothing yet."""
        self._told.pop(node, None)

    def tell_anew(self) -> None:
        """Every node is to receive the runs that it isolates, and to report what it has."""
        self._told.clear()

    def sort(self) -> list[Action]:
        """Takes what is known to be another run's out of the job's saves, and has the nodes isolate it."""
        for save in [save for save in self._facts.records if not self.lineage.is_ours(save)]:
            for rank, holders in self._facts.give_away(save).items():
                for node in holders:
                    self.strangers.add(node, save, rank)
        runs = self.lineage.strangers
        self._back |= any(self.lineage.run_of(number) == run for number, run in self._foreign)
        self._foreign = runs
        disputed = self.lineage.disputed
        if not runs and not self._told:
            return []
        telling = [
            node for node in sorted(self._facts.session.nodes) if self._told.get(node, _NOTHING) != (runs, disputed)
        ]
        self._told |= dict.fromkeys(telling, (runs, disputed))
        self._told = {node: told for node, told in self._told.items() if told != _NOTHING}
        order = ev.ForeignRuns(
            job=self._job, node=self._node, runs=tuple(sorted(runs)), disputed=tuple(sorted(disputed))
        )
        return [ToNode(job=self._job, node=node, message=order) for node in telling]

    def took_back(self) -> bool:
        """Whether something isolated has turned out to be the job's since this was asked last."""
        back, self._back = self._back, False
        return back

    def name(self, run: bytes) -> None:
        """The user says that this run is the job's."""
        self.lineage.name(run)
        self.tell_anew()

    def is_ours(self, save: SaveId) -> bool:
        """Whether the save belongs to the job's line of runs, as far as is known now."""
        return self.lineage.is_ours(save)
