"""Preemption: all ranks save at one step. The coordinator fixes it, above every step that any rank was seen at. Pure.

::

    coordinator                       node                            rank, at each step
      PreemptOrdered(no step) ──────>   word = HOLD, then reads steps    writes its step, then reads the word
      <────────── StepsRead(highest)                                     HOLD: waits for the step (daemons need no rank)
      all nodes: step = highest + 1
      PreemptOrdered(step) ─────────>   word = step                      saves at the first step that is not below it

A rank was seen at step s, or has seen the word before it left s. So no rank is past the step that is fixed, unless a
node did not answer in time, or the rank got no answer in time: then it is named.
"""

from msgspec.structs import replace

from ckptd.core import events as ev
from ckptd.core.actions import Action, AnnounceStep, HoldRanks, Note, ToNode
from ckptd.core.coordinator.sessions import Sessions
from ckptd.shared.base.ids import JobKey

PATIENCE_S = 2.0  # with a node that does not answer: its ranks most likely hold up all others


class Preemption:
    """The coordinator's part, of one session at a time."""

    def __init__(self, job: JobKey, node: str) -> None:
        self._job = job
        self._node = node
        self._session = ""
        self._why = ""
        self._asked: frozenset[str] = frozenset()  # nodes
        self._awaited: set[str] = set()  # of these
        self._until: float | None = None
        self._highest = -1
        self.step: int | None = None  # at which all ranks save

    @property
    def listened(self) -> bool:
        """Whether it is on, and some rank asks for it."""
        return bool(self._session) and self._highest >= 0

    def shown(self, session: str) -> int | None:
        """For the status: the step, -1 while it is being agreed; None: nobody preempts the session, or no rank asks."""
        return -1 if self.agreeing and session == self._session else self.due_from(session)

    def due_from(self, session: str) -> int | None:
        """The step from which on all that the session saves is drained; None: no rank of it asks, or it is another."""
        return self.step if self.listened and session == self._session else None

    @property
    def agreeing(self) -> bool:
        """Whether nodes were asked, and the step is not fixed."""
        return self._until is not None

    def asked(self, event: ev.PreemptAsked, sessions: Sessions, now: float) -> list[Action]:
        """Somebody wants it, or a rank was past the step."""
        session = sessions.living
        if not session:
            return []  # no rank is there, and the next run is another matter
        if event.passed is not None:
            return [Note(job=self._job, text=event.why)]
        if self._session == session:
            return []  # it is on
        self._session, self._why, self._highest, self.step = session, event.why, -1, None
        inside = sessions.topology.nodes if sessions.topology is not None else (self._node,)
        self._asked = frozenset((*inside, *(sessions.members.nodes - sessions.links.down)))
        self._awaited, self._until = {*self._asked} - sessions.links.down, now + PATIENCE_S
        return [self._order(name) for name in sorted(self._asked)]

    def read(self, node: str, event: ev.StepsRead) -> list[Action]:
        """A node reports the steps of its ranks."""
        if event.session != self._session:
            return []
        if self.step is not None:
            late = node in self._awaited and event.highest >= self.step
            self._awaited.discard(node)
            return [self._mismatch(node, event.highest)] if late else []
        self._awaited.discard(node)
        self._highest = max(self._highest, event.highest)
        if event.fixed is not None:  # by a coordinator that has ended since
            return self._fix(event.fixed)
        return [] if self._awaited else self._fix(self._highest + 1)

    def _fix(self, step: int) -> list[Action]:
        self.step, self._until = step, None
        orders: list[Action] = [self._order(name) for name in sorted(self._asked)]
        if not self.listened:
            return orders
        return [*orders, Note(job=self._job, text=f"preemption ({self._why}): all ranks save at step {step}")]

    def _order(self, node: str) -> ToNode:
        order = ev.PreemptOrdered(job=self._job, node=self._node, session=self._session, step=self.step)
        return ToNode(job=self._job, node=node, message=order)

    def _mismatch(self, node: str, highest: int) -> Note:
        text = f"preemption: a rank of node {node} was at step {highest} already when step {self.step} was fixed"
        return Note(job=self._job, text=f"{text} without it: their saves cannot be one checkpoint")

    def peer_up(self, node: str) -> list[Action]:
        """Messages to it may be lost."""
        return [self._order(node)] if node in self._asked and node != self._node else []

    def next_deadline(self) -> float | None:
        """When tick has something to do."""
        return self._until

    def tick(self, now: float) -> list[Action]:
        """A node that does not answer is not waited for."""
        if self._until is None or now < self._until:
            return []
        silent = ", ".join(sorted(self._awaited))
        text = f"preemption: node {silent} did not say in {PATIENCE_S:g} s at which step its ranks are"
        return [Note(job=self._job, text=text), *self._fix(self._highest + 1)]


class Notice:
    """A node's part: what the boards of its ranks are to say."""

    def __init__(self, job: JobKey) -> None:
        self._job = job
        self.order: ev.PreemptOrdered | None = None  # the last
        self.listened = False  # some rank here has asked
        self.read = False  # at which steps they are

    @property
    def step(self) -> int | None:
        """At which they save; None: none is fixed."""
        return self.order.step if self.order is not None else None

    def shown(self, session: str) -> int | None:
        """For the status of a node that does not coordinate: as that of the coordinator, and of the session here."""
        order = self.order
        if order is None or order.session != session:
            return None
        return -1 if order.step is None else order.step

    def ordered(self, order: ev.PreemptOrdered, ranks: tuple[int, ...]) -> list[Action]:
        """Of the coordinator. ranks: those of the session that live here; not all may have come back to this daemon."""
        if order.session != (self.order.session if self.order is not None else ""):
            self.listened = self.read = False
        known = self.order
        if known is not None and order.session == known.session and order.step is None and known.step is not None:
            order = replace(order, step=known.step)
            self.order = order
            return self._hold(order, ranks)  # a coordinator that began again receives which step it was
        self.order = order
        return self._hold(order, ranks) if order.step is None else self._announce(order, ranks)

    def _hold(self, order: ev.PreemptOrdered, ranks: tuple[int, ...]) -> list[Action]:
        return [HoldRanks(job=self._job, session=order.session, ranks=ranks)]

    def _announce(self, order: ev.PreemptOrdered, ranks: tuple[int, ...]) -> list[Action]:
        assert order.step is not None  # noqa: S101 - the caller looked
        return [AnnounceStep(job=self._job, session=order.session, ranks=ranks, step=order.step)]

    def came(self, rank: int, session: str) -> list[Action]:
        """A rank is let in after it was ordered."""
        order = self.order
        if order is None or order.session != session:
            return []
        return self._hold(order, (rank,)) if order.step is None else self._announce(order, (rank,))

    def heard(self, event: ev.StepsRead) -> ev.StepsRead:
        """The steps of this node's ranks."""
        self.read = True
        self.listened |= event.highest >= 0
        return event
