"""Everything together: nodes, links, stores, jobs, and what goes wrong. One seed makes one course of events."""

import itertools
from collections import Counter, deque
from collections.abc import Callable
from hashlib import blake2b
from typing import Any

from ckptd.core import actions as act
from ckptd.core import events as ev
from ckptd.core.policy import Policy
from ckptd.shared.base.ids import JobKey
from ckptd.shared.format.schemes import Scheme
from ckptd.shared.protocol.messages import Cadence
from ckptd.store.worker import _PROGRESS_PERIOD_S as PROGRESS_S
from tests.simulation.book import Book
from tests.simulation.busy import BusyMachine
from tests.simulation.chaos import Chaos
from tests.simulation.clock import Clock
from tests.simulation.costs import Costs
from tests.simulation.effects import ActionExecutor
from tests.simulation.hardware import Hardware
from tests.simulation.journals import Journals
from tests.simulation.launcher import Launcher
from tests.simulation.machine import Machine
from tests.simulation.network import Network
from tests.simulation.promises import Promises
from tests.simulation.rare import Rare
from tests.simulation.scrubs import Scrubs
from tests.simulation.store import Store
from tests.simulation.wire import Wire

KEY = JobKey("/store", "job")
POLICY = Policy(
    slots_per_rank=3,
    keep_last=2,
    connect_timeout_s=30,
    stage_timeout_s=60,
    read_timeout_s=100,
    drain_retry_max_s=8,
    drain_give_up_s=120,
    orphan_ttl_s=7200,
    empty_ttl_s=60,
)
TRANSCRIPT_LINES = 200


class World:
    """``run`` lets virtual time pass."""

    def __init__(
        self,
        seed: int,
        nodes: int,
        *,
        scheme: Scheme = Scheme.XOR,
        set_size: int = 8,
        jobs: int = 1,
        fault_every_s: float = 12.0,
        ranks_per_node: tuple[int, ...] = (1,),
        think_s: float = 4.0,
        policy: Policy = POLICY,
        shared: float = 0.6,
        odd: float = 0.25,
        relaid: float = 0.15,
        compound: float = 0.0,
        rare_every_s: float = 0.0,
        flip_every_s: float = 0.0,
        costs: Costs | None = None,
    ) -> None:
        self.seed = seed
        self.clock = Clock(seed)
        self.costs = costs  # None: what a daemon does takes no time
        self.charged = True  # False: nothing costs anything just now
        self.progress_s = PROGRESS_S if costs is not None else 0.0  # between two reports of a drain; 0: there are none
        self.hardware = Hardware()
        self.drain_s = 0.0  # that a node's share of each drain takes; 0: a while
        # Chances that a session's ranks save shares, that one of them is no replica, and that ranks need all images.
        self.shared, self.odd, self.relaid = shared, odd, relaid
        self.policy = policy
        self.scheme, self.set_size = scheme, set_size
        self.ranks_per_node, self.think_s = ranks_per_node, think_s
        self.lines: deque[tuple[Any, ...]] = deque(maxlen=TRANSCRIPT_LINES)
        self.everything: list[tuple[Any, ...]] | None = None  # a list: keep all lines
        self.counts: Counter[str] = Counter()
        self.notes = 0
        self.seq = 0
        self.lives = itertools.count(1)
        self.expired = False  # so much time has passed that memory of dead jobs may go
        self.keeping_is_meeting = False
        self.events = 0
        self.at_each_event: Callable[[], None] = lambda: None
        self.book = Book()
        self.cadence: Cadence | None = None  # of all sessions; else each draws one
        self.forced = 0.1  # chance that a save is asked to be drained, by name
        self.thorough = nodes <= 8
        self.checked = True  # by the cores themselves, now and then
        self._fingerprint = blake2b(digest_size=8)
        self.nodes: dict[str, Machine] = {}
        self.lost: list[Machine] = []
        self.promises = Promises(self)
        self.journals = Journals(self)
        self.network: Any = Network(self.clock, self.nodes) if costs is None else Wire(self.clock, self.nodes, costs)
        self.effects = ActionExecutor(self)
        self.stores: dict[JobKey, Store] = {}
        self.chaos = Chaos(self, every_s=fault_every_s, reshape=0.15, compound=compound)
        self.rare = Rare(self, rare_every_s)
        self.scrubs = Scrubs(self, flip_every_s)
        self._idents = 0
        self._names = nodes
        for index in range(nodes):
            self._add(f"n{index:03d}", f"rack{index // 2}")
        keys = [JobKey(KEY.store, f"{KEY.job}{i or ''}") for i in range(jobs)]
        self.launchers = [Launcher(self, key) for key in keys]
        for key in keys:
            self.store(key)

    def _add(self, name: str, domain: str) -> Machine:
        self._idents += 1
        kind = Machine if self.costs is None else BusyMachine
        machine = self.nodes[name] = kind(self, name, domain, f"a{self._idents}")
        return machine

    def begin(self) -> None:
        """Daemons and jobs start; things begin to go wrong."""
        for machine in self.nodes.values():
            self.clock.after(self.clock.between(0, 1), machine.start)
        for launcher in self.launchers:
            self.clock.after(1.0, launcher.start)
        self.chaos.begin()
        self.rare.begin()
        self.scrubs.begin()

    def run(self, seconds: float) -> None:
        """So much virtual time passes."""
        until = self.clock.now + seconds
        while self.clock.step(until):
            pass

    def run_until(self, done: Any, seconds: float) -> bool:
        """As long as it takes, but no longer than this; whether it is done."""
        until = self.clock.now + seconds
        while not done():
            if not self.clock.step(until):
                return bool(done())
        return True

    def store(self, job: JobKey) -> Store:
        """The job's directory on the shared file system."""
        if job not in self.stores:
            self.stores[job] = Store(self.policy.keep_last, self.policy.keep_every)
        return self.stores[job]

    def replace(self, machine: Machine) -> None:
        """A lost node is replaced by an empty one."""
        if self.nodes.get(machine.name) is not machine:
            return
        self.lost.append(machine)
        name = machine.name
        if self.clock.chance(0.5):
            del self.nodes[name]
            name = f"n{self._names:03d}"
            self._names += 1
        fresh = self._add(name, machine.peer.domain)
        self.log(fresh, "takes the place of", machine.name)
        fresh.start()

    def to_rank(self, machine: Machine, action: act.ToRank) -> None:
        """A word for a rank: reaches it if it is attached to this very daemon."""
        memory = machine.arena.jobs.get(action.job)
        proc = memory.rank_files.get((action.rank, action.session)) if memory else None
        if proc is not None and proc.life == machine.life:
            proc.hear(action)
        elif proc is None:
            self._to_leaving(machine, action)

    def _to_leaving(self, machine: Machine, action: act.ToRank) -> None:
        """Who says goodbye has left its rank file already, and waits for the answer."""
        for launcher in self.launchers:
            for session in (launcher.current, *launcher.zombies):
                if session is not None and session.name == action.session and action.rank < len(session.procs):
                    proc = session.procs[action.rank]
                    if proc.state == "closing" and proc.life == machine.life:
                        proc.hear(action)

    # --- transcript

    def saw(self, machine: Machine, event: ev.Event) -> None:
        """An event that a daemon handles now."""
        self.events += 1
        self.at_each_event()
        self.journals.hears(machine, event)
        self._fingerprint.update(f"{self.clock.now:.6f}{machine.name}{type(event).__name__}".encode())
        self._keep((self.clock.now, machine.name, ">", event))

    def did(self, machine: Machine, action: act.Action) -> None:
        """An action that its core asks for."""
        self._keep((self.clock.now, machine.name, "    <", action))

    def log(self, machine: Machine, *words: Any) -> None:
        """Anything else."""
        self._keep((self.clock.now, machine.name, "**", *words))

    def _keep(self, line: tuple[Any, ...]) -> None:
        self.lines.append(line)
        if self.everything is not None:
            self.everything.append(line)

    @property
    def fingerprint(self) -> str:
        """The same for the same course of events."""
        return self._fingerprint.hexdigest()
