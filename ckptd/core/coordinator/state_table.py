"""A machine as a table: which state follows from a state and an event. The code and the diagrams read it. Pure."""

import enum
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

S = TypeVar("S", bound=enum.StrEnum)
E = TypeVar("E", bound=enum.Enum)
Row = tuple[S | None, E, S | None]  # state, event, state after; None: there is no such thing yet, or any more


@dataclass(frozen=True, slots=True)
class Step(Generic[S]):
    """A row that is taken."""

    after: S | None


class Table(Generic[S, E]):
    """Tests set ``trace``, which is called with each row that is taken, and ``strict``, of all tables of the process.

    Where they are not strict, as in a daemon, an event that has no row is refused: ``step`` gives no step, the state
    stays as it is, and nothing of what was to follow is done.
    """

    strict = False

    def __init__(self, edges: Mapping[S | None, Mapping[E, S | None]], ignored: Mapping[E, str]) -> None:
        """edges: by state, what follows from which event. ignored: why an event means nothing in all other states."""
        self.edges = edges
        self.ignored = ignored
        self.trace: Callable[[S | None, E, S | None], None] | None = None

    def step(self, state: S | None, event: E) -> Step[S] | None:
        """To the state that follows; None: the table has no such row. Then it raises AssertionError where it is strict.

        Who calls it does nothing of what goes with the step when there is none.
        """
        row = self.edges.get(state, {})
        if event not in row:
            assert not self.strict, f"no row for {state}: {event.value}"  # noqa: S101 - for tests
            return None
        if self.trace is not None:
            self.trace(state, event, row[event])
        return Step(row[event])

    def begin(self, event: E) -> S:
        """The state in which something begins, by an event that begins it."""
        step = self.step(None, event)
        assert step is not None and step.after is not None, f"nothing begins by {event.value}"  # noqa: S101, PT018
        return step.after

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
