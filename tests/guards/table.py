"""All guards. A test that promises something needs one here: without it nobody knows that the test can fail."""

from tests.guards import of_nodes, of_simulator
from tests.guards.guard import Guard

GUARDS: tuple[Guard, ...] = (*of_simulator.ROWS, *of_nodes.ROWS)
