"""All guards, and the fault tests without one. A test that promises something needs a guard: what else can break it?"""

from tests.guards import (
    of_connect,
    of_daemons,
    of_dropped,
    of_ends,
    of_journal,
    of_leaders,
    of_loads,
    of_metadata,
    of_nodes,
    of_pulls,
    of_replicas,
    of_reports,
    of_saves,
    of_scrub,
    of_simulator,
    of_tools,
)
from tests.guards.guard import FAULTS, NODES, Guard

GUARDS: tuple[Guard, ...] = (
    *of_simulator.ROWS, *of_nodes.ROWS, *of_saves.ROWS, *of_daemons.ROWS, *of_ends.ROWS, *of_tools.ROWS,
    *of_connect.ROWS, *of_leaders.ROWS, *of_replicas.ROWS, *of_loads.ROWS, *of_pulls.ROWS, *of_reports.ROWS,
    *of_journal.ROWS,
    *of_metadata.ROWS, *of_dropped.ROWS, *of_scrub.ROWS,
)  # fmt: skip

_COSTS = "it takes 3 GiB of /dev/shm and fails after a minute; tests/faults/test_slow_memory.py has the same guard"
WITHOUT = {  # tests that have no row, and why
    f"{FAULTS}test_demo.py::test_an_interrupted_demo_leaves_nothing_behind": "it runs in the long form alone",
    f"{NODES}test_pulled_loss.py::test_a_daemon_that_pulls_stays_away": "it runs in the long form alone",
    f"{FAULTS}test_first_save.py::test_without_a_load_it_waits_for_one_slot": _COSTS,
    f"{FAULTS}test_first_save.py::test_after_a_load_it_costs_what_the_next_ones_do": _COSTS,
    f"{FAULTS}test_growth.py::test_thousands_of_tensors_need_a_handful_of_descriptors":
        "no line of the product opens a descriptor for a tensor: there is no guard to remove",
    f"{FAULTS}test_missing_ranks.py::test_a_process_that_ends_while_its_save_waits_ends_cleanly":
        "without the wait for the listening thread the interpreter crashes at its end, but not every time",
    f"{FAULTS}test_status_captures.py::test_a_capture_of_real_daemons_is_what_is_printed_today":
        "it compares a document with an output: whatever changes the output fails it",
    f"{FAULTS}test_account.py::test_a_step_costs_less_than_20_us":
        "no line of the product keeps a call short: it writes two numbers to memory",
    f"{FAULTS}test_scrub.py::test_a_store_that_hangs_under_a_scrub_costs_no_save_and_raises_no_alarm":
        "the daemon has no code that touches a store: its worker, another process, alone can hang",
    f"{FAULTS}test_scrub.py::test_saves_beside_a_scrub_without_a_pause_lose_nothing_and_raise_no_alarm":
        "when a slot is read while it is given away is chance: tests/unit/parity/test_scrub.py has a guard",
    f"{FAULTS}test_preempted.py::test_a_question_costs_less_than_20_us":
        "an idle machine also opens the board at each question in that time",
    f"{FAULTS}test_preempted.py::test_what_was_asked_for_when_no_rank_lived_does_not_end_the_next_run":
        "an order names its session, and the coordinator, each node and each rank compare it",
}  # fmt: skip
