"""Guards of admission: who may bring a daemon into a session, and which bytes make a topology."""

from tests.guards.guard import Edit, Guard

_CONNECT = "tests/unit/core/nodes/test_connect_costs.py"
_COLUMNS = "tests/unit/shared/test_columns.py"
_MEETINGS = "tests/unit/peers/test_meetings.py"


def _row(name: str, file: str, text: str, removed: str, *tests: str) -> Guard:
    return Guard(name, (Edit(file, text, removed),), tests)


ROWS = (
    _row(
        "a-ticket-is-of-one-session", "ckptd/peers/meetings.py",
        "if not isinstance(body, Present) or (body.job, body.session) != (self.job, self.session):",
        "if not isinstance(body, Present):",
        f"{_MEETINGS}::test_a_ticket_is_good_for_one_session_and_one_message",
    ),
    _row(
        "a-ticket-brings-no-other-name", "ckptd/peers/meetings.py",
        "        if peer.node != envelope.sender:\n", "        if False:\n",
        f"{_MEETINGS}::test_a_ticket_is_good_for_one_session_and_one_message",
    ),
    _row(
        "a-ticket-replaces-no-daemon", "ckptd/peers/meetings.py",
        "if self.came.setdefault(peer.node, peer.key) == peer.key:", "if True:",
        f"{_MEETINGS}::test_a_second_daemon_of_one_name_is_not_accepted_and_is_reported",
    ),
    _row(
        "a-ticket-ends", "ckptd/peers/meetings.py",
        "            self._here.pop(public, None)\n", "            pass\n",
        f"{_MEETINGS}::test_a_ticket_ends_with_its_session",
    ),
    _row(
        "a-topology-has-its-digest", "ckptd/shared/protocol/columns.py",
        "if digest_of(packed.keys, plain) != packed.digest:", "if False:",
        f"{_COLUMNS}::test_one_other_byte_is_refused",
    ),
    _row(
        "columns-do-not-expand-without-end", "ckptd/shared/protocol/columns.py",
        "inflater.decompress(packed.rest, _MAX_PLAIN_NBYTES)", "inflater.decompress(packed.rest)",
        f"{_COLUMNS}::test_bytes_that_expand_are_cut_off",
    ),
    _row(
        "a-topology-is-taken-when-it-was-asked-for", "ckptd/core/node/known_topologies.py",
        "if digest not in self._wanted and event.node != self._node:", "if False:",
        f"{_CONNECT}::test_a_topology_that_no_coordinator_named_is_not_taken",
    ),
    _row(
        "a-rank-has-one-node", "ckptd/core/placement.py",
        "if other != node and other not in gone:", "if False:",
        f"{_CONNECT}::test_ranks_that_cannot_be_one_job_are_refused_on_all_nodes",
    ),
)  # fmt: skip
