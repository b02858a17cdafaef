"""All guards. A test that promises something needs one here: without it nobody knows that the test can fail."""

from tests.guards import of_daemons, of_nodes, of_saves, of_simulator, of_tools
from tests.guards.guard import Guard

GUARDS: tuple[Guard, ...] = (*of_simulator.ROWS, *of_nodes.ROWS, *of_saves.ROWS, *of_daemons.ROWS, *of_tools.ROWS)
