"""A node whose daemon takes time for what it does: what comes while its loop is busy is handled later.

One round of the loop, as ckptd.daemon.loop has it: what this node's ranks and threads have said by now, then at most
256 packets of other daemons or 10 ms of them, then what is due on the links; each event goes through the core at its
own time, and what the core orders leaves when the loop gets to it. In a long round a thread sends keep-alives.
"""

import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptd.core import actions as act
from ckptd.core import events as ev
from ckptd.peers.keep_alive import _HANGS_S
from ckptd.peers.link import KEEPALIVES
from ckptd.peers.meetings import _AGAIN_MAX_S, _AGAIN_S
from ckptd.shared.base.ids import JobKey
from ckptd.shared.protocol.topology import Peer, Rendezvous, Topology
from tests.simulation.machine import Machine
from tests.simulation.network import HANDSHAKE_S
from tests.simulation.plane import PlayedPlane
from tests.simulation.shared import SPARED
from tests.simulation.wire import Wire

if TYPE_CHECKING:
    from tests.simulation.world import World

LONG_S = 0.05
_FREE_S = 0.002  # where nothing costs anything, a round takes what comes in so long: that is played faster
_POLL_S = 0.001  # the loop sleeps a whole number of milliseconds, and one


@dataclass(slots=True)
class Load:
    """What a daemon's loop did since ``reset``. Seconds of virtual time; ``core_s``: CPU of its core, as played."""

    busy_s: float = 0.0
    longest_s: float = 0.0
    long_turns: int = 0  # of more than LONG_S
    links_lost: int = 0
    packets: int = 0
    letters: int = 0  # in bundles of leaders, or to be passed on
    again: int = 0  # of these: with a body that had come before
    events: int = 0
    core_s: float = 0.0


class BusyMachine(Machine):
    """``loop_time``: up to when its loop is busy by now."""

    def __init__(self, world: "World", name: str, domain: str, ident: str) -> None:
        super().__init__(world, name, domain, ident)
        assert isinstance(world.network, Wire)
        self.wire: Wire = world.network
        self.plane: PlayedPlane | None = None
        self.load = Load()
        self._free_at = 0.0
        self._at_hand: deque[ev.Event] | None = None  # of the round that runs; None: the loop sleeps
        self._received = False  # in this round
        self._round_began = 0.0  # or ended, where the loop sleeps
        self._signs = False  # the thread that sends signs of life is to look at the loop
        self._interval_s = self.wire.costs.peer_timeout_s / KEEPALIVES
        self._touched = True  # the core, since its deadline was asked for
        self._deadline: float | None = None
        self._planned: float | None = None  # when the loop continues
        self._running = False
        self._starting = False

    @property
    def loop_time(self) -> float:
        return max(self.world.clock.now, self._free_at)

    def charge(self, seconds: float) -> None:
        """The loop is busy for so much longer."""
        if self.world.charged:
            if self._at_hand is None and self._free_at <= self.world.clock.now:
                self._round_began = self.world.clock.now
            self._free_at = self.loop_time + seconds
            self.load.busy_s += seconds
            if self._free_at - self._round_began > self._interval_s and not self._signs:
                self._signs = True
                self.world.clock.at(self._round_began + self._interval_s, self._sign, self.life)

    def _sign(self, life: int) -> None:
        """The plane's thread: the loop is in a long turn."""
        now = self.world.clock.now
        self._signs = False
        if self.life != life or self.plane is None or self.frozen or self._free_at <= now:
            return
        turn_s = now - self._round_began
        if turn_s + _POLL_S >= self._interval_s and turn_s < _HANGS_S:
            self.plane.send_signs_of_life()
        self._signs = True
        self.world.clock.after(self._interval_s, self._sign, life)

    def reset(self) -> None:
        """Counts anew."""
        self.load = Load()

    # --- life

    def start(self) -> None:
        if self.catalogue is None and not self.lost:
            self._free_at = self.world.clock.now
            self._at_hand = self._planned = None
            self._touched = True
            self._starting = True
            super().start()
            self._starting = False
            self.rouse()

    def _begun(self) -> None:
        self.plane = PlayedPlane(self, self.wire)

    def kill(self) -> None:
        plane, self.plane = self.plane, None
        if plane is not None:
            plane.died()
        super().kill()

    def say(self, event: ev.Event) -> None:
        if self.catalogue is None:
            return
        self._queue.append(event)
        if not self._starting:
            self.rouse()
        elif not self._busy:
            self._turn()

    def _turn(self) -> None:
        """At the start all that is found is handled before anything else."""
        self._busy = True
        while self._queue and self.catalogue is not None:
            self._handle(self._queue.popleft(), local=True)
        self._busy = False

    def _wake(self, when: float, life: int) -> None:
        self.rouse()

    # --- the loop

    def rouse(self) -> None:
        """The loop continues as soon as it can."""
        if not self._running:
            self._plan(self.loop_time if self.world.charged else self.world.clock.now + _FREE_S)

    def _plan(self, when: float) -> None:
        if self.catalogue is not None and (self._planned is None or when < self._planned):
            self._planned = when
            self.world.clock.at(when, self._go, when, self.life)

    def _go(self, when: float, life: int) -> None:
        if self.life != life or self._planned != when:
            return
        self._planned = None
        if not self.frozen:
            self._running = True
            again = self._rounds(life)
            self._running = False
            if again is not None:
                self._plan(again)

    def _rounds(self, life: int) -> float | None:
        """As many steps as take no time. When the next one is due; None: a packet or an event will rouse the loop."""
        while self.catalogue is not None and self.life == life:
            if self._free_at > self.world.clock.now:
                return self._free_at
            if self._at_hand is None:
                due = self._due()
                if due is None or due > self.world.clock.now:
                    return due
                self._begin()
            elif self._at_hand:
                self._handle(self._at_hand.popleft(), local=not self._received)
            elif not self._received:
                self._receive()
            else:
                self._end()
        return None

    def _due(self) -> float | None:
        """When the next round begins."""
        assert self.plane is not None
        if self._queue or self.wire.waits(self.name):
            return 0.0
        core, plane = self._core_due(), self.plane.next_deadline()
        times = (plane, core - self.offset if core is not None else None)
        return min((t + _POLL_S for t in times if t is not None), default=None)

    def _core_due(self) -> float | None:
        assert self.catalogue is not None
        if self._touched:
            self._deadline, self._touched = self.catalogue.next_deadline(), False
        return self._deadline

    def _begin(self) -> None:
        now = self.world.clock.now
        self._round_began, self._received = now, False
        self._at_hand, self._queue = self._queue, deque()

    def _receive(self) -> None:
        assert self.plane is not None
        self._received = True
        self._at_hand = deque([*self.plane.receive(), *self.plane.tick()])

    def _handle(self, event: ev.Event, *, local: bool) -> None:
        assert self.catalogue is not None
        if local:
            self.charge(self.wire.costs.local(event, self.wire.sizes))
        self.world.saw(self, event)
        self.load.events += 1
        self._touched = True
        began, SPARED.seconds = time.thread_time(), 0.0
        actions = self.catalogue.handle(event, self.now)
        self._core_took(time.thread_time() - began + SPARED.seconds)
        self.all_of(actions)

    def _core_took(self, seconds: float) -> None:
        self.load.core_s += seconds
        if self.wire.costs.core:
            self.charge(seconds)

    def _end(self) -> None:
        """What is due in the core, and the round is over."""
        assert self.catalogue is not None
        life = self.life
        self._at_hand = None
        due = self._core_due()
        if due is not None and due <= self.now:
            self._touched = True
            began = time.thread_time()
            actions = self.catalogue.tick(self.now)
            self._core_took(time.thread_time() - began)
            self.all_of(actions)
            if self.catalogue is None or self.life != life:
                return
            due = self._core_due()
            assert due is None or due > self.now, f"{self.name}: the loop would spin: due {due}, now {self.now}"
        assert self.plane is not None
        self.plane.send_bundles()
        if self.world.checked and (self.world.thorough or self.world.events % 16 == 0):
            self.catalogue.check()
        took, self._round_began = self.loop_time - self._round_began, self.loop_time
        self.load.longest_s = max(self.load.longest_s, took)
        self.load.long_turns += took > LONG_S

    # --- what the core asks for

    def perform(self, action: act.Action) -> None:
        if not isinstance(action, act.ToNode | act.ToRank | act.Note):
            self.charge(self.wire.costs.local_s)
        super().perform(action)

    def _to_rank(self, action: act.ToRank) -> None:
        self.charge(self.wire.costs.rank_s)
        self.world.clock.at(self.loop_time, self._reaches, action, self.life)

    def _reaches(self, action: act.ToRank, life: int) -> None:
        if self.life == life and self.catalogue is not None:
            self.world.to_rank(self, action)

    def _to_node(self, action: act.ToNode, node: str) -> None:
        assert self.plane is not None
        self.plane.send(action.job, node, action.message)

    def meet(self, job: JobKey, peers: tuple[Peer, ...]) -> None:
        assert self.plane is not None
        self.known.setdefault(job, {})
        self.plane.meet(job, peers)
        self.rouse()

    def meet_at(self, action: act.Meet) -> None:
        assert self.plane is not None
        key, rendezvous = (action.job, action.session), action.rendezvous
        if rendezvous.peer.node == self.name:
            self.expected[key] = rendezvous.ticket
            return
        self.shown[key] = rendezvous
        self.meet(action.job, (rendezvous.peer,))
        self._present(key, self.life)

    def _present(self, key: tuple[JobKey, str], life: int, wait_s: float = _AGAIN_S) -> None:
        """Shows a ticket, again until the other daemon knows this one; over one connection, as ``Meetings`` does."""
        rendezvous = self.shown.get(key)
        if rendezvous is None or self.life != life or self.plane is None:
            return
        if not self.plane.up_for(key[0], rendezvous.peer.node):
            handshake_s = self.wire.costs.handshake_s if wait_s == _AGAIN_S else 0.0
            self.charge(handshake_s + self.wire.costs.packet_out_s)
            self.world.clock.after(HANDSHAKE_S, self._presented, key, rendezvous, handshake_s)
        self.world.clock.after(wait_s, self._present, key, life, min(2 * wait_s, _AGAIN_MAX_S))

    def _presented(self, key: tuple[JobKey, str], rendezvous: Rendezvous, handshake_s: float) -> None:
        host = self.world.nodes.get(rendezvous.peer.node)
        if not isinstance(host, BusyMachine) or not host.up or host.plane is None:
            return
        knows = host.peer == rendezvous.peer and host.expected.get(key) == rendezvous.ticket
        if knows and not self.wire.blocked(self.name, host.name):
            host.charge(handshake_s + self.wire.costs.packet_in_s)
            host.meet(key[0], (self.peer,))

    def keep(self, job: JobKey, topology: Topology, outside: tuple[Peer, ...]) -> None:
        assert self.plane is not None
        self.known.setdefault(job, {})
        self.plane.keep(job, topology, outside)
        self.rouse()

    def keep_links(self, action: act.KeepLinks) -> None:
        assert self.plane is not None
        self.plane.keep_links(action.job, action.nodes, action.relays)
        self.rouse()

    def forget(self, job: JobKey) -> None:
        assert self.plane is not None
        self.known.pop(job, None)
        self._forget_tickets(job)
        self.plane.forget(job)
