"""Guards of loads by DCP: whether all ranks load one whole checkpoint."""

from tests.guards.guard import Edit, Guard

_LOAD = "client/ckptd_client/_load/"


def _row(name: str, file: str, text: str, removed: str, *tests: str) -> Guard:
    return Guard(name, (Edit(file, text, removed),), tests)


ROWS = (
    _row(
        "ranks-that-agree-look-at-all-records", f"{_LOAD}rounds.py",
        "found.check(range(found.world_size) if whole else _share(link.group, found.world_size))", "pass",
        "tests/unit/client/load/test_loads.py"
        "::test_ranks_that_agree_on_a_checkpoint_look_at_all_of_its_records_together",
    ),
    _row(
        "ranks-of-one-dcp-load-found-one-checkpoint", f"{_LOAD}shared_read/planned.py",
        "if one.found.mark != offers[0].found.mark:", "if False:",
        "tests/unit/client/load/test_planned.py::test_ranks_that_found_different_checkpoints_load_nothing",
    ),
    _row(
        "a-loopback-address-is-no-other-machines", f"{_LOAD}shared_read/planned.py",
        "one.exchange if not several or not _is_loopback(one.exchange) else None", "one.exchange",
        "tests/unit/client/load/test_planned.py"
        "::test_a_loopback_address_is_one_only_where_all_ranks_are_of_one_machine",
    ),
)  # fmt: skip
