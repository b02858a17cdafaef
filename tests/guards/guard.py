"""One guard: a few words of the product without which a promise does not hold, and the tests that must notice."""

from typing import NamedTuple

NODES = "tests/faults/nodes/"
FAULTS = "tests/faults/"


class Guard(NamedTuple):
    """One row of the table."""

    name: str  # for the command line; unique
    file: str  # below the root of the tree
    text: str  # stands in the file exactly once
    removed: str  # what takes its place
    tests: tuple[str, ...]  # node ids: of each, a case must fail; without [...] it is any case of the function

    @property
    def without(self) -> tuple[str, str]:
        """The text and what takes its place, for ``str.replace``."""
        return self.text, self.removed


def fault_guard(name: str, file: str, text: str, removed: str, *tests: str) -> Guard:
    """Of tests of one node; tests: node ids below tests/faults, without "test_" of the file."""
    return Guard(name, file, text, removed, tuple(f"{FAULTS}test_{test}" for test in tests))


def nodes_guard(name: str, file: str, text: str, removed: str, *tests: str) -> Guard:
    """Of tests between nodes; tests: node ids below tests/faults/nodes."""
    return Guard(name, file, text, removed, tuple(f"{NODES}test_{test}" for test in tests))


def function_of(node_id: str) -> str:
    """The node id of the function, without the case."""
    return node_id.partition("[")[0]
