"""Guards of a job's journal: what a daemon that is killed, or a store that fails, may not cost."""

from tests.guards.guard import Edit, Guard, nodes_guard, play_guard
from tests.guards.guard import fault_guard as _row

_JOURNALS, _CORE = "ckptd/daemon/journals.py", "ckptd/core/coordinator/journal.py"
_UNIT, _BOUND = "tests/unit/", "        self._bound(journal)"
_VOTES = "test_what_an_earlier_daemon_drained_and_this_one_commits_is_on_record_without_a_time_of_its_drain"

ROWS = (
    _row(
        "journal-is-put-when-a-run-ends", _JOURNALS,
        "due = now if full or isinstance(action.entry, RunEnded) else now + FLUSH_S", "due = now + 10 * FLUSH_S",
        "journal.py::test_the_journal_of_a_job_is_there_when_its_daemon_is_not",
    ).beside(_JOURNALS, "journal.gone, journal.due = True, time.monotonic()", "journal.gone = True"),
    _row(
        "journal-knows-where-ranks-read", _CORE,
        "            self._tiers = order.tiers\n", "",
        "journal.py::test_a_load_is_on_record_with_where_its_ranks_read",
    ),
    _row(
        "journal-of-an-earlier-daemon-is-taken-over", "ckptd/daemon/loop.py",
        "        self._journals.adopt()\n", "",
        "journal.py::test_a_killed_daemon_costs_no_record_that_its_arena_has",
    ),
    _row(
        "journal-is-put-again", _JOURNALS,
        "        journal.due = now + journal.pause_s\n", "        journal.due = None\n",
        "journal.py::test_a_killed_worker_costs_nothing",
    ),
    _row(
        "journal-that-was-refused-is-kept", _JOURNALS,
        "if problem := problem_of(reply):", "if (problem := problem_of(reply)) and not problem:",
        "journal.py::test_a_store_that_refuses_to_be_written_costs_no_save",
    ),
    _row(
        "journal-goes-on-after-a-store-that-hung", _JOURNALS,
        "        del self._busy[store]\n", "",
        "journal.py::test_a_store_that_hangs_costs_no_save_and_gets_the_journal_when_it_answers",
    ),
    _row(
        "history-knows-how-a-run-ended", "ckptd/history/runs.py",
        "self.ended, self.how, self.over = entry.at, entry.how, True", "pass",
        "history.py::test_a_job_that_was_killed_and_resumed_has_its_history",
    ),
    _row(
        "history-knows-that-an-exception-is-a-failure", "client/ckptd_client/client.py",
        "self._link.close(error)", "self._link.close()",
        "history.py::test_a_training_that_an_exception_ends_has_failed_and_a_new_job_is_known_by_name",
    ),
    _row(
        "history-knows-what-became-durable", "ckptd/history/runs.py",
        "save.drained_nbytes, save.end = entry.nbytes, End.DURABLE.value", "save.drained_nbytes = entry.nbytes",
        "history.py::test_a_job_whose_daemon_was_killed_too_ended_without_a_word",
    ),
    _row(
        "account-is-read-from-the-journal", "ckptd/store/worker.py",
        "AccountRead(others, account_of(journal.entries))", "AccountRead(others, account_of([]))",
        "account.py::test_counts_and_times_go_on_when_another_daemon_takes_over",
    ),
    _row(
        "account-has-the-times-of-its-runs", "ckptd/history/account.py",
        "        present.mark(at, step)\n", "",
        "account.py::test_the_figures_are_those_that_history_reads_from_the_store",
    ),
    _row(
        "steps-are-read-before-a-board-goes", "ckptd/daemon/loop.py",
        "        self._journals.marks.look()  # the boards of ranks that have ended go\n", "",
        "account.py::test_steps_are_on_record_as_far_as_the_ranks_came_when_they_were_killed",
    ),
    nodes_guard(
        "account-is-read-by-the-next-coordinator", "ckptd/store/worker.py",
        "AccountRead(others, account_of(journal.entries))", "AccountRead(others, account_of([]))",
        "account.py::test_counts_go_on_at_the_daemon_of_another_node",
    ),
    play_guard(
        "journal-has-each-durable-save", _CORE,
        "elif record.drain_since is not None or save == self._committed or not incarnation:",
        "elif not incarnation and record.failures:",
    ),
    play_guard("fetched-segments-have-bytes", "ckptd/core/node/node.py", "nbytes=seal.image_nbytes, ", ""),
    play_guard(
        "journal-has-no-other-end-as-durable", _CORE,
        "if order.end is not End.DURABLE:", "if order.end is End.ABANDONED:",
    ),
    Guard(
        "a-commit-of-votes-that-were-found-is-on-record",
        (Edit(_CORE, "record.drain_since is not None or save == self._committed or not", "record.drain_since or not"),),
        (f"{_UNIT}core/test_journal.py::{_VOTES}",),
    ),
    Guard(
        "a-record-says-what-went-for-it",
        (Edit(_JOURNALS, f"{_BOUND}  # this record says what went\n", ""),
         Edit(_JOURNALS, "        journal.missing = 0\n", "        journal.missing = 0\n" + _BOUND + "\n")),
        (f"{_UNIT}daemon/test_journals.py::test_no_record_goes_without_a_word_for_the_last_one",),
    ),
    play_guard("journal-has-a-run-to-its-end", _CORE, "elif not sessions.peopled:", "elif sessions.departed:"),
)  # fmt: skip
