"""Guards of links: packets that a leader passes on, what is left when it is gone, messages that wait in the outbox."""

from tests.guards.guard import Edit, Guard, nodes_guard

_LINKS = "tests/unit/peers/test_relayed_links.py"
_OUTBOX = "tests/unit/peers/test_outbox.py"
_PATH = "tests/unit/peers/test_path.py"
_WATCHES = "tests/unit/peers/test_watches.py"


def _row(name: str, file: str, text: str, removed: str, *tests: str) -> Guard:
    return Guard(name, (Edit(f"ckptd/peers/{file}", text, removed),), tests)


ROWS = (
    _row(
        "a-reader-is-there-before-the-first-report", "watches.py",
        'name = f"inproc://reports-{made.FD}"', 'made.monitor(name := f"inproc://reports-{made.FD}", _REPORTED)',
        f"{_WATCHES}::test_no_descriptor_for_the_reason_of_a_failed_dial_holds_nothing_up[1]",
    ),
    _row(
        "few-sockets-are-watched-at-once", "watches.py", "if self._count >= _MOST:", "if False:",
        f"{_WATCHES}::test_of_many_that_do_not_answer_the_reason_is_asked_of_a_few",
    ),
    nodes_guard(
        "a-silent-leader-is-left", "ckptd/peers/path.py",
        "return self.relayed and listened_at", "return False and listened_at",
        "leaders.py::test_a_leader_that_is_stopped_during_saves_is_left_and_gone_back_to",
        "leaders.py::test_a_leader_that_is_killed_during_a_save_costs_the_others_nothing",
    ),
    nodes_guard(
        "a-member-tries-its-leader", "ckptd/peers/relayed_links.py",
        "        self._post(via, remote.path.next_relayed, remote, sign)\n", "",
        "leaders.py::test_the_coordinators_daemon_is_killed_during_a_save",
    ),
    _row(
        "a-packet-comes-from-the-leader-of-its-sender", "relayed_links.py",
        "or not self._is_relay_of(via, sender)", "or False",
        f"{_LINKS}::test_a_packet_in_a_members_name_is_taken_from_the_leader_that_was_named_alone",
        f"{_LINKS}::test_a_member_takes_packets_of_its_coordinator_from_its_leader_alone",
        f"{_LINKS}::test_a_late_bundle_of_an_earlier_leader_moves_nothing",
    ),
    _row(
        "the-path-in-force-keeps-its-leader", "relayed_links.py",
        "return remote.path.via == via or ", "return ",
        f"{_LINKS}::test_until_a_member_knows_of_another_leader_the_earlier_one_passes_its_packets_on",
    ),
    _row(
        "a-relayed-link-brings-no-bundle", "relayed_links.py",
        "if bundle.job not in remote.jobs or remote.path.relayed:", "if bundle.job not in remote.jobs:",
        f"{_LINKS}::test_a_bundle_within_a_bundle_and_of_another_job_are_refused",
    ),
    _row(
        "a-packet-of-no-connection-moves-nothing", "relayed_links.py",
        "(packet.end, packet.to) != (sign.to, sign.end)", "False",
        f"{_LINKS}::test_a_packet_of_no_connection_moves_no_path",
    ),
    _row(
        "a-late-packet-moves-nothing", "path.py",
        "if number < self.number or number % 2", "if number % 2",
        f"{_PATH}::test_an_older_number_moves_nothing_and_is_no_sign_of_the_path",
    ),
    _row(
        "bundles-leave-before-packets-to-leaders", "relayed_links.py",
        "if remote.peer.node in self._leaders:\n            self._behind", "if False:\n            self._behind",
        f"{_LINKS}::test_what_a_coordinator_says_last_reaches_members_though_their_leader_forgets_the_job_at_once",
    ),
    Guard(
        "members-keep-their-leader",
        (Edit("ckptd/core/node/kept_links.py", "return self._relays  # it is on its way", "return {}  #"),),
        ("tests/unit/core/nodes/test_kept_links.py::test_members_keep_their_leader_until_they_know_another_one",),
    ),
    _row(
        "nothing-of-an-earlier-link-leaves-on-a-new-one", "plane.py",
        "        self._outbox.drop(remote.peer.node)\n        super()._up(", "        super()._up(",
        f"{_OUTBOX}::test_what_waits_for_a_daemon_that_ended_is_not_sent_to_the_next_one",
    ),
    _row(
        "last-words-do-not-stay-in-the-outbox", "plane.py",
        "        self._outbox.send_more(math.inf)\n        self.meetings.forget(job)",
        "        self.meetings.forget(job)",
        f"{_OUTBOX}::test_last_words_leave_before_the_end[forget]",
    ),
    _row(
        "what-waits-is-not-overtaken", "outbox.py",
        "if self._waiting or self._clock() >= self._until:", "if self._clock() >= self._until:",
        f"{_OUTBOX}::test_a_later_message_does_not_overtake_those_that_wait",
    ),
)  # fmt: skip
