"""One guard: a few words of the product without which a promise does not hold, and the tests that must notice."""

from typing import NamedTuple

NODES = "tests/faults/nodes/"
FAULTS = "tests/faults/"
PLAYS = "tests/simulation/test_simulation.py"


class Edit(NamedTuple):
    """What is changed in one file."""

    file: str  # below the root of the tree
    text: str  # stands in the file exactly once
    removed: str  # what takes its place


class Guard(NamedTuple):
    """One row of the table."""

    name: str  # for the command line; unique
    edits: tuple[Edit, ...]
    tests: tuple[str, ...]  # node ids: of each, a case must fail; without [...] it is any case of the function

    def beside(self, file: str, text: str, removed: str) -> "Guard":
        """The same, with another guard removed that stands behind the first: one alone keeps the promise."""
        return self._replace(edits=(*self.edits, Edit(file, text, removed)))


def fault_guard(name: str, file: str, text: str, removed: str, *tests: str) -> Guard:
    """Of tests of one node; tests: node ids below tests/faults, without "test_" of the file."""
    return Guard(name, (Edit(file, text, removed),), tuple(f"{FAULTS}test_{test}" for test in tests))


def nodes_guard(name: str, file: str, text: str, removed: str, *tests: str) -> Guard:
    """Of tests between nodes; tests: node ids below tests/faults/nodes."""
    return Guard(name, (Edit(file, text, removed),), tuple(f"{NODES}test_{test}" for test in tests))


def play_guard(name: str, file: str, text: str, removed: str) -> Guard:
    """Of the core, for plays of the simulator."""
    return Guard(name, (Edit(file, text, removed),), (f"{PLAYS}::test_no_promise_is_broken",))


def function_of(node_id: str) -> str:
    """The node id of the function, without the case."""
    return node_id.partition("[")[0]
