"""Which nodes of a job have said what they have, and how long the others are waited for. Pure.

Loads wait a little for the nodes of the session. What a node might still complete is given up when no silent node may
have a part of it. From its birth a coordinator is in doubt: it has received nothing yet. Time alone ends no doubt. It
makes one that is about nodes outside of the session ``overdue``: then it ends as soon as the job has need of that.
"""

from collections.abc import Container, Iterable

from ckptd.core.policy import Policy

UNKNOWN = ""  # stands for the nodes of a session whose topology this daemon does not know: it is silent until it does


class InventoryBarrier:
    """One call is made at the birth of a coordinator, and whenever a session is opened."""

    def __init__(self, policy: Policy) -> None:
        self._patience_s = policy.stage_timeout_s
        self._current: dict[str, tuple[str, set[str]]] = {}  # by node, once its link is up: session, former nodes
        self._spoke: set[str] = set()  # nodes that have spoken in this call
        self._awaited: set[str] = set()  # nodes that loads wait for
        self._awaited_until = 0.0
        self._silent: set[str] = set()  # nodes that may have a part of something
        self._inside: frozenset[str] = frozenset()  # without these no newer save can be staged
        self._called = False
        self._late_at: float | None = None
        self._late = False  # nodes outside have had their time
        self.settled = 0  # how often doubts ended
        self.doubts = True  # a silent node may still complete what looks useless

    def born(self, others: set[str]) -> None:
        """A coordinator has begun with what lies at its own node; no session is known. These may have more."""
        self._called, self._silent = True, others - self._current.keys() - self._spoke
        self.doubts = bool(self._silent)

    def begin(  # noqa: PLR0913 - which nodes, and why each
        self,
        nodes: set[str],
        inside: Iterable[str],
        session: str,
        now: float,
        former: Iterable[str] = (),
        *,
        repeat: bool = False,
    ) -> None:
        """A session was opened. Who has spoken since its link came up need not say it again.

        But only a node of this session from before this daemon restarted has named all nodes that it ran on before.
        nodes: all that have, or may have, something. inside: where the session runs. former: where sessions before it
        ran, as far as no node names them. repeat: all of them send it again, and loads wait for those that can.
        """
        doubted: set[str] = set()
        self._awaited = nodes - self._current.keys() if not repeat else nodes & (self._current.keys() | self._awaited)
        if repeat:
            doubted, self._current = self._silent, {}  # a node that does not answer now may still have something
        said = {node: named for node, (of, named) in self._current.items() if of == session}
        self._spoke = self._spoke - nodes if repeat else set(said)
        self._silent = (doubted | nodes.union(former, *said.values())) - self._spoke
        self._inside = frozenset(inside)
        self._awaited_until = now + self._patience_s / 10
        self.doubts = self._called = True
        self._late, self._late_at = False, now + self._patience_s

    def spoke(self, node: str, session: str, former: Iterable[str]) -> None:
        """The node has said what it has, in which session it is, and where the job ran before."""
        self._spoke.add(node)
        self._current[node] = (session, set(former))
        self._awaited.discard(node)
        self._silent |= set(former) - self._spoke
        self._silent.discard(node)

    def came(self, node: str) -> None:
        """Its link came up: it will say again what it has."""
        self._current.pop(node, None)

    def went(self, node: str) -> None:
        """It does not answer: loads do not wait for it."""
        self._current.pop(node, None)
        self._awaited.discard(node)

    def forget(self) -> None:
        """Another node makes the calls."""
        self._current, self._awaited, self._silent = {}, set(), set()
        self._called, self._late, self._late_at, self.doubts = False, False, None, True

    @property
    def complete(self) -> bool:
        """Whether every node that loads wait for has spoken."""
        return not self._awaited

    def doubts_of(self, nodes: Container[str]) -> bool:
        """Whether one of these is silent."""
        return self.doubts and any(node in nodes for node in self._silent)

    @property
    def overdue(self) -> bool:
        """Whether nobody is silent but nodes outside of the session that have had their time."""
        return self.doubts and self._late and not self._silent & self._inside

    def give_up(self) -> None:
        """What silent nodes may have is taken for lost."""
        self._silent = set()

    def settle(self) -> None:
        """The doubts end if no node is silent any more."""
        if self.doubts and self._called and not self._silent:
            self.doubts, self._late_at = False, None
            self.settled += 1

    def next_deadline(self) -> float | None:
        """When somebody has been waited for long enough."""
        awaited_until = self._awaited_until if self._awaited else None
        return min((t for t in (awaited_until, self._late_at) if t is not None), default=None)

    def tick(self, now: float) -> None:
        """Nodes are waited for no longer, of one kind or the other."""
        if self._awaited and now >= self._awaited_until:
            self._awaited = set()
        if self._late_at is not None and now >= self._late_at:
            self._late, self._late_at = True, None

    def check(self) -> None:
        """Asserts what must always hold."""
        assert not self._silent & self._spoke, "silent, and has spoken"  # noqa: S101
