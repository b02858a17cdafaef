"""A machine as a table: which state follows from a state and an event. The code and the diagrams read it. Pure."""

import enum
from collections.abc import Callable, Iterator, Mapping
from typing import Generic, TypeVar

S = TypeVar("S", bound=enum.StrEnum)
E = TypeVar("E", bound=enum.Enum)
Row = tuple[S | None, E, S | None]  # state, event, state after; None: there is no such thing yet, or any more


class Table(Generic[S, E]):
    """Tests set ``trace``, which is called with each row that is taken, and ``strict``, of all tables of the process.

    Where they are not strict, as in a daemon, an event that has no row leaves the state as it is.
    """

    strict = False

    def __init__(self, edges: Mapping[S | None, Mapping[E, S | None]], ignored: Mapping[E, str]) -> None:
        """edges: by state, what follows from which event. ignored: why an event means nothing in all other states."""
        self.edges = edges
        self.ignored = ignored
        self.trace: Callable[[S | None, E, S | None], None] | None = None

    def after(self, state: S | None, event: E) -> S | None:
        """The state that follows. Raises AssertionError when the table is strict, and has no such row."""
        row = self.edges.get(state, {})
        if event not in row:
            assert not self.strict, f"no row for {state}: {event.value}"  # noqa: S101 - for tests
            return state
        if self.trace is not None:
            self.trace(state, event, row[event])
        return row[event]

    def takes(self, state: S | None, event: E) -> bool:
        """Whether the event means something in the state."""
        return event in self.edges.get(state, {})

    def rows(self) -> Iterator[Row[S, E]]:
        """All of them."""
        for state, row in self.edges.items():
            for event, after in row.items():
                yield state, event, after

    def mermaid(self) -> str:
        """As a diagram, a line for each pair of states."""
        arrows: dict[tuple[S | None, S | None], list[str]] = {}
        for state, event, after in self.rows():
            arrows.setdefault((state, after), []).append(str(event.value))
        lines = [f"  {a or '[*]'} --> {b or '[*]'}: {'; '.join(words)}" for (a, b), words in arrows.items()]
        return "\n".join(["```mermaid", "stateDiagram-v2", *lines, "```"])
