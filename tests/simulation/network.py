"""Links between daemon lives: in order, exactly once, or the link goes down and both sides are told so.

Loss, duplication and reordering below a link show as delay: what is lost is sent again, and what is behind it waits.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ckptd.core import events as ev
from ckptd.shared.base.ids import JobKey
from ckptd.shared.protocol import node_messages
from tests.simulation.clock import Clock

HANDSHAKE_S = 0.02
DELAY_S = 0.0005
RESENT_S = 0.4
PEER_TIMEOUT_S = 10.0
LINGER_S = 5.0
ASIDE_S = 60.0

Sides = tuple[frozenset[str], frozenset[str]]  # of a partition


@dataclass(eq=False, slots=True)
class Tie:
    """One connection of two daemon lives. Nothing of it reaches anybody once its link has another, or none."""

    lives: dict[str, int]
    jobs: set[JobKey] = field(default_factory=set)  # told to both sides, or on the way
    heard: set[tuple[str, JobKey]] = field(default_factory=set)  # node, job: it may send
    free_at: dict[str, float] = field(default_factory=dict)  # receiver -> when what was sent last arrives
    held: list[tuple[str, Any]] = field(default_factory=list)  # arrived while the way was blocked


@dataclass(eq=False, slots=True)
class Link:
    """Two nodes that know each other."""

    ends: tuple[str, str]
    tie: Tie | None = None
    blocks: int = 0  # partitions that lie between them
    dialling: bool = False


class Network:
    """All links. ``nodes`` is the world's registry: name -> the machine of that name now."""

    def __init__(self, clock: Clock, nodes: dict[str, Any]) -> None:
        self._clock = clock
        self._nodes = nodes
        self._links: dict[tuple[str, str], Link] = {}
        self._of: dict[str, dict[str, Link]] = {}
        self.partitions: list[Sides] = []
        self.sent: Counter[str] = Counter()  # messages of each node
        self.nbytes: Counter[str] = Counter()
        self.kinds: Counter[str] = Counter()
        self.dropped = 0
        self.bad_weather = False
        self._kept: dict[tuple[str, JobKey], frozenset[str] | None] = {}  # None: a link to all
        self._aside: Counter[tuple[str, str, JobKey]] = Counter()  # lately sent to
        self.wanted: Callable[[str, str], bool] = lambda _a, _b: True  # which links are made at all
        self._last: tuple[Any, int, Any] = (None, 0, None)  # message, its bytes, as it is received

    def link(self, a: str, b: str) -> Link:
        """The link of two nodes, made when it is first asked for."""
        ends = (a, b) if a < b else (b, a)
        found = self._links.get(ends)
        if found is None:
            found = self._links[ends] = Link(ends, blocks=sum(is_between(p, a, b) for p in self.partitions))
            self._of.setdefault(a, {})[b] = found
            self._of.setdefault(b, {})[a] = found
        return found

    def links_of(self, node: str) -> list[Link]:
        """Every link that ends there."""
        return list(self._of.get(node, {}).values())

    # --- up and down

    def met(self, node: str, others: list[str]) -> None:
        """The node's daemon knows these from now on."""
        for other in others:
            if other != node and self.wanted(node, other) and self._of_use(node, other):
                self.consider(self.link(node, other))

    def keep_links(self, node: str, job: JobKey, nodes: tuple[str, ...] | None) -> None:
        """The node's daemon keeps a link to these from now on."""
        self._kept[node, job] = None if nodes is None else frozenset(nodes)
        self.met(node, list(self._nodes if nodes is None else nodes))
        self._look_for_idle(node)

    def _look_for_idle(self, node: str) -> None:
        for link in self.links_of(node):
            if link.tie is not None and not self._of_use(*link.ends):
                self._clock.after(self._clock.between(1, 1.5) * LINGER_S, self._rest, link, link.tie)

    def _of_use(self, a: str, b: str) -> bool:
        return any(self._needs(*ends, job) for ends in ((a, b), (b, a)) for job in self._jobs_of(ends[0]))

    def _jobs_of(self, node: str) -> list[JobKey]:
        machine = self._nodes.get(node)
        return list(machine.known) if machine is not None else []

    def _needs(self, node: str, other: str, job: JobKey) -> bool:
        kept = self._kept.get((node, job), frozenset())
        return kept is None or other in kept or self._aside[node, other, job] > 0

    def _rest(self, link: Link, tie: Tie) -> None:
        if link.tie is not tie or link.blocks or self._of_use(*link.ends):
            return
        link.tie = None
        for node, job in sorted(tie.heard):
            other = link.ends[link.ends[0] == node]
            if (machine := self._nodes.get(node)) is not None and machine.life == tie.lives[node]:
                machine.say(ev.PeerDown(job=job, node=other, rests=True))

    def _aside_over(self, node: str, other: str, job: JobKey) -> None:
        self._aside[node, other, job] -= 1
        self._look_for_idle(node)

    def consider(self, link: Link) -> None:
        """Dials if both sides can and want to; tells jobs that a tie does not carry yet."""
        jobs = self._common(link)
        if link.tie is not None:
            fresh = jobs - link.tie.jobs
            if fresh:
                self._announce(link, link.tie, sorted(fresh))
        elif jobs and not link.dialling and link.blocks == 0 and self._of_use(*link.ends):
            link.dialling = True
            self._clock.after(self._clock.between(0.2, 2) * HANDSHAKE_S, self._dialled, link)

    def _common(self, link: Link) -> set[JobKey]:
        a, b = (self._nodes.get(name) for name in link.ends)
        if a is None or b is None or a.catalogue is None or b.catalogue is None or a.frozen or b.frozen:
            return set()
        if link.blocks == 0:
            a.accept(b)
            b.accept(a)
        return {job for job in a.known if a.knows(job, b) and b.knows(job, a)}

    def _dialled(self, link: Link) -> None:
        link.dialling = False
        jobs = self._common(link)
        if link.tie is not None or link.blocks or not jobs:
            return
        link.tie = Tie({name: self._nodes[name].life for name in link.ends})
        self._announce(link, link.tie, sorted(jobs))

    def _announce(self, link: Link, tie: Tie, jobs: list[JobKey]) -> None:
        tie.jobs |= set(jobs)
        for job in jobs:
            for node, other in (link.ends, link.ends[::-1]):
                fresh = self._nodes[node].seen.get((other, job)) != tie.lives[other]
                self._send_on(link, tie, node, ev.PeerUp(job=job, node=other, fresh=fresh))

    def give_up(self, link: Link, *, told_at_once: str = "") -> None:
        """The tie is over; each side learns it after the peer timeout, unless it is tied anew before.

        told_at_once: the side that noticed.
        """
        tie, link.tie = link.tie, None
        if tie is None:
            return
        for node in link.ends:
            late = 0.0 if node == told_at_once else self._clock.between(1, 1.5) * PEER_TIMEOUT_S
            self._clock.after(late, self._notice, link, tie, node)
        self.consider(link)

    def _notice(self, link: Link, tie: Tie, node: str) -> None:
        machine = self._nodes.get(node)
        if machine is None or machine.life != tie.lives[node]:
            return
        other = link.ends[link.ends[0] == node]
        for job in sorted(tie.jobs):
            renewed = link.tie is not None and (node, job) in link.tie.heard
            if (node, job) in tie.heard and not renewed:
                machine.say(ev.PeerDown(job=job, node=other))

    def leave(self, node: str, job: JobKey) -> None:
        """The job is over at this node: those it was tied to for it are told so, in order."""
        self._kept.pop((node, job), None)
        for link in self.links_of(node):
            tie = link.tie
            if tie is None or job not in tie.jobs:
                continue
            other = link.ends[link.ends[0] == node]
            tie.jobs.discard(job)
            tie.heard -= {(node, job), (other, job)}
            self._send_on(link, tie, other, ev.PeerDown(job=job, node=node))

    def died(self, node: str) -> None:
        """The daemon there is gone: its links are over."""
        self._kept = {place: kept for place, kept in self._kept.items() if place[0] != node}
        for link in self.links_of(node):
            self.give_up(link)

    def reset(self, link: Link) -> None:
        """The connection breaks and comes back at once: what was under way is lost, and both are told."""
        link.tie = None
        self.consider(link)

    def partition(self, some: frozenset[str], others: frozenset[str], seconds: float) -> None:
        """No way between the two groups for so long. Short ones only delay."""
        sides = (some, others)
        self.partitions.append(sides)
        for link in self._between(some, others):
            link.blocks += 1
            if link.tie is not None:
                patience = self._clock.between(1, 1.3) * PEER_TIMEOUT_S
                self._clock.after(patience, self._silent, link, link.tie, self._clock.random.choice(link.ends))
        self._clock.after(seconds, self._heal, sides)

    def _between(self, some: frozenset[str], others: frozenset[str]) -> list[Link]:
        return [link for ends, link in self._links.items() if is_between((some, others), *ends)]

    def _silent(self, link: Link, tie: Tie, node: str) -> None:
        if link.tie is tie and link.blocks:
            self.give_up(link, told_at_once=node)

    def _heal(self, sides: Sides) -> None:
        if sides not in self.partitions:
            return
        self.partitions.remove(sides)
        for link in self._between(*sides):
            link.blocks -= 1
            if link.blocks == 0 and link.tie is not None:
                held, link.tie.held = link.tie.held, []
                for node, message in held:
                    self._send_on(link, link.tie, node, message)
            self.consider(link)

    def heal(self) -> None:
        """Every partition is over."""
        for sides in list(self.partitions):
            self._heal(sides)

    def connected(self, a: str, b: str, _job: JobKey) -> bool:
        """Whether bulk bytes can flow: the peers are tied."""
        found = self._links.get((a, b) if a < b else (b, a))
        return a == b or (found is not None and found.tie is not None and found.blocks == 0)

    # --- messages

    def send(self, node: str, other: str, message: ev.Message) -> None:
        """A message of a node's core for another one's, as bytes that say it and back.

        Dropped without a word unless the sender was told PeerUp.
        """
        self.sent[node] += 1
        self.kinds[kind_of(message)] += 1
        if message is not self._last[0]:  # an order to many nodes is one object
            raw = node_messages.encode(message)
            self._last = (message, len(raw), node_messages.decode(raw))
        _, nbytes, received = self._last
        self.nbytes[node] += nbytes
        link = self._of.get(node, {}).get(other)
        tie = link.tie if link is not None else None
        kept = self._kept.get((node, message.job), frozenset())
        if kept is not None and other not in kept and other in self._nodes:
            self._aside[node, other, message.job] += 1
            self._clock.after(ASIDE_S, self._aside_over, node, other, message.job)
            self.consider(self.link(node, other))
        if link is None or tie is None or (node, message.job) not in tie.heard:
            self.dropped += 1
            return
        self._send_on(link, tie, other, received)

    def _send_on(self, link: Link, tie: Tie, node: str, message: Any) -> None:
        clock = self._clock
        delay = clock.mostly(DELAY_S, RESENT_S, 0.05 if self.bad_weather else 0.002)
        arrives = tie.free_at[node] = max(clock.now + delay, tie.free_at.get(node, 0.0))
        clock.at(arrives, self._arrive, link, tie, node, message)

    def _arrive(self, link: Link, tie: Tie, node: str, message: Any) -> None:
        if link.tie is not tie:
            self.dropped += not isinstance(message, ev.PeerUp)
            return
        if link.blocks:
            tie.held.append((node, message))
            return
        machine = self._nodes[node]
        if message.job not in machine.known:
            self.dropped += 1  # it has left the job meanwhile
            return
        if isinstance(message, ev.PeerUp):
            if message.job not in tie.jobs:
                return
            tie.heard.add((node, message.job))
            machine.seen[message.node, message.job] = tie.lives[message.node]
        machine.say(message)


def is_between(sides: Sides, a: str, b: str) -> bool:
    some, others = sides
    return (a in some and b in others) or (b in some and a in others)


def kind_of(message: ev.Event) -> str:
    inner = message.event if isinstance(message, ev.Report) else message
    return type(inner).__name__
