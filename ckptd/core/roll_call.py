"""Which nodes of a job have said what they have, and how long the others are waited for. Pure.

Loads and the judgement of older saves wait a little for the nodes of the session. What a node might still complete is
given up later, once nobody is silent who may have a part of it: of this session, or of those before.
"""

from collections.abc import Container, Iterable

from ckptd.core.policy import Policy


class RollCall:
    """One call is made whenever a session is opened."""

    def __init__(self, policy: Policy) -> None:
        self._patience_s = policy.stage_timeout_s
        self._current: dict[str, tuple[str, set[str]]] = {}  # who spoke since its link came up: session, former nodes
        self._spoke: set[str] = set()  # nodes that have spoken in this call
        self._awaited: set[str] = set()  # nodes that loads wait for
        self._awaited_until = 0.0
        self._silent: set[str] = set()  # nodes that may have a part of something
        self._doubt_until: float | None = None

    def begin(self, nodes: set[str], session: str, now: float) -> None:
        """A session was opened on these nodes. Who has spoken since its link came up need not say it again.

        But only who was in this session then, before this daemon restarted, has named all nodes that it ran on before.
        """
        self._awaited = nodes - self._current.keys()
        said = {node: former for node, (of, former) in self._current.items() if of == session}
        self._spoke = set(said)
        self._silent = nodes.union(*said.values()) - self._spoke
        self._awaited_until = now + self._patience_s / 10
        self._doubt_until = now + self._patience_s

    def spoke(self, node: str, session: str, former: Iterable[str]) -> None:
        """The node has said what it has, in which session it is, and where the job ran before."""
        self._spoke.add(node)
        self._current[node] = (session, set(former))
        self._awaited.discard(node)
        self._silent = (self._silent | set(former)) - self._spoke

    def came(self, node: str) -> None:
        """Its link came up: it will say anew what it has."""
        self._current.pop(node, None)

    def went(self, node: str) -> None:
        """It does not answer: loads do not wait for it."""
        self._current.pop(node, None)
        self._awaited.discard(node)

    def forget(self) -> None:
        """Another node makes the calls."""
        self._current, self._awaited, self._doubt_until = {}, set(), None

    @property
    def complete(self) -> bool:
        """Whether every node that loads wait for has spoken."""
        return not self._awaited

    @property
    def doubts(self) -> bool:
        """Whether a silent node may still complete what looks useless."""
        return self._doubt_until is not None

    def doubts_of(self, nodes: Container[str]) -> bool:
        """Whether one of these is silent."""
        return self.doubts and any(node in nodes for node in self._silent)

    def settle(self) -> bool:
        """Whether the doubts end with this: nobody is silent any more."""
        ends = self.doubts and not self._silent
        self._doubt_until = None if ends else self._doubt_until
        return ends

    def next_deadline(self) -> float | None:
        """When somebody has been waited for long enough."""
        awaited_until = self._awaited_until if self._awaited else None
        return min((t for t in (awaited_until, self._doubt_until) if t is not None), default=None)

    def tick(self, now: float) -> bool:
        """Whether nodes are waited for no longer, of one kind or the other: what they may have is taken for lost."""
        late = bool(self._awaited) and now >= self._awaited_until
        lost = self._doubt_until is not None and now >= self._doubt_until
        if late:
            self._awaited = set()
        if lost:
            self._silent = set()
        return late or lost
