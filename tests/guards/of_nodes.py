"""Guards of promises between nodes: each fault test of tests/faults/nodes needs one."""

from tests.guards.guard import NODES, Guard

_COORDINATOR = "ckptd/core/coordinator/"


def _row(name: str, file: str, text: str, removed: str, *tests: str) -> Guard:
    return Guard(name, file, text, removed, tuple(f"{NODES}test_{test}" for test in tests))


_DAMAGE = (
    _row(
        "a-block-read-from-memory-is-checked", "client/ckptd_client/_load/reader.py",
        "source.check(index, found.value())", "pass",
        "damage.py::test_in_a_slot_that_is_read_back_it_is_repaired_from_parity[xor]",
    ),
    _row(
        "a-block-is-checked-before-it-is-sent", "ckptd/shared/bulk/server.py",
        "served.check(offset, nbytes)", "pass",
        "damage.py::test_in_a_slot_while_it_is_encoded_it_never_reaches_parity",
    ),
    _row(
        "a-rebuilt-block-is-checked", "ckptd/parity/rebuild.py",
        "            if not whole:\n", "            if False:\n",
        "damage.py::test_in_what_a_rebuild_needs[slot-xor]",
        "links.py::test_a_flipped_bit_on_the_wire_is_never_in_a_rebuilt_shard",
    ),
    _row(
        "a-frame-of-the-wire-is-checked", "ckptd/shared/bulk/client.py",
        "if not marks.is_right(found, running):", "if False:",
        "links.py::test_a_flipped_bit_on_the_wire_is_never_in_the_parity",
    ),
    _row(
        "verify-compares-digests", "ckptd/checkpoint/verify.py",
        'report.problem(inside[0].path, f"digest', '_ = (inside[0].path, f"digest',
        "integrity.py::test_staged_protected_durable_and_back_by_each_tier",
    ),
    _row(
        "ranks-compare-their-keys", "client/ckptd_client/_daemon/topology.py",
        "other = next((rank for rank, integrity in enumerate(labels) if integrity != labels[0]), None)", "other = None",
        "integrity.py::test_ranks_whose_nodes_have_other_keys_find_out_at_connect",
    ),
)  # fmt: skip

_FILES = (
    _row(
        "every-node-gets-all-files-from-memory", f"{_COORDINATOR}restores.py",
        "if save in r.unwhole or save not in self._saves.records:", "if True:",
        "files.py::test_files_of_a_lost_node_come_from_parity",
    ),
)  # fmt: skip

ROWS = (*_DAMAGE, *_FILES)  # fmt: skip
