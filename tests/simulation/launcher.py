"""What starts a job again and again: the same way, on other nodes, with more or fewer, beside one that still lives."""

import contextlib
from typing import TYPE_CHECKING

from ckptd.shared.base.errors import CkptdError
from ckptd.shared.base.ids import JobKey
from ckptd.shared.format.schemes import Scheme
from ckptd.shared.protocol.messages import Milestone
from tests.simulation.machine import Machine
from tests.simulation.session import Session

if TYPE_CHECKING:
    from tests.simulation.world import World


class Launcher:
    """One job. ``goal`` tells what it must reach in the end: see exam.py."""

    def __init__(self, world: "World", job: JobKey) -> None:
        self.world = world
        self.job = job
        self.current: Session | None = None
        self.zombies: list[Session] = []
        self.goal = ""  # empty: whatever happens
        self.reached: set[str] = set()
        self._serial = 0
        self._examined: dict[Session, int] = {}  # rounds it had when the end began
        self._counts: list[int] = []
        self._starting = False
        self.told_running_on_a_lost_node = False  # the user knows better, and takes over

    def start(self) -> None:
        """Another session, on the nodes that stand."""
        self._starting = False
        if self.current is not None and self.current.alive:
            return
        homes = self._placement()
        if self.goal == "rest":
            return
        if not homes:
            self._later(5.0)
            return
        self._serial += 1
        takeover = (bool(self.zombies) and self.world.clock.chance(0.8)) or self.told_running_on_a_lost_node
        self.told_running_on_a_lost_node = False
        self.current = Session(self, f"{self.job.job}.s{self._serial}", homes, takeover=takeover)
        self.world.log(homes[0], f"session {self.current.name} on {[m.name for m in homes]} takeover={takeover}")
        self.current.gather()

    def _placement(self) -> list[Machine]:
        """Ranks by node: mostly as before, sometimes in another order, on more or fewer nodes, or another number."""
        random = self.world.clock.random
        machines = [m for m in self.world.nodes.values() if not m.lost]
        if not machines:
            return []
        if not self._counts or random.random() < self.world.chaos.reshape:
            self._counts = [random.choice(self.world.ranks_per_node) for _ in machines]
        total = sum(self._counts)
        order = list(machines)
        how = random.random()
        if how < 0.25:
            random.shuffle(order)
        elif how < 0.4 and len(order) > 2:
            order.pop(random.randrange(len(order)))
        homes: list[Machine] = []
        for machine, count in zip(order, self._counts, strict=False):
            homes += [machine] * count
        while len(homes) < total:  # the same ranks on fewer nodes
            homes.append(order[len(homes) % len(order)])
        return homes[:total]

    def between_rounds(self, session: Session) -> bool:
        """What happens to a session between two saves; True when it does not go on."""
        if session is not self.current:
            return False
        if self.goal:
            return self._pursue(session)
        clock, chaos = self.world.clock, self.world.chaos
        if not chaos.active:
            return False
        dice = clock.random.random()
        if dice < 0.04:
            chaos.note("rank crash")
            session.crash([clock.random.choice(session.procs)])
        elif dice < 0.07:
            chaos.note("all ranks crash")
            session.crash(session.procs)
        elif dice < 0.11:
            chaos.note("close")
            session.close()
            return True
        elif dice < 0.14 and not self.zombies:
            chaos.note("takeover")
            self.zombies.append(session)
            self.current = None
            self._later(clock.between(0.1, 5))
            clock.after(clock.between(5, 90), session.end, "old")
        return False

    def _pursue(self, session: Session) -> bool:
        """The end of a play: save, see it reach every milestone, then crash and load it, then close."""
        if session.told_to_start_again:
            session.crash(session.procs)
            return True
        if session not in self._examined:
            self._examined[session] = session.rounds
        wanted = {Milestone.STAGED, Milestone.DURABLE}
        if self.world.scheme is not Scheme.NONE and len(set(session.homes)) > 1:
            wanted.add(Milestone.PROTECTED)
        reached = [
            save
            for save, handle in session.procs[0].saves.items()
            if save.step > 10 * self._examined[session] and wanted <= handle.milestones
        ]
        if not any(all(session.heard_by_all(save, m) for m in wanted) for save in reached):
            return False
        self.world.promises.mismatches_heard(session, 10 * self._examined[session], max(reached))
        if self.goal == "save":
            self.reached.add("save")
            self.goal = "load"
            session.crash(session.procs)
            return True
        if "loaded" in self.reached:
            self.reached.add("all")
            self.goal = "rest"
            session.close()
            return True
        return False

    def loaded(self, session: Session) -> None:
        """All ranks of a session have agreed on what they restore."""
        if self.goal == "load" and session is self.current:
            self.reached.add("loaded")

    def ended(self, session: Session, why: str) -> None:
        """A session is over."""
        if session in self.zombies:
            self.zombies.remove(session)
        if session is not self.current:
            return
        self.current = None
        if self.goal != "rest":
            self._later(self.world.clock.between(0.5, 10))

    def forget(self) -> None:
        """``ckptd forget --force`` on every node where no rank lives, unless a later session has gone on meanwhile."""
        if self.current is not None and self.current.phase in ("train", "close"):
            return
        for machine in self.world.nodes.values():
            if machine.catalogue is not None and machine.up and self.job in machine.catalogue.jobs:
                with contextlib.suppress(CkptdError):
                    machine.all_of(machine.catalogue.forget(self.job, force=True))

    def _later(self, seconds: float) -> None:
        if not self._starting:
            self._starting = True
            self.world.clock.after(seconds, self.start)
