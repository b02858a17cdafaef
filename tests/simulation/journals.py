"""Each record of a job's journal, held against what the world knows when it is written."""

from typing import TYPE_CHECKING

from ckptd.core import actions as act
from ckptd.core import events as ev
from ckptd.shared.base.ids import JobKey, SaveId
from ckptd.shared.protocol import journal as log
from ckptd.shared.protocol.messages import End
from tests.simulation.truth import SaveTruth

if TYPE_CHECKING:
    from tests.simulation.machine import Machine
    from tests.simulation.world import World


class Journals:
    """Told of every record, and of what must become one. Raises AssertionError for a lie and for silence."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self._owed: dict[tuple[JobKey, SaveId], str] = {}  # commits that a coordinator heard of, and its node

    def kept(self, machine: "Machine", action: act.KeepEntry) -> None:
        """A coordinator puts something on record."""
        entry, began = action.entry, action.began
        framed = log.framed(entry)
        assert log.read_segment(log.segment([framed])) == ([entry], 0), f"{entry} cannot be read"
        self._world.counts["records"] += 1
        self._world.counts["record bytes"] += len(framed)
        self._world.counts[f"records: {type(entry).__name__}"] += 1
        assert began.coordinator == machine.name
        assert action.age_s >= 0, f"{began} began later than now"
        match entry:
            case log.Staged() | log.Protected() | log.Durable():
                self._reached(action, entry)
            case log.Ended():
                assert entry.end is not End.DURABLE
            case log.Restored():
                saves = self._saves(action, entry.incarnation, entry.counter)
                assert any(self._is_durable(action.job, s) or self._truth(action, s).ever_whole for s in saves)
                assert sum(entry.tiers.values()) == began.world_size, f"{entry} of {began}"
            case log.Damaged():
                self._world.scrubs.on_record(entry)
            case log.RunEnded(how="closed" | "lost"):
                self._over(machine, action)

    def _reached(self, action: act.KeepEntry, entry: log.Staged | log.Protected | log.Durable) -> None:
        began = action.began
        match entry:
            case log.Staged():
                save = SaveId(began.incarnation, entry.counter, entry.step, began.run)
                if not self._is_durable(action.job, save):
                    found = self._truth(action, save)
                    assert len(found.contents) == found.world_size, f"{save} is on record as staged, and is not"
                    text = f"it is on record that {save} is staged, of which the slices do not make a whole"
                    assert not found.mismatched, text
            case log.Protected():
                for save in self._saves(action, began.incarnation, entry.counter):
                    protected = self._is_durable(action.job, save) or self._truth(action, save).ever_protected
                    assert protected, f"{save} is on record as protected, and is not"
            case log.Durable():
                incarnation = entry.incarnation or began.incarnation
                saves = self._saves(action, incarnation, entry.counter)
                there = [save for save in saves if self._is_durable(action.job, save)]
                assert there, f"{incarnation}, {entry.counter} is on record as durable, and is not"
                for save in there:
                    self._owed.pop((action.job, save), None)

    def _over(self, machine: "Machine", action: act.KeepEntry) -> None:
        """No rank of the run is in at the coordinator's own node."""
        owner = self._world.promises.of(action.job).owners.get(action.began.incarnation)
        sessions = [one.current for one in self._world.launchers if one.job == action.job]
        for session in sessions:
            if session is not None and session.name == owner:
                here = [proc for proc in session.procs if proc.machine is machine and proc.alive and proc.incarnation]
                assert all(proc.state == "closing" for proc in here), f"the run of {here} is not over"

    def hears(self, machine: "Machine", event: ev.Event) -> None:
        """A daemon is about to handle this, and is done with what came before."""
        assert machine.name not in self._owed.values(), f"durable, and not on record: {self._owed}"
        if not isinstance(event, ev.CommitEnded) or event.problem or event.taken_over or machine.catalogue is None:
            return
        job = machine.catalogue.jobs.get(event.job)
        coordinates = job is not None and job.node.coordinator == machine.name
        if job is not None and coordinates and job.coordinator.facts.active == event.save:
            self._owed[event.job, event.save] = machine.name

    def died(self, machine: "Machine") -> None:
        """It can put nothing on record any more."""
        self._owed = {key: node for key, node in self._owed.items() if node != machine.name}

    def check(self) -> None:
        """Every save that became durable while its coordinator lived is on record as that."""
        assert not self._owed, f"durable, and not on record: {list(self._owed)}"

    def _is_durable(self, job: JobKey, save: SaveId) -> bool:
        return save in self._world.store(job).ever

    def _truth(self, action: act.KeepEntry, save: SaveId) -> SaveTruth:
        found = self._world.promises.of(action.job).saves.get(save)
        assert found is not None, f"{action.entry} of {save}: nothing of it was ever"
        return found

    def _saves(self, action: act.KeepEntry, incarnation: int, counter: int) -> list[SaveId]:
        """Of this place in the order: one, but for runs of one number."""
        known = [*self._world.promises.of(action.job).saves, *self._world.store(action.job).ever]
        found = {save for save in known if (save.incarnation, save.counter) == (incarnation, counter)}
        assert found, f"{action.entry} of {action.began}: there was no such save"
        return sorted(found)
